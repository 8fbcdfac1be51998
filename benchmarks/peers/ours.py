"""Our modes, through the public style on a module written for one device."""

from __future__ import annotations

import functools
from typing import Any

import torch.nn.functional as F
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


class HeadsFirst(nn.Module):
    """Attention as torch's own operator takes it, ``[B, H, S, D]``; local tensors in and out."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output, ``[B, H, S, D]``."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)


def _styled(core: nn.Module, case: Case, **options: Any) -> None:
    mesh = init_device_mesh("cpu", (case.ranks,), mesh_dim_names=("cp",))
    ContextParallel(**options).apply(core, mesh)


def _build(case: Case, group: ProcessGroup, **options: Any) -> Attention:
    core = Core(case.causal)
    _styled(core, case, **options)
    return core


def _build_local(case: Case, group: ProcessGroup) -> Attention:
    """Build what peers are: an attention of plain tensors, which need not know the other ranks."""
    core = HeadsFirst(case.causal)
    _styled(core, case, seq_dim=2, head_dim=1, use_local_input=True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = core(*(x.transpose(1, 2) for x in (q, k, v)))
        return out.transpose(1, 2)

    return attend


def _contender(name: str, mode: str, preflight: str = "first", **options: Any) -> Contender:
    return Contender(f"ours: {name}", functools.partial(_build, **options), mode, preflight)


CONTENDERS = (
    Contender("ours: Ulysses, local tensors", _build_local, "ulysses"),
    _contender("Ulysses", "ulysses"),
    _contender("Ulysses, preflight always", "ulysses", preflight="always"),
    _contender("Hybrid 2x2", "hybrid", ulysses_degree=2),
    _contender("Colossal", "colossal", ulysses_degree=1),
    _contender("Colossal, balanced", "colossal balanced", ulysses_degree=1, load_balance=True),
)
