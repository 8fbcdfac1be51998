"""q, k and v as the module is to see them: the view of the call, and DTensors in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

from hp_cp.inputs import LABELS, Inputs
from hp_cp.prepared import without_works
from hp_cp.view import CPView
from hp_cp.windowed import Halo
from hp_mesh._torch import from_local
from hp_mesh.arguments import replace_slots
from hp_mesh.checks import fail
from hp_mesh.lent import lend
from hp_mesh.placement import compose
from hp_mesh.streamed import Streamed
from hp_mesh.view import View
from hp_mesh.window import AttentionWindow

if TYPE_CHECKING:
    from hp_cp.core_boundary import CPBoundary

__all__ = ["describe_view", "hand_over", "wrap"]


def describe_view(boundary: CPBoundary, inputs: Inputs) -> CPView:
    """Describe what the first call of the module computes on this rank."""
    plan, style = boundary.plan, boundary.style
    placements = _cp_placements(boundary, 0, inputs)
    mesh, placements_of_q = compose(inputs.layouts[0], boundary.cp_mesh, placements, boundary.where)
    first = mesh.ndim - boundary.cp_mesh.ndim
    return CPView(
        group=boundary.group,
        call_index=inputs.call_index,
        mesh=mesh,
        cp_axes=tuple(range(first, mesh.ndim)),
        window=_window(boundary, inputs),
        query_placements=placements_of_q,
        heads=inputs.table.query[boundary.rank % plan.ulysses_degree],
        num_heads=inputs.num_heads,
        is_local=style.use_local_input,
        is_balanced=plan.load_balance,
        where=boundary.where,
        head_axis=mesh.ndim - 1 if plan.ulysses_degree > 1 else None,
        streamed=_streamed(boundary, first) if boundary.streams_kv else None,
    )


def hand_over(
    boundary: CPBoundary,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: Inputs,
    view: View,
    tensors: Sequence[Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the call with ``tensors`` for q, k and v, wrapped as the module is to see them."""
    wrapped = [wrap(boundary, x, i, inputs, view) for i, x in enumerate(tensors)]
    return replace_slots(args, without_works(kwargs), inputs.slots, wrapped)


def wrap(boundary: CPBoundary, local: Tensor, which: int, inputs: Inputs, view: View) -> Tensor:
    """Return q (0), k or v as a DTensor of the whole sequence; plain with ``use_local_input``."""
    if boundary.style.use_local_input:
        return local
    placements = _cp_placements(boundary, which, inputs)
    mesh, whole = compose(inputs.layouts[which], boundary.cp_mesh, placements, boundary.where)
    if mesh != view.mesh:
        raise fail(
            boundary.where,
            f"{LABELS[which]} on {mesh} must lie on the same axes as q ({view.mesh})",
            "lay out q, k and v alike over the axes that are not CP",
        )
    wrapped = from_local(local, mesh, whole, view.partial_grads(whole))
    lend(view, wrapped, inputs.locals[which])
    if which > 0 and view.streamed is not None:
        view.streamed.mark(wrapped)
    return wrapped


def _cp_placements(boundary: CPBoundary, which: int, inputs: Inputs) -> list[Placement]:
    """Return the placements of q (0), k or v on the CP mesh, inside the boundary."""
    seq_dim, head_dim = inputs.dims
    is_cut = which == 0 or boundary.streams_kv
    rows: Placement = Shard(seq_dim) if is_cut else Replicate()
    if boundary.plan.mode == "hybrid":
        return [rows, Shard(head_dim)]
    return [Shard(head_dim)] if boundary.plan.mode == "ulysses" else [rows]


def _window(boundary: CPBoundary, inputs: Inputs) -> AttentionWindow:
    """Return this rank's rows; of k and v it sees the whole sequence, which may be another."""
    window = boundary.plan.rows(boundary.rank, boundary.length(inputs))[0]
    if not inputs.is_cross:
        return window
    keys = inputs.locals[1].size(inputs.dims[0])
    if not inputs.kv_is_whole:
        keys *= boundary.plan.cp_size
    return dataclasses.replace(window, key_length=keys)


def _streamed(boundary: CPBoundary, axis: int) -> Streamed:
    """Return how attention takes k and v over mesh axis ``axis``."""
    group, style, where = boundary.colossal_group, boundary.style, boundary.where
    assert group is not None, "there is something to ask for"
    count, window, sinks = style.kv_chunks, style.sliding_window, style.sink_tokens
    if window is None:
        return Streamed(axis, group, count, f"kv_chunks={count}", where)
    option = f"sliding_window={window}" + f", sink_tokens={sinks}" * (sinks > 0)
    return Halo(axis, group, 1, option, where, window, sinks)
