"""Copies as tables for a kernel: which offsets, how many rows, which strides; no torch here.

A kernel moves tiles of two dims. `Segments` are the pieces of one tensor that differ in their
offsets only: a program reads where a piece lies from the table and walks over its rows, so one
launch serves every rank, batch entry and head, and no program divides an index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from hp_comm.kernels.layout import Copy, View

__all__ = ["Segments", "head_segments", "move_segments", "sum_segments"]

LONGEST = 1024
"""Elements of a row of what lies in one piece and so has no rows of its own."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Pieces ``[rows, inner]`` of tensor ``t``.

    Attributes:
        t: Which tensor of the call.
        rows: Rows of a piece.
        inner: Elements of a row.
        strides: ``(row stride, inner stride)`` in the tensor, then in the buffer and in whatever
            else is addressed alike. A buffer's row stride is 0 where the table has it.
        table: One line per piece: an offset in the tensor, in the buffer, and so on. Where pieces
            are summed: the offset in the tensor, then offset and row stride of every summand, the
            offset -1 for one that is missing.
    """

    t: int
    rows: int
    inner: int
    strides: tuple[tuple[int, int], ...]
    table: tuple[tuple[int, ...], ...]

    @property
    def elements(self) -> int:
        """Elements of all pieces."""
        return len(self.table) * self.rows * self.inner


class _Dim(NamedTuple):
    size: int
    strides: tuple[int, ...]  # one per view


def _dims(views: Sequence[View]) -> list[_Dim]:
    """Return the dims of views of one size, neighbours joined where every view lets them."""
    dims: list[_Dim] = []
    for size, *strides in zip(views[0].size, *(view.stride for view in views), strict=True):
        if size == 1:
            continue
        last = dims[-1] if dims else None
        if last and all(a == size * b for a, b in zip(last.strides, strides, strict=True)):
            dims[-1] = _Dim(last.size * size, tuple(strides))
        else:
            dims.append(_Dim(size, tuple(strides)))
    return dims


def _tile(dims: list[_Dim], count: int) -> tuple[_Dim, _Dim, list[_Dim]]:
    """Choose rows, inner and the rest; inner is consecutive in every view but the first."""
    nothing = _Dim(1, (0,) * count)
    if not dims or any(stride != 1 for stride in dims[-1].strides[1:]):
        dims = [*dims, _Dim(1, (1,) * count)]
    *outer, inner = dims
    if not outer:
        return nothing, inner, []
    # a transposed tensor is read along its own consecutive dim
    along = [d for d in outer if d.strides[0] == 1] if inner.strides[0] != 1 else []
    rows = max(along or outer, key=lambda dim: dim.size)
    outer.remove(rows)
    return rows, inner, outer


def _offsets(views: Sequence[View], outer: Sequence[_Dim]) -> list[tuple[int, ...]]:
    """Return the offset of every piece in every view."""
    starts = [view.offset for view in views]
    return [
        tuple(
            start + sum(i * dim.strides[v] for i, dim in zip(places, outer, strict=True))
            for v, start in enumerate(starts)
        )
        for places in product(*(range(dim.size) for dim in outer))
    ]


class _Collector:
    """Puts pieces that differ in their offsets only into one table."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], tuple[_Key, list[tuple[int, ...]]]] = {}

    def add(self, key: _Key, lines: Sequence[tuple[int, ...]]) -> None:
        self._found.setdefault(tuple(key), (key, []))[1].extend(lines)

    def segments(self) -> tuple[Segments, ...]:
        return tuple(
            Segments(*key, table=_padded(lines)) for key, lines in self._found.values() if lines
        )


class _Key(NamedTuple):
    t: int
    rows: int
    inner: int
    strides: tuple[tuple[int, int], ...]


def _padded(lines: list[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Give every line as many summands as the longest one has."""
    width = max(map(len, lines))
    return tuple(line + (-1, 0) * ((width - len(line)) // 2) for line in lines)


def move_segments(copies: Sequence[Copy]) -> tuple[Segments, ...]:
    """Return the pieces of plain copies: every element of a tensor has one place."""
    found = _Collector()
    for copy in copies:
        if 0 in copy.own.size:
            continue
        views = [copy.own, copy.place]
        rows, inner, outer = _tile(_dims(views), len(views))
        if set(inner.strides) == {1} and rows.size * LONGEST < inner.size:
            # few rows that are long: cut them, or few programs would do all of the work
            outer, rows = [*outer, rows], _Dim(1, (0,) * len(views))
        offsets = _offsets(views, outer)
        for size, inner_size, skip in _split(rows, inner):
            strides = tuple(zip(rows.strides, inner.strides, strict=True))
            if rows.size == 1:  # one row: its stride says nothing, or is that of a cut long row
                strides = tuple((LONGEST * i if size > 1 else 0, i) for i in inner.strides)
            lines = [
                tuple(at + skip * s for at, s in zip(line, inner.strides, strict=True))
                for line in offsets
            ]
            found.add(_Key(copy.t, size, inner_size, strides), lines)
    return found.segments()


def _split(rows: _Dim, inner: _Dim) -> list[tuple[int, int, int]]:
    """Cut one long row into short ones and a rest: (rows, inner, elements skipped) of each."""
    if rows.size > 1 or inner.size <= LONGEST:
        return [(rows.size, inner.size, 0)]
    whole, rest = divmod(inner.size, LONGEST)
    cut = [(whole, LONGEST, 0)]
    if rest:
        cut.append((1, rest, whole * LONGEST))
    return cut


def sum_segments(copies: Sequence[Copy]) -> tuple[Segments, ...]:
    """Return the pieces of copies into tensors, some of which are sums of several places."""
    summed = {copy.t for copy in copies if copy.again}
    found = _Collector()
    plain = move_segments([copy for copy in copies if copy.t not in summed])
    for t in sorted(summed):
        for own, places in _positions([[copy] for copy in copies if copy.t == t]):
            views = [*own, *places]
            rows, inner, outer = _tile(_dims(views), len(views))
            lines = _summands(_offsets(views, outer), 1, rows.strides)
            strides = ((rows.strides[0], inner.strides[0]), (0, 1))
            found.add(_Key(t, rows.size, inner.size, strides), lines)
    return plain + found.segments()


def _summands(
    lines: Sequence[tuple[int, ...]], num_own: int, row_strides: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """Put each summand's row stride behind its offset: ranks may hold unequal numbers of heads."""
    return [
        line[:num_own]
        + tuple(n for pair in zip(line[num_own:], row_strides[num_own:], strict=True) for n in pair)
        for line in lines
    ]


def _positions(parallel: Sequence[Sequence[Copy]]) -> list[tuple[list[View], list[View]]]:
    """Return each position of the first tensor, in all tensors, and where it lies in the buffer.

    Args:
        parallel: For every copy, the same copy of each tensor that is addressed alike.
    """
    found: dict[tuple[View, ...], tuple[list[View], list[View]]] = {}
    for same in parallel:
        dim = same[0].dim
        if 0 in same[0].own.size:
            continue
        for i in range(1 if dim is None else same[0].own.size[dim]):
            owns = [c.own if dim is None else c.own.narrow(dim, i, 1) for c in same]
            place = same[0].place if dim is None else same[0].place.narrow(dim, i, 1)
            # keyed by all: heads of an expanded tensor lie in one place, their gradients do not
            found.setdefault(tuple(owns), (owns, []))[1].append(place)
    return list(found.values())


def head_segments(
    parallel: Sequence[Sequence[Copy]], rows_dim: int, ndim: int, *, summed: bool = False
) -> tuple[Segments, ...]:
    """Return pieces of one head each: rows are the sequence, inner is the head's last dim.

    Args:
        parallel: For every copy of one tensor, the same copy of each tensor that is addressed
            alike, ``cos`` for example.
        rows_dim: Where the sequence is among the dims of a copy, of which there are ``ndim``, or
            one more in front where a copy fills all parts.
        ndim: See ``rows_dim``.
        summed: Whether places of one position are summed.

    Returns:
        Tables with the offset in every tensor of ``parallel``, then in the buffer; or, if summed,
        offset and row stride of every summand.
    """
    found = _Collector()
    if summed:
        pieces = _positions(parallel)
    else:
        pieces = [([c.own for c in same], [same[0].place]) for same in parallel]
    for owns, places in pieces:
        views = [*owns, *places]
        *outer, inner = [
            _Dim(size, tuple(view.stride[d] for view in views))
            for d, size in enumerate(owns[0].size)
        ]
        rows = outer.pop(rows_dim + len(outer) + 1 - ndim)
        if 0 in owns[0].size:
            continue
        lines = _offsets(views, outer)
        strides = tuple(zip(rows.strides, inner.strides, strict=True))
        if summed:
            lines = _summands(lines, len(owns), rows.strides)
            strides = (*strides[: len(owns)], (0, 1))
        found.add(_Key(parallel[0][0].t, rows.size, inner.size, strides), lines)
    return found.segments()
