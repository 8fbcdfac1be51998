"""Where things lie in tensors and send buffers: sizes, strides and offsets; no torch here.

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
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

from hp_mesh.checks import require

__all__ = ["Copy", "Shape", "View", "check_cut", "copies", "packed_size", "with_length"]

Shape = tuple[int, ...]


class View(NamedTuple):
    """Size, stride and offset of a view, worked out once and not by a chain of tensors."""

    size: Shape
    stride: Shape
    offset: int = 0

    @classmethod
    def dense(cls, size: Shape, offset: int = 0) -> View:
        """Return the view of a dense tensor that starts at ``offset``."""
        stride = [*accumulate(reversed(size[1:]), lambda a, b: a * max(b, 1), initial=1)]
        return cls(size, tuple(reversed(stride)), offset)

    def narrow(self, dim: int, start: int, length: int) -> View:
        """Return ``length`` positions on ``dim``."""
        return View(
            with_length(self.size, dim, length), self.stride, self.offset + start * self.stride[dim]
        )

    def lead(self, dim: int) -> View:
        """Return the view with ``dim`` in front."""
        return View(_first(self.size, dim), _first(self.stride, dim), self.offset)

    def parts(self, dim: int, count: int) -> View:
        """Cut ``dim`` into ``count`` equal parts: ``[count, .., n / count, ..]``."""
        length = self.size[dim] // count
        size = (count, *with_length(self.size, dim, length))
        return View(size, (length * self.stride[dim], *self.stride), self.offset)


class Copy(NamedTuple):
    """One copy between tensor ``t`` and the buffer; ``again``: its positions were sent before.

    ``dim`` is where both views count the positions of the cut; None where a copy fills all parts.
    """

    t: int
    again: bool
    own: View
    place: View
    dim: int | None = None


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


def with_length(shape: Shape, dim: int, length: int) -> Shape:
    """Return ``shape`` with ``length`` positions on ``dim``."""
    return (*shape[:dim], length, *shape[dim + 1 :])


def _first(numbers: Shape, dim: int) -> Shape:
    return (numbers[dim], *numbers[:dim], *numbers[dim + 1 :])


def check_cut(
    shapes: tuple[Shape, ...], dims: Shape, counts: Shape, index: Shape, joined: Shape
) -> None:
    """Refuse a cut that does not fit the tensors: what it names would lie in other memory."""
    where = "hp_comm.kernels"
    num = len(shapes)
    require(
        num > 0 and len(dims) == num and len(counts) > 0 and len(counts) % num == 0,
        where,
        f"dims ({len(dims)}) must be one per tensor ({num}), and counts ({len(counts)}) as many "
        "for each",
    )
    num_parts = len(counts) // num
    require(min(counts) >= 0, where, f"counts ({min(counts)}) must be numbers of at least 0")
    require(
        not index or len(index) == sum(counts),
        where,
        f"index ({len(index)} positions) must have as many as counts add up to ({sum(counts)})",
    )
    at = 0
    for t, (shape, dim) in enumerate(zip(shapes, dims, strict=True)):
        require(
            0 <= dim < len(shape),
            where,
            f"dims[{t}] ({dim}) must be a dim of the tensor {tuple(shape)}, not negative",
        )
        total = sum(counts[t * num_parts : (t + 1) * num_parts])
        named = index[at : at + total] if index else (total - 1,)
        require(
            total == 0 or (min(named) >= (0 if index else -1) and max(named) < shape[dim]),
            where,
            f"positions up to {max(named, default=0)} of tensor {t} must be below its size in dim "
            f"{dim} ({shape[dim]}), and not negative",
        )
        at += total if index else 0
    if joined:
        first, along = joined
        alike = {shape[:along] + shape[along + 1 :] for shape in shapes}
        require(
            first != along and max(first, along) < len(shapes[0]) and len(alike) == 1,
            where,
            f"tensors {[tuple(shape) for shape in shapes]} must differ in dim {along} only to lie "
            "side by side",
        )


@lru_cache(maxsize=1024)
def copies(
    shapes: tuple[Shape, ...],
    strides: tuple[Shape, ...],
    dims: Shape,
    counts: Shape,
    index: Shape,
    joined: Shape,
) -> tuple[Copy, ...]:
    """Return what is copied between tensors, as they lie, and the buffer.

    Raises:
        ValueError: If the cut does not fit the tensors.
    """
    check_cut(shapes, dims, counts, index, joined)
    xs = [View(shape, stride) for shape, stride in zip(shapes, strides, strict=True)]
    along = None
    if joined:
        first, along = joined[0], _behind(joined[1], joined[0])
        xs = [x.lead(first) for x in xs]
        dims = tuple(0 if dim == first else _behind(dim, first) for dim in dims)
    num_parts = len(counts) // len(xs)
    is_even = all(count == counts[i - i % num_parts] for i, count in enumerate(counts))
    places = _places([x.size for x in xs], dims, counts, along)
    found = []
    at = 0
    for t, (x, dim) in enumerate(zip(xs, dims, strict=True)):
        own = counts[t * num_parts : (t + 1) * num_parts]
        if is_even and not index and num_parts * own[0] == x.size[dim]:
            # the parts of one tensor lie equally far from each other: a single copy fills them
            step = places[1][t].offset - places[0][t].offset if num_parts > 1 else 0
            place = places[0][t]
            place = View((num_parts, *place.size), (step, *place.stride), place.offset)
            found.append(Copy(t, False, x.parts(dim, num_parts), place))
            continue
        for p, runs in enumerate(_runs(own, index[at : at + sum(own)])):
            start = 0
            for run in runs:
                part = places[p][t].narrow(dim, start, run.length)
                own_run = x.narrow(dim, run.start, run.length)
                found.append(Copy(t, run.again, own_run, part, dim))
                start += run.length
        at += sum(own) if index else 0
    return tuple(found)


def _behind(dim: int, first: int) -> int:
    """Return where ``dim`` is once ``first`` stands in front."""
    return dim + (dim < first)


def _places(
    sizes: Sequence[Shape], dims: Shape, counts: Shape, along: int | None
) -> list[list[View]]:
    """Return the place of each tensor in each rank's part of the buffer."""
    num_parts = len(counts) // len(sizes)
    places: list[list[View]] = []
    offset = 0
    for p in range(num_parts):
        cut = [
            with_length(size, dim, n)
            for size, dim, n in zip(sizes, dims, counts[p::num_parts], strict=True)
        ]
        if along is None:
            starts = [offset, *accumulate(map(prod, cut), initial=offset)][1:]
            places.append([View.dense(one, at) for one, at in zip(cut, starts, strict=False)])
        else:
            starts = [*accumulate((one[along] for one in cut), initial=0)]
            whole = View.dense(with_length(cut[0], along, starts[-1]), offset)
            places.append(
                [whole.narrow(along, at, one[along]) for one, at in zip(cut, starts, strict=False)]
            )
        offset += sum(map(prod, cut))
    return places


def packed_size(shapes: list[list[int]], dims: list[int], counts: list[int]) -> int:
    """Return the number of elements of the buffer that `pack` fills."""
    num_parts = len(counts) // len(shapes)
    return sum(
        prod(with_length(tuple(shape), dim, sum(counts[t * num_parts : (t + 1) * num_parts])))
        for t, (shape, dim) in enumerate(zip(shapes, dims, strict=True))
    )
