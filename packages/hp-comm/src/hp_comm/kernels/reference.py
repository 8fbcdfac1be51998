"""Every kernel that moves data, in plain torch: the definition, and the path on a CPU.

See `hp_comm.kernels.layout` for what a cut is and how a buffer is laid out.

`pack` and `unpack` are linear and each is the other's transpose, so each is also the other's
gradient; where no position is sent twice, `unpack` undoes `pack`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hp_comm.kernels.layout import Copy, View, copies, packed_size

__all__ = ["pack", "unpack", "zero_what_nobody_sends"]


def of(view: View, x: Tensor) -> Tensor:
    """Return ``view`` of the memory that ``x`` starts at."""
    return x.as_strided(view.size, view.stride, x.storage_offset() + view.offset)


def _planned(
    xs: Sequence[Tensor],
    dims: list[int],
    counts: list[int],
    index: list[int],
    joined: Sequence[int],
) -> tuple[Copy, ...]:
    return copies(
        tuple(tuple(x.shape) for x in xs),
        tuple(x.stride() for x in xs),
        tuple(dims),
        tuple(counts),
        tuple(index),
        tuple(joined),
    )


def pack(
    xs: list[Tensor],
    dims: list[int],
    counts: list[int],
    index: list[int],
    joined: Sequence[int] = (),
) -> Tensor:
    """Write what each rank gets from every tensor into one send buffer.

    Args:
        xs: Tensors of one dtype, ``[.., n_t, ..]`` with ``n_t`` on ``dims[t]``, any strides.
        dims: The dim that is cut, per tensor, not negative.
        counts: Positions that each rank gets, ``P`` numbers per tensor.
        index: Which positions, in the order of ``counts``; empty for consecutive ranges.
        joined: ``[first, along]``: tensors side by side, see `hp_comm.kernels.layout`. They may
            differ on ``along`` only.

    Returns:
        Flat dense buffer; rank ``p``'s part holds its slice of ``xs[0]``, of ``xs[1]``, and so on,
        each dense, or all of them side by side.
    """
    planned = _planned(xs, dims, counts, index, joined)
    buffer = xs[0].new_empty(packed_size([list(x.shape) for x in xs], dims, counts))
    for copy in planned:
        of(copy.place, buffer).copy_(of(copy.own, xs[copy.t]))
    return buffer


def unpack(
    buffer: Tensor,
    shapes: list[list[int]],
    dims: list[int],
    counts: list[int],
    index: list[int],
    joined: Sequence[int] = (),
) -> list[Tensor]:
    """Split a buffer laid out by `pack` into tensors; positions sent several times are summed.

    Args:
        buffer: Flat dense buffer.
        shapes: Shape of each result, ``[.., n_t, ..]`` with ``n_t`` on ``dims[t]``.
        dims: As in `pack`.
        counts: As in `pack`: here, positions that came from each rank.
        index: As in `pack`; a position that is not listed becomes zero.
        joined: As in `pack`.

    Returns:
        Dense tensors. Sums run over ranks in ascending order, in the buffer's dtype.
    """
    outs = [buffer.new_empty(shape) for shape in shapes]
    planned = _planned(outs, dims, counts, index, joined)
    zero_what_nobody_sends(outs, dims, counts, index)
    for copy in planned:
        own, place = of(copy.own, outs[copy.t]), of(copy.place, buffer)
        if copy.again:
            own.add_(place)
        else:
            own.copy_(place)
    return outs


def zero_what_nobody_sends(
    outs: list[Tensor], dims: list[int], counts: list[int], index: list[int]
) -> None:
    """Zero the positions of results that no rank's part holds."""
    num_parts = len(counts) // len(outs)
    at = 0
    for t, out in enumerate(outs):
        total = sum(counts[t * num_parts : (t + 1) * num_parts])
        if index:
            for position in set(range(out.shape[dims[t]])) - set(index[at : at + total]):
                out.select(dims[t], position).zero_()
        elif total < out.shape[dims[t]]:
            out.narrow(dims[t], total, out.shape[dims[t]] - total).zero_()
        at += total
