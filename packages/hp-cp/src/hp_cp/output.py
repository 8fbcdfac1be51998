"""What the attention module returned: where its sequence and heads are, and this rank's part.

A DTensor says itself which dims are sharded. A plain tensor (a core that calls ``to_local()``, or
``use_local_input=True``) has the dims of q unless the style says otherwise; it may hold this rank's
rows and heads, or all of them, and is cut or refused by its shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard

from hp_mesh._torch import redistribute, to_local
from hp_mesh.checks import fail, require
from hp_mesh.placement import normalize_dim
from hp_mesh.view import View
from hp_mesh.window import Range

__all__ = ["OutputDims", "output_dims"]


@dataclass(frozen=True)
class OutputDims:
    """Dims and layout of one output inside the boundary.

    Attributes:
        seq_dim: Dim of the sequence.
        head_dim: Dim of the heads, also when they are merged with the head size (``[B, S, H*D]``).
        foreign: Placements on the axes that are not CP.
        trades_heads: Whether the heads are sharded over the Ulysses ranks and must be traded back.
        target: CP placements that the DTensor is brought to before it becomes local.
        cuts: ``(dim, start, length)`` cuts that a plain output of global size needs.
    """

    seq_dim: int
    head_dim: int
    foreign: tuple[Placement, ...]
    trades_heads: bool
    target: tuple[Placement, ...] = ()
    cuts: tuple[tuple[int, int, int], ...] = ()

    def take(self, output: Tensor, view: View) -> Tensor:
        """Return this rank's part of ``output`` as a plain tensor."""
        if isinstance(output, DTensor):
            output = redistribute(output, self.target)
            return to_local(output, self.target)
        for dim, start, length in self.cuts:
            output = output.narrow(dim, start, length)
        return output


def output_dims(
    output: Tensor,
    *,
    view: View,
    in_dims: tuple[int, int],
    foreign: Sequence[Placement],
    seq_dim: int | None,
    head_dim: int | None,
    heads: tuple[Range, int],
    has_heads: bool,
    view_length: int,
) -> OutputDims:
    """Read the dims of ``output``, or say why they cannot be known.

    Args:
        output: Tensor that the module returned.
        view: The view of the call.
        in_dims: ``(seq_dim, head_dim)`` of q.
        foreign: Placements of q on the axes that are not CP.
        seq_dim: What the style was told about the output, or None.
        head_dim: The same for its heads.
        heads: Query heads of this rank, and their number.
        has_heads: Whether heads are sharded over CP ranks.
        view_length: Sequence length of q inside the boundary.
    """
    named_seq = in_dims[0]
    if seq_dim is not None:
        named_seq = normalize_dim(seq_dim, output.ndim, "output_seq_dim", view.where)
    named_head = _other_dim(named_seq, in_dims)
    if head_dim is not None:
        named_head = normalize_dim(head_dim, output.ndim, "output_head_dim", view.where)
    if isinstance(output, DTensor):
        return _of_dtensor(
            output,
            view,
            in_dims,
            named_seq if seq_dim is not None else None,
            named_head if head_dim is not None else None,
            has_heads,
            view_length,
        )
    return _of_plain(output, view, in_dims, foreign, [named_seq, named_head], heads, has_heads)


def _of_dtensor(
    output: DTensor,
    view: View,
    in_dims: tuple[int, int],
    named_seq: int | None,
    named_head: int | None,
    has_heads: bool,
    view_length: int,
) -> OutputDims:
    require(
        view.owns(output),
        view.where,
        f"the output is a DTensor on {output.device_mesh}, which must be the mesh inside the "
        f"boundary ({view.mesh})",
        "return what was computed from q, k and v, or a plain tensor",
    )
    placements = tuple(output.placements)
    head_axis = view.cp_axes[-1] if has_heads else None
    head = placements[head_axis] if head_axis is not None else None
    head_dim = head.dim if isinstance(head, Shard) else None
    row_axes = [axis for axis in view.cp_axes if axis != head_axis]
    sharded = {p.dim for p in (placements[axis] for axis in row_axes) if isinstance(p, Shard)}
    if len(sharded) == 1:
        (seq_dim,) = sharded
    elif named_seq is not None:
        seq_dim = named_seq
    else:
        seq_dim = _find_seq_dim(output, in_dims, head_dim, view_length, view.where)
    require(
        seq_dim < output.ndim and output.size(seq_dim) == view_length,
        view.where,
        f"the output {list(output.shape)} must have the sequence length ({view_length}) in dim "
        f"{seq_dim}",
        "say where it is with output_seq_dim",
    )
    trades_heads = head_dim is not None and head_dim != seq_dim
    target = list(placements)
    for axis in view.cp_axes:
        if axis != head_axis or not trades_heads:
            target[axis] = Shard(seq_dim)
    return OutputDims(
        seq_dim=seq_dim,
        head_dim=next(
            dim for dim in (head_dim, named_head, _other_dim(seq_dim, in_dims)) if dim is not None
        ),
        foreign=tuple(p for axis, p in enumerate(placements) if axis not in view.cp_axes),
        trades_heads=trades_heads,
        target=tuple(target),
    )


def _other_dim(seq_dim: int, in_dims: tuple[int, int]) -> int:
    """Return the dim of the heads: where they were, or where the sequence was if it has moved."""
    return in_dims[0] if seq_dim == in_dims[1] else in_dims[1]


def _find_seq_dim(
    output: Tensor, in_dims: tuple[int, int], head_dim: int | None, length: int, where: str
) -> int:
    """Return the dim of the sequence: where q had it, where q had the heads, or the only one."""
    in_seq, in_head = in_dims
    order = (in_head, in_seq) if head_dim == in_seq else (in_seq, in_head)
    found = [d for d in range(output.ndim) if output.size(d) == length and d != head_dim]
    for dim in order:
        if dim in found:
            return dim
    if len(found) == 1:
        return found[0]
    raise fail(
        where,
        f"the output {list(output.shape)} has the sequence length ({length}) in dims {found}, "
        "which must be exactly one",
        "say where it is with output_seq_dim",
    )


def _of_plain(
    output: Tensor,
    view: View,
    in_dims: tuple[int, int],
    foreign: Sequence[Placement],
    named: Sequence[int],
    heads: tuple[Range, int],
    has_heads: bool,
) -> OutputDims:
    seq_dim, head_dim = named
    window, (mine, num_heads) = view.window, heads
    cuts: list[tuple[int, int, int]] = []
    way_out = (
        "return this rank's rows and heads, or name the dims with output_seq_dim and "
        "output_head_dim"
    )
    require(
        seq_dim < output.ndim,
        view.where,
        f"the output {list(output.shape)} must have a sequence dim {seq_dim}",
        way_out,
    )
    rows = output.size(seq_dim)
    if rows != window.query_length:
        require(
            rows == window.global_length,
            view.where,
            f"the plain output {list(output.shape)} has {rows} rows in dim {seq_dim}, which must "
            f"be this rank's rows ({window.query_length}) or all of them ({window.global_length})",
            way_out,
        )
        cuts.append((seq_dim, window.query_start, window.query_length))
    if has_heads:
        local = mine[1] - mine[0]
        merged = output.ndim == max(in_dims) + 1  # [B, S, H * D]
        size = output.size(head_dim) if head_dim < output.ndim else 0
        if size != local and not (merged and size % local == 0 and size > 0):
            require(
                size == num_heads,
                view.where,
                f"the plain output {list(output.shape)} has {size} heads in dim {head_dim}, which "
                f"must be this rank's ({local}) or all of them ({num_heads})",
                way_out,
            )
            cuts.append((head_dim, mine[0], local))
    moved = {in_dims[0]: seq_dim, in_dims[1]: head_dim}
    return OutputDims(
        seq_dim=seq_dim,
        head_dim=head_dim,
        foreign=tuple(
            Shard(moved.get(p.dim, p.dim)) if isinstance(p, Shard) else p for p in foreign
        ),
        trades_heads=has_heads,
        cuts=tuple(cuts),
    )
