"""From the global view to this rank's part: the DTensors of an attention op as local tensors.

q says how the op is cut. On an axis where q holds a shard of its rows, keys and values must be
whole; where it holds a shard of its heads or batch, they hold the same shard. Gradients of what is
whole are partial on that axis: each rank's rows contribute their part.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from hp_cp.attention import dropout_seed
from hp_mesh._torch import redistribute, to_local
from hp_mesh.checks import fail
from hp_mesh.plain import cut_head_group, parts_beside_cp, share_of_replicated
from hp_mesh.view import View
from hp_mesh.window import AttentionWindow, Range

__all__ = [
    "beside_scores",
    "block_seed",
    "keys_beside",
    "local_mask",
    "on_mesh",
    "query_window",
    "rows_beside",
    "shard_range",
]


def on_mesh(view: View, tensor: Tensor) -> DTensor:
    """Return ``tensor`` as a DTensor of the view; a plain one is the same on all ranks.

    Sums that are still partial, shards of the head size and strided shards are made whole: softmax
    of a part is not a part of softmax.
    """
    if isinstance(tensor, DTensor):
        placements = [
            p if type(p) is Shard and p.dim < tensor.ndim - 1 else Replicate()
            for p in tensor.placements
        ]
        if placements != list(tensor.placements):
            tensor = tensor.redistribute(view.mesh, placements)
        return tensor
    return share_of_replicated(tensor, view.mesh, [Replicate()] * view.mesh.ndim, view)


def shard_range(mesh: DeviceMesh, placements: Sequence[Placement], dim: int, size: int) -> Range:
    """Return the half-open range of ``dim`` (global ``size``) that this rank holds."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "the boundary runs on ranks of its mesh"
    index, parts = 0, 1
    for axis, placement in enumerate(placements):
        if placement.is_shard(dim):
            index, parts = index * mesh.size(axis) + coordinate[axis], parts * mesh.size(axis)
    part = size // parts
    return index * part, (index + 1) * part


def query_window(view: View, q: DTensor, seq_dim: int, key_length: int) -> AttentionWindow:
    """Return the rows of ``q`` on this rank, with ``key_length`` keys to see."""
    is_cut = any(p.is_shard(seq_dim) for p in q.placements)
    if view.is_balanced and is_cut:  # a half in head-tail order: only the view knows its place
        return view.window
    start, stop = shard_range(view.mesh, q.placements, seq_dim, q.size(seq_dim))
    return AttentionWindow(start, stop - start, key_length, q.size(seq_dim))


def _grads(view: View, target: Sequence[Placement], q: DTensor) -> list[Placement]:
    return [
        Partial()
        if isinstance(placement, Replicate) and (axis in view.cp_axes or isinstance(of_q, Shard))
        else placement
        for axis, (placement, of_q) in enumerate(zip(target, q.placements, strict=True))
    ]


def _as_placed(view: View, tensor: DTensor, target: Sequence[Placement], q: DTensor) -> Tensor:
    tensor = redistribute(tensor, target)
    return to_local(tensor, _grads(view, target, q))


def keys_beside(
    view: View,
    tensor: DTensor,
    q: DTensor,
    seq_dim: int,
    where: str,
    *,
    streamed_axis: int | None = None,
) -> Tensor:
    """Return the local keys or values that the rows and heads of ``q`` on this rank need.

    Args:
        view: The active view.
        tensor: Keys or values, dims lined up with those of ``q`` from the right.
        q: The queries.
        seq_dim: Sequence dim of ``q``.
        where: Name of the op, for errors.
        streamed_axis: Axis along which they stay this rank's shard.
    """
    if streamed_axis is None and view.streamed is not None and view.streamed.holds(tensor):
        raise view.streamed.refusal(where.removeprefix(f"{view.where}: "))
    target: list[Placement] = []
    for axis, (placement, of_q) in enumerate(zip(tensor.placements, q.placements, strict=True)):
        if axis == streamed_axis:
            target.append(placement)
            continue
        dim = of_q.dim + tensor.ndim - q.ndim if isinstance(of_q, Shard) else -1
        if dim < 0 or of_q.is_shard(seq_dim) or tensor.size(dim) == 1:
            target.append(Replicate())
            continue
        parts = view.mesh.size(axis)
        if not placement.is_shard(dim) and tensor.size(dim) % parts:
            raise fail(
                where,
                f"k or v {list(tensor.shape)} with {placement} must be cut like q "
                f"{list(q.shape)} with {of_q}, but dim {dim} ({tensor.size(dim)}) is not divisible "
                f"by {parts}",
                "repeat the KV heads up to the query heads first",
            )
        target.append(Shard(dim))
    return _as_placed(view, tensor, target, q)


def local_mask(view: View, mask: Tensor | None, q: DTensor, head_dim: int | None) -> Tensor | None:
    """Return ``mask`` for the local op: a DTensor cut as ``q`` is, a plain one as it came.

    A plain mask is cut by its shape in `hp_cp.attention`; only heads that a TP rank has already cut
    are brought down to this rank's here.
    """
    if isinstance(mask, DTensor):
        target: list[Placement] = []
        for placement in q.placements:
            dim = placement.dim + mask.ndim - q.ndim if isinstance(placement, Shard) else -1
            target.append(Shard(dim) if dim >= 0 and mask.size(dim) > 1 else Replicate())
        return _as_placed(view, mask, target, q)
    if mask is None or mask.ndim < 3 or head_dim is None:
        return mask
    if mask.requires_grad and any(
        isinstance(p, Shard) for axis, p in enumerate(q.placements) if axis not in view.cp_axes
    ):
        raise fail(
            f"{view.where}: attn_mask",
            f"a plain mask {list(mask.shape)} that requires grad must not meet q that is cut over "
            "axes other than CP: each of their ranks would keep a part of its gradient",
            "make it a DTensor on the tensor-parallel mesh, or add it to the scores yourself",
        )
    size = q.size(head_dim)
    mask = cut_head_group(view, mask, mask.ndim - 3, parts_beside_cp(view, q, head_dim))
    foreign = [Replicate() if axis in view.cp_axes else p for axis, p in enumerate(q.placements)]
    start, stop = shard_range(view.mesh, foreign, head_dim, size)
    if mask.size(-3) == stop - start and stop - start != size:
        first, last = shard_range(view.mesh, q.placements, head_dim, size)
        return mask.narrow(-3, first - start, last - first)
    return mask


def rows_beside(view: View, tensor: Tensor, q: DTensor) -> Tensor:
    """Return this rank's part of another tensor of queries, whose dims are those of ``q``."""
    return _as_placed(view, on_mesh(view, tensor), q.placements, q)


def beside_scores(
    view: View,
    tensor: Tensor | None,
    q: DTensor,
    *,
    batch_dim: int | None,
    head_dim: int,
    parts: int,
) -> Tensor | None:
    """Return a mask, bias or sinks for this rank's batch and group of heads.

    Rows and heads of a rank are cut by their number in `hp_cp.attention`, so they are whole here,
    whatever dims they have in ``q``.

    Args:
        view: The active view.
        tensor: ``[B, H, S, K]`` with 1 in place of any dim, ``[S, K]``, or ``[H]``.
        q: The queries.
        batch_dim: Batch dim of ``q``; None if it has none.
        head_dim: Head dim of ``tensor``, negative.
        parts: Over how many ranks of axes other than CP the heads of q are cut.
    """
    if tensor is None:
        return None
    if isinstance(tensor, DTensor) and view.owns(tensor):
        has_batch = tensor.ndim == 4 and tensor.size(0) > 1
        target = [
            Shard(0) if has_batch and isinstance(p, Shard) and p.dim == batch_dim else Replicate()
            for p in q.placements
        ]
        tensor = _as_placed(view, tensor, target, q)
    if tensor.ndim < -head_dim:
        return tensor
    return cut_head_group(view, tensor, tensor.ndim + head_dim, parts)


def block_seed(view: View, placements: Sequence[Placement], dropout_p: float) -> int | None:
    """Draw a dropout seed that differs where the data does: per shard and per sub-call."""
    if dropout_p <= 0.0:
        return None
    coordinate = view.mesh.get_coordinate()
    assert coordinate is not None, "the boundary runs on ranks of its mesh"
    block = [
        index if isinstance(placement, Shard) else 0
        for index, placement in zip(coordinate, placements, strict=True)
    ]
    return dropout_seed([*block, view.window.query_start])
