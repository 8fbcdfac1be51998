"""Every kernel of the package in plain torch: the definition, and the path on a CPU.

A *cut* says which slices of one dim of a tensor go to which rank: ``index[t][p]`` lists the
positions on ``dims[t]`` of tensor ``t`` that rank ``p`` gets. It is written flat, because an
operator's schema has no nested lists: ``counts`` holds ``P`` numbers per tensor, ``index`` all
positions in the same order, or nothing when each tensor is cut into consecutive ranges::

    q [B, S, 4, D], k [B, S, 2, D], P = 4     counts = 1 1 1 1   1 1 1 1
    KV heads repeated, not tiled              index  = 0 1 2 3   0 0 1 1

    buffer:   | q head 0, k head 0 | q head 1, k head 0 | q head 2, k head 1 | q head 3, k head 1 |
                 to rank 0            to rank 1            to rank 2            to rank 3

With ``joined = [first, along]`` the dim ``first`` leads on the wire and the tensors of one part lie
side by side along ``along``, as one tensor: of ``q`` and ``k`` above, cut by heads and joined with
``[1, 2]``, rank ``p`` gets rows of ``(q head p, k head ..)``. The ranks' parts then follow one
another as the rows of one ``[S, B, 2, D]``, which needs no unpacking: q and k are slices of it.

`pack` and `unpack` are linear and each is the other's transpose, so each is also the other's
gradient; where no position is sent twice, `unpack` undoes `pack`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

from torch import Tensor

__all__ = ["pack", "unpack"]


class _Run(NamedTuple):
    """Consecutive positions ``[start, start + length)`` that lie together in a part."""

    start: int
    length: int
    again: bool  # an earlier run had these positions too


@lru_cache(maxsize=1024)
def _runs(counts: tuple[int, ...], index: tuple[int, ...]) -> tuple[tuple[_Run, ...], ...]:
    """Return the runs of each part; one that is repeated must be added, the first one copied."""
    if not index:
        starts = [0, *accumulate(counts)]
        return tuple((_Run(s, n, False),) for s, n in zip(starts, counts, strict=False))
    parts: list[tuple[_Run, ...]] = []
    seen: set[int] = set()
    at = 0
    for count in counts:
        runs: list[_Run] = []
        for position in index[at : at + count]:
            again = position in seen
            seen.add(position)
            last = runs[-1] if runs else None
            if last and last.start + last.length == position and last.again == again:
                runs[-1] = _Run(last.start, last.length + 1, again)
            else:
                runs.append(_Run(position, 1, again))
        parts.append(tuple(runs))
        at += count
    return tuple(parts)


def _is_even(counts: Sequence[int], num_parts: int) -> bool:
    return all(count == counts[i - i % num_parts] for i, count in enumerate(counts))


def _with(shape: Sequence[int], dim: int, length: int) -> list[int]:
    return [*shape[:dim], length, *shape[dim + 1 :]]


def _blocks(
    shapes: Sequence[Sequence[int]], dims: Sequence[int], along: int | None, counts: Sequence[int]
) -> tuple[list[list[int]], list[int]]:
    """Return the shape of each tensor's place in one part, and where it starts in the part.

    Joined, starts are positions on ``along``; else, elements.
    """
    places = [_with(shape, dim, n) for shape, dim, n in zip(shapes, dims, counts, strict=True)]
    steps = [prod(place) if along is None else place[along] for place in places]
    return places, [0, *accumulate(steps)]


def _parts_of(
    buffer: Tensor,
    shapes: Sequence[Sequence[int]],
    dims: Sequence[int],
    counts: Sequence[int],
    index: Sequence[int],
    along: int | None,
) -> Iterator[tuple[int, _Run, Tensor]]:
    """Walk the buffer: tensor, run on its dim, and the run's place ``[.., length, ..]``."""
    num_parts = len(counts) // len(shapes)
    table: list[tuple[tuple[_Run, ...], ...]] = []
    at = 0
    for t in range(len(shapes)):
        own = tuple(counts[t * num_parts : (t + 1) * num_parts])
        table.append(_runs(own, tuple(index[at : at + sum(own)])))
        at += sum(own) if index else 0
    offset = 0
    for p in range(num_parts):
        places, starts = _blocks(shapes, dims, along, counts[p::num_parts])
        size = sum(map(prod, places))
        part = buffer[offset : offset + size]
        offset += size
        if along is not None:
            part = part.view(_with(places[0], along, starts[-1]))
        for t, (place, dim) in enumerate(zip(places, dims, strict=True)):
            if along is None:
                piece = part[starts[t] : starts[t + 1]].view(place)
            else:
                piece = part.narrow(along, starts[t], place[along])
            at = 0
            for run in table[t][p]:
                yield t, run, piece.narrow(dim, at, run.length)
                at += run.length


def _even_views(
    buffer: Tensor,
    shapes: Sequence[Sequence[int]],
    dims: Sequence[int],
    num_parts: int,
    along: int | None,
) -> Iterator[Tensor]:
    """View the buffer as one ``[P, .., n/P, ..]`` per tensor: a single copy fills it."""
    counts = [shape[dim] // num_parts for shape, dim in zip(shapes, dims, strict=True)]
    places, starts = _blocks(shapes, dims, along, counts)
    if along is None:
        slabs = buffer.view(num_parts, -1)
        for place, start, stop in zip(places, starts, starts[1:], strict=False):
            yield slabs[:, start:stop].view(num_parts, *place)
    else:
        parts = buffer.view(num_parts, *_with(places[0], along, starts[-1]))
        for place, start in zip(places, starts, strict=False):
            yield parts.narrow(along + 1, start, place[along])


def _split(x: Tensor, dim: int, num_parts: int) -> Tensor:
    parted = (*x.shape[:dim], num_parts, x.shape[dim] // num_parts, *x.shape[dim + 1 :])
    return x.view(parted).movedim(dim, 0)  # [P, .., n/P, ..]


def _lead(
    xs: list[Tensor], dims: list[int], joined: list[int]
) -> tuple[list[Tensor], list[int], int | None]:
    """Return the tensors with the leading dim in front, their cut dims, and the joined dim."""
    if not joined:
        return xs, dims, None
    first, along = joined

    def moved(dim: int) -> int:
        return 0 if dim == first else dim + (dim < first)

    return [x.movedim(first, 0) for x in xs], [moved(dim) for dim in dims], moved(along)


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
        joined: ``[first, along]``: tensors side by side, see the head of this file. They may differ
            on ``along`` only.

    Returns:
        Flat dense buffer; rank ``p``'s part holds its slice of ``xs[0]``, of ``xs[1]``, and so on,
        each dense, or all of them side by side.
    """
    num_parts = len(counts) // len(xs)
    xs, dims, along = _lead(xs, dims, list(joined))
    shapes = [list(x.shape) for x in xs]
    buffer = xs[0].new_empty(packed_size(shapes, dims, counts))
    if not index and buffer.numel() and _is_even(counts, num_parts):
        views = _even_views(buffer, shapes, dims, num_parts, along)
        for x, dim, view in zip(xs, dims, views, strict=True):
            view.copy_(_split(x, dim, num_parts))
        return buffer
    for t, run, place in _parts_of(buffer, shapes, dims, counts, index, along):
        place.copy_(xs[t].narrow(dims[t], run.start, run.length))
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
    num_parts = len(counts) // len(shapes)
    outs = [buffer.new_empty(shape) for shape in shapes]
    leading, dims, along = _lead(outs, dims, list(joined))
    shapes = [list(x.shape) for x in leading]
    if not index and buffer.numel() and _is_even(counts, num_parts):
        views = _even_views(buffer, shapes, dims, num_parts, along)
        for out, dim, view in zip(leading, dims, views, strict=True):
            _split(out, dim, num_parts).copy_(view)
        return outs
    _zero_what_nobody_sends(leading, dims, counts, index)
    for t, run, place in _parts_of(buffer, shapes, dims, counts, index, along):
        rows = leading[t].narrow(dims[t], run.start, run.length)
        if run.again:
            rows.add_(place)
        else:
            rows.copy_(place)
    return outs


def _zero_what_nobody_sends(
    outs: list[Tensor], dims: list[int], counts: list[int], index: list[int]
) -> None:
    num_parts = len(counts) // len(outs)
    at = 0
    for t, out in enumerate(outs):
        total = sum(counts[t * num_parts : (t + 1) * num_parts])
        if index:
            for position in set(range(out.shape[dims[t]])) - set(index[at : at + total]):
                out.select(dims[t], position).zero_()
        else:
            out.narrow(dims[t], total, out.shape[dims[t]] - total).zero_()
        at += total


def packed_size(shapes: list[list[int]], dims: list[int], counts: list[int]) -> int:
    """Return the number of elements of the buffer that `pack` fills."""
    num_parts = len(counts) // len(shapes)
    return sum(
        prod(_with(shape, dim, sum(counts[t * num_parts : (t + 1) * num_parts])))
        for t, (shape, dim) in enumerate(zip(shapes, dims, strict=True))
    )
