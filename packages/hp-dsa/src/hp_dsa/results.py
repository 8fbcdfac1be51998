"""What an operator returned for each window, joined to the rows of this rank and wrapped again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from hp_dsa.operators import Result
from hp_dsa.view import DSAView
from hp_mesh._torch import from_local
from hp_mesh.documents import KeyWindow

__all__ = ["join_keys", "join_results"]


def join_results(
    kinds: Sequence[Result],
    parts: Sequence[tuple[Tensor, ...]],
    windows: Sequence[KeyWindow],
    query: Tensor,
    view: DSAView,
) -> Any:
    """Return an operator's outputs as if it had been called once.

    Args:
        kinds: What its outputs are; a single one is not in a tuple.
        parts: What it returned for each window.
        windows: The windows.
        query: What it was given; where this is a DTensor, outputs become DTensors laid out as it.
        view: The view that it ran under.
    """
    outs = []
    for kind, several in zip(kinds, zip(*parts, strict=True), strict=True):
        joined, cp = _join(kind, list(several), windows, view)
        if cp is not None and view.owns(query):
            assert isinstance(query, DTensor), "the view has looked"
            placements = view.placements(cp, _foreign(kind, joined, query, view))
            joined = from_local(joined, view.mesh, placements, view.partial_grads(placements))
        outs.append(joined)
    return outs[0] if len(outs) == 1 else tuple(outs)


def join_keys(
    parts: Sequence[Tensor], windows: Sequence[KeyWindow], num_keys: int, dim: int
) -> Tensor:
    """Return gradients of the windows' keys summed in a tensor of all keys."""
    shape = list(parts[0].shape)
    if len(parts) == 1 and shape[dim] == num_keys:
        return parts[0]
    shape[dim] = num_keys
    whole = parts[0].new_zeros(shape)
    for part, window in zip(parts, windows, strict=True):
        whole.narrow(dim, window.keys[0], window.num_keys).add_(part)
    return whole


def _join(
    kind: Result, parts: list[Tensor], windows: Sequence[KeyWindow], view: DSAView
) -> tuple[Tensor, Placement | None]:
    """Return one output and its placement over CP; None if it was not asked for, and is empty."""
    plan = view.plan
    dim = plan.statistics_dim if kind == "statistics" else plan.seq_dim
    if kind == "sum":
        return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0], Partial()
    if parts[0].ndim <= dim:
        return parts[0], None
    if kind == "keys":
        return join_keys(parts, windows, view.num_keys, dim), Partial()
    return view.join_rows(parts, dim), Shard(dim)


def _foreign(kind: Result, x: Tensor, query: DTensor, view: DSAView) -> list[Placement]:
    """Return where an output lies on the axes that are not CP: as the query does."""
    placements: list[Placement] = []
    for axis, placement in enumerate(query.placements):
        if axis == view.cp_axis:
            continue
        if isinstance(placement, Shard) and placement.dim > view.plan.seq_dim:  # heads
            dim = x.ndim - 1 if kind == "statistics" else placement.dim
            placements.append(Shard(dim))
        else:
            placements.append(placement if isinstance(placement, Shard) else Replicate())
    return placements
