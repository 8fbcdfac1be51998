"""Our modes, through the public style on a module written for one device."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hp_cp import ContextParallel, init_device_mesh
from peers.cases import Case
from peers.contender import Attention, Contender
from peers.kernel import attention

__all__ = ["CONTENDERS"]


class Core(nn.Module):
    """Attention as a model writes it, ``[B, S, H, D]``."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output, ``[B, S, H, D]``."""
        return attention(q, k, v, causal=self.causal)


def _build(case: Case, group: ProcessGroup, **options: Any) -> Attention:
    core = Core(case.causal)
    mesh = init_device_mesh("cpu", (case.ranks,), mesh_dim_names=("cp",))
    ContextParallel(**options).apply(core, mesh)
    return core


def _contender(name: str, mode: str, preflight: str = "first", **options: Any) -> Contender:
    return Contender(f"ours: {name}", functools.partial(_build, **options), mode, preflight)


CONTENDERS = (
    _contender("Ulysses", "ulysses"),
    _contender("Ulysses, preflight always", "ulysses", preflight="always"),
    _contender("Hybrid 2x2", "hybrid", ulysses_degree=2),
    _contender("Colossal", "colossal", ulysses_degree=1),
    _contender("Colossal, balanced", "colossal balanced", ulysses_degree=1, load_balance=True),
)
