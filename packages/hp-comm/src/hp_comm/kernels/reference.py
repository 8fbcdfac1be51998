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

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

from torch import Tensor

__all__ = ["pack", "unpack"]

Shape = tuple[int, ...]


class _View(NamedTuple):
    """Size, stride and offset of a view, worked out once and not by a chain of tensors."""

    size: Shape
    stride: Shape
    offset: int = 0

    @classmethod
    def dense(cls, size: Shape, offset: int = 0) -> _View:
        """Return the view of a dense tensor that starts at ``offset``."""
        stride = [*accumulate(reversed(size[1:]), lambda a, b: a * max(b, 1), initial=1)]
        return cls(size, tuple(reversed(stride)), offset)

    def narrow(self, dim: int, start: int, length: int) -> _View:
        """Return ``length`` positions on ``dim``."""
        return _View(
            _with(self.size, dim, length), self.stride, self.offset + start * self.stride[dim]
        )

    def lead(self, dim: int) -> _View:
        """Return the view with ``dim`` in front."""
        return _View(_first(self.size, dim), _first(self.stride, dim), self.offset)

    def parts(self, dim: int, count: int) -> _View:
        """Cut ``dim`` into ``count`` equal parts: ``[count, .., n / count, ..]``."""
        length = self.size[dim] // count
        size = (count, *_with(self.size, dim, length))
        return _View(size, (length * self.stride[dim], *self.stride), self.offset)

    def of(self, x: Tensor) -> Tensor:
        """Return this view of the memory that ``x`` starts at."""
        return x.as_strided(self.size, self.stride, x.storage_offset() + self.offset)


class _Copy(NamedTuple):
    """One copy between tensor ``t`` and the buffer; ``again``: its positions were sent before."""

    t: int
    again: bool
    own: _View
    place: _View


class _Run(NamedTuple):
    """Consecutive positions ``[start, start + length)`` that lie together in a part."""

    start: int
    length: int
    again: bool  # an earlier run had these positions too


def _runs(counts: Shape, index: Shape) -> list[list[_Run]]:
    """Return the runs of each part; one that is repeated must be added, the first one copied."""
    if not index:
        starts = [0, *accumulate(counts)]
        return [[_Run(s, n, False)] for s, n in zip(starts, counts, strict=False)]
    parts: list[list[_Run]] = []
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
        parts.append(runs)
        at += count
    return parts


def _with(shape: Shape, dim: int, length: int) -> Shape:
    return (*shape[:dim], length, *shape[dim + 1 :])


def _first(numbers: Shape, dim: int) -> Shape:
    return (numbers[dim], *numbers[:dim], *numbers[dim + 1 :])


@lru_cache(maxsize=1024)
def _copies(
    shapes: tuple[Shape, ...],
    strides: tuple[Shape, ...],
    dims: Shape,
    counts: Shape,
    index: Shape,
    joined: Shape,
) -> tuple[_Copy, ...]:
    """Return what is copied between tensors, as they lie, and the buffer."""
    xs = [_View(shape, stride) for shape, stride in zip(shapes, strides, strict=True)]
    along = None
    if joined:
        first, along = joined[0], _behind(joined[1], joined[0])
        xs = [x.lead(first) for x in xs]
        dims = tuple(0 if dim == first else _behind(dim, first) for dim in dims)
    num_parts = len(counts) // len(xs)
    is_even = all(count == counts[i - i % num_parts] for i, count in enumerate(counts))
    places = _places([x.size for x in xs], dims, counts, along)
    copies = []
    at = 0
    for t, (x, dim) in enumerate(zip(xs, dims, strict=True)):
        own = counts[t * num_parts : (t + 1) * num_parts]
        if is_even and not index and num_parts * own[0] == x.size[dim]:
            # the parts of one tensor lie equally far from each other: a single copy fills them
            step = places[1][t].offset - places[0][t].offset if num_parts > 1 else 0
            place = places[0][t]
            place = _View((num_parts, *place.size), (step, *place.stride), place.offset)
            copies.append(_Copy(t, False, x.parts(dim, num_parts), place))
            continue
        for p, runs in enumerate(_runs(own, index[at : at + sum(own)])):
            start = 0
            for run in runs:
                part = places[p][t].narrow(dim, start, run.length)
                copies.append(_Copy(t, run.again, x.narrow(dim, run.start, run.length), part))
                start += run.length
        at += sum(own) if index else 0
    return tuple(copies)


def _behind(dim: int, first: int) -> int:
    """Return where ``dim`` is once ``first`` stands in front."""
    return dim + (dim < first)


def _places(
    sizes: Sequence[Shape], dims: Shape, counts: Shape, along: int | None
) -> list[list[_View]]:
    """Return the place of each tensor in each rank's part of the buffer."""
    num_parts = len(counts) // len(sizes)
    places: list[list[_View]] = []
    offset = 0
    for p in range(num_parts):
        cut = [
            _with(size, dim, n)
            for size, dim, n in zip(sizes, dims, counts[p::num_parts], strict=True)
        ]
        if along is None:
            starts = [offset, *accumulate(map(prod, cut), initial=offset)][1:]
            places.append([_View.dense(one, at) for one, at in zip(cut, starts, strict=False)])
        else:
            starts = [*accumulate((one[along] for one in cut), initial=0)]
            whole = _View.dense(_with(cut[0], along, starts[-1]), offset)
            places.append(
                [whole.narrow(along, at, one[along]) for one, at in zip(cut, starts, strict=False)]
            )
        offset += sum(map(prod, cut))
    return places


def _planned(
    xs: Sequence[Tensor],
    dims: list[int],
    counts: list[int],
    index: list[int],
    joined: Sequence[int],
) -> tuple[_Copy, ...]:
    return _copies(
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
        joined: ``[first, along]``: tensors side by side, see the head of this file. They may differ
            on ``along`` only.

    Returns:
        Flat dense buffer; rank ``p``'s part holds its slice of ``xs[0]``, of ``xs[1]``, and so on,
        each dense, or all of them side by side.
    """
    buffer = xs[0].new_empty(packed_size([list(x.shape) for x in xs], dims, counts))
    for copy in _planned(xs, dims, counts, index, joined):
        copy.place.of(buffer).copy_(copy.own.of(xs[copy.t]))
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
    _zero_what_nobody_sends(outs, dims, counts, index)
    for copy in _planned(outs, dims, counts, index, joined):
        own, place = copy.own.of(outs[copy.t]), copy.place.of(buffer)
        if copy.again:
            own.add_(place)
        else:
            own.copy_(place)
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
        elif total < out.shape[dims[t]]:
            out.narrow(dims[t], total, out.shape[dims[t]] - total).zero_()
        at += total


def packed_size(shapes: list[list[int]], dims: list[int], counts: list[int]) -> int:
    """Return the number of elements of the buffer that `pack` fills."""
    num_parts = len(counts) // len(shapes)
    return sum(
        prod(_with(tuple(shape), dim, sum(counts[t * num_parts : (t + 1) * num_parts])))
        for t, (shape, dim) in enumerate(zip(shapes, dims, strict=True))
    )
