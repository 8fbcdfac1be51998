"""QK-norm and rotary as part of the boundary: done on the way to attention.

What stands between projection and attention in most models changes q and k, so it must come before
an exchange, and an exchange that was started behind the projection would be of the wrong tensor.
`PreparedAttention` is told instead of handed the result: on one device it does the work itself;
under a style the boundary does it, inside the pack of the all-to-all where there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hp_comm import HeadWork
from hp_comm.kernels.arithmetic import prepare
from hp_comm.kernels.ops_heads import check_work
from hp_mesh.checks import fail

__all__ = [
    "PreparedAttention",
    "Works",
    "check_work",
    "describe",
    "done",
    "read_works",
    "without_works",
]

NAMES = ("q_work", "k_work")
Works = tuple[HeadWork | None, HeadWork | None, HeadWork | None]
"""Of q, of k, and of v, which has none."""


class PreparedAttention(nn.Module):
    """Attention that normalises and rotates q and k first; see the head of this file.

    Apply `ContextParallel` or `AsyncContextParallel` to it as to any attention module. With
    `AsyncContextParallel`, hand q and k off behind the projection, saying what is to be done::

        q_work = HeadWork(self.q_norm.weight, cos=cos, sin=sin)      # this rank's rows
        q = self.q_handoff(self.q_proj(x).unflatten(-1, (-1, D)), q_work)
        out = self.core(q, k, v, q_work=q_work, k_work=k_work)       # a PreparedAttention

    Args:
        core: The attention module; called with what is given here but the works.
    """

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: Any,
        q_work: HeadWork | None = None,
        k_work: HeadWork | None = None,
        **kwargs: Any,
    ) -> Any:
        """Prepare q and k, then attend.

        Args:
            q: Queries, in any layout with the numbers of a head in the last dim.
            k: Keys.
            v: Values.
            args: Further arguments of the core.
            q_work: What is to be done to q; ``cos`` and ``sin`` have q's dims, 1 for its heads.
            k_work: What is to be done to k.
            kwargs: Further arguments of the core.
        """
        return self.core(done(q, q_work), done(k, k_work), v, *args, **kwargs)


def done(x: Tensor, work: HeadWork | None) -> Tensor:
    """Return ``x`` with ``work`` done; of a DTensor, to the heads and rows that this rank has."""
    if work is None:
        return x
    if not isinstance(work, HeadWork):
        raise TypeError(f"work ({type(work).__name__}) must be a HeadWork or None")
    check_work("PreparedAttention", x.to_local() if isinstance(x, DTensor) else x, work, None)
    if isinstance(x, DTensor):
        local = prepare(x.to_local(), work)
        return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False)
    return prepare(x, work)


def read_works(where: str, kwargs: Mapping[str, Any], xs: Sequence[Tensor], head_dim: int) -> Works:
    """Return the works in a call, checked against this rank's q and k."""
    found: list[HeadWork | None] = []
    for name, x in zip(NAMES, xs, strict=False):
        work = kwargs.get(name)
        if not isinstance(work, HeadWork):
            found.append(None)  # whatever it is, it is the module's own
            continue
        if any(isinstance(part, DTensor) for part in (work.weight, work.cos, work.sin)):
            raise fail(
                where,
                f"{name} must hold plain tensors, not DTensors",
                "pass weight.to_local(grad_placements=[Partial()]): a rank of tensor parallelism "
                "finds the share of its own heads",
            )
        check_work(f"{where}: {name}", x, work, head_dim)
        found.append(work)
    q_work, k_work = found
    return q_work, k_work, None


def without_works(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keywords for a module whose q and k are prepared."""
    if not any(isinstance(kwargs.get(name), HeadWork) for name in NAMES):
        return kwargs
    return {n: None if n in NAMES and isinstance(v, HeadWork) else v for n, v in kwargs.items()}


def describe(work: HeadWork | None) -> str:
    """Say what every rank must do alike."""
    if work is None:
        return "none"
    kind = "interleaved" if work.interleaved else "halves"
    norm = "no norm"
    if work.weight is not None:
        trained = work.weight.requires_grad and torch.is_grad_enabled()
        norm = f"norm, eps {work.eps}, weight {'trained' if trained else 'frozen'}"
    return f"{norm}, {work.rotary} numbers rotated ({kind})"
