"""The moves there are, forward and mirrored side by side.

=================  ==============================  ==================
move               wire                            mirror
=================  ==============================  ==================
`Exchange`         one all-to-all per dtype        `Exchange`
`Gather`           one all-gather per tensor       `ReduceScatter`
`ReduceScatter`    one reduce-scatter per tensor   `Gather`
`Swap`             one send, one receive           `Swap`
=================  ==============================  ==================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from hp_comm import _torch
from hp_comm.counters import record
from hp_comm.failures import Naming
from hp_comm.kernels.ops import pack, unpack
from hp_comm.moves import Cut, Move, Pending, Shape, Transfer, dense, landing, slices

__all__ = ["Exchange", "Gather", "ReduceScatter", "Swap", "Wire"]


@dataclass(frozen=True)
class Exchange(Move):
    """Cut each tensor one way, send a part to every rank, join what comes along another dim.

    Tensors of one dtype share one all-to-all. ``sends[t]`` cuts the input of shape
    ``in_shapes[t]``, ``receives[t]`` says how the result, ``out_shapes[t]``, is put together.

    With ``joined``, ``(sequence dim, head dim)``, the tensors lie side by side on the wire, rows
    first (see `hp_comm.kernels.reference`); results that are put together by rows are then slices
    of the received buffer, and need no copy.
    """

    sends: tuple[Cut, ...]
    receives: tuple[Cut, ...]
    in_shapes: tuple[Shape, ...]
    out_shapes: tuple[Shape, ...]
    joined: tuple[int, ...] = ()

    def mirror(self, needed: Sequence[int]) -> Exchange:
        """Send the other way: what was joined is cut, what was cut is joined."""
        return Exchange(
            self.where,
            self.group,
            sends=tuple(self.receives[t] for t in needed),
            receives=tuple(self.sends[t] for t in needed),
            in_shapes=tuple(self.out_shapes[t] for t in needed),
            out_shapes=tuple(self.in_shapes[t] for t in needed),
            joined=self.joined,
        )

    def start(self, xs: Sequence[Tensor], *, overlap: bool) -> Pending:
        """Launch one all-to-all per dtype."""
        by_dtype: dict[object, list[int]] = {}
        for t, x in enumerate(xs):
            by_dtype.setdefault(x.dtype, []).append(t)
        async_op = overlap or len(by_dtype) > 1
        return Pending(
            [
                (tuple(places), self._start(places, [xs[t] for t in places], overlap, async_op))
                for places in by_dtype.values()
            ]
        )

    def _start(
        self, places: list[int], xs: list[Tensor], overlap: bool, async_op: bool
    ) -> Transfer:
        size, rank = _torch.group_size(self.group), _torch.group_rank(self.group)
        out, back = (
            _wire(tuple(cuts[t] for t in places), tuple(shapes[t] for t in places), size)
            for cuts, shapes in (
                (self.sends, self.in_shapes),
                (self.receives, self.out_shapes),
            )
        )
        send = self._packed(xs, out, overlap)
        received, finish = self._landing(xs[0], back)
        # a property of the cuts, which all ranks know alike: equal parts are a plain all-to-all
        even = out.is_even and back.is_even
        record("all_to_all", size, (send.numel() - out.sizes[rank]) * send.element_size())
        naming = Naming(self.where, "all_to_all", self.group)
        with naming:
            work = _torch.all_to_all(
                received,
                send,
                None if even else back.sizes,
                None if even else out.sizes,
                self.group,
                async_op=async_op,
            )
        return Transfer(naming, [work], send if async_op else None, finish)

    def _packed(self, xs: list[Tensor], wire: Wire, overlap: bool) -> Tensor:
        """Return the send buffer."""
        if len(xs) == 1:
            return dense(xs[0], wire.cuts[0], overlap=overlap, joined=self.joined)
        return pack(xs, *wire.flat(), self.joined)

    def _landing(self, like: Tensor, wire: Wire) -> tuple[Tensor, Callable[[], list[Tensor]]]:
        """Return a receive buffer and what makes the results of it."""
        shapes = wire.shapes
        if not self.joined and len(shapes) == 1:
            return landing(like, wire.cuts[0], shapes[0])
        buffer = like.new_empty(sum(wire.sizes))
        if self.joined and all(c.dim == self.joined[0] and c.index is None for c in wire.cuts):
            return buffer, lambda: slices(buffer, shapes, self.joined)
        nested = [list(shape) for shape in shapes]
        return buffer, lambda: unpack(buffer, nested, *wire.flat(), self.joined)


@dataclass(frozen=True)
class Wire:
    """One side of an exchange: how its tensors are cut, and how much goes over each link."""

    cuts: tuple[Cut, ...]
    shapes: tuple[Shape, ...]
    sizes: tuple[int, ...]
    is_even: bool
    dims: tuple[int, ...]
    counts: tuple[int, ...]
    index: tuple[int, ...]

    def flat(self) -> tuple[list[int], list[int], list[int]]:
        """Write the cuts the way the operators want them: dims, counts, index."""
        return list(self.dims), list(self.counts), list(self.index)


@lru_cache(maxsize=512)
def _wire(cuts: tuple[Cut, ...], shapes: tuple[Shape, ...], size: int) -> Wire:
    assert all(cut.unit == 1 for cut in cuts), "an exchange cuts rows and heads, not chunks"
    index: list[int] = []
    if any(cut.index is not None for cut in cuts):
        for cut in cuts:
            index += cut.index if cut.index is not None else range(sum(cut.counts))
    pairs = tuple(zip(cuts, shapes, strict=True))
    return Wire(
        cuts=cuts,
        shapes=shapes,
        sizes=tuple(sum(prod(cut.part(shape, p)) for cut, shape in pairs) for p in range(size)),
        is_even=all(cut.is_even() for cut in cuts),
        dims=tuple(cut.dim for cut in cuts),
        counts=tuple(n for cut in cuts for n in cut.counts),
        index=tuple(index),
    )


@dataclass(frozen=True)
class Gather(Move):
    """Join the ranks' parts of each tensor along one dim, on every rank.

    With ``rows_first`` that dim leads on the wire: what arrives is the result, seen with its dims
    in order, and needs no copy. Parts of unequal length are padded, and laid out densely; parts
    whose positions do not follow one another are put in order by the one copy that does so.
    """

    cuts: tuple[Cut, ...]
    shapes: tuple[Shape, ...]  # of the whole tensors
    rows_first: bool = False

    def mirror(self, needed: Sequence[int]) -> ReduceScatter:
        """Sum what every rank found for a shard at the shard's owner."""
        cuts, shapes = tuple(self.cuts[t] for t in needed), tuple(self.shapes[t] for t in needed)
        return ReduceScatter(self.where, self.group, cuts, shapes, self.rows_first)

    def start(self, xs: Sequence[Tensor], *, overlap: bool) -> Pending:
        """Launch one all-gather per tensor."""
        async_op = overlap or len(xs) > 1
        return Pending(
            [((t,), self._start(t, x, overlap, async_op)) for t, x in enumerate(xs)],
        )

    def _start(self, t: int, x: Tensor, overlap: bool, async_op: bool) -> Transfer:
        cut, shape, size = self.cuts[t], self.shapes[t], _torch.group_size(self.group)
        if not cut.is_even():
            send, received, finish = _padded_gather(x, cut, shape)
        elif self.rows_first and cut.index is None:
            send = dense(x.movedim(cut.dim, 0), None, overlap=overlap)
            received = buffer = x.new_empty(prod(shape))

            def finish() -> list[Tensor]:
                return slices(buffer, [shape], (cut.dim, cut.dim))

        else:
            send = dense(x, None, overlap=overlap)
            received, finish = landing(x, cut, shape)
        record("all_gather", size, (size - 1) * send.numel() * send.element_size())
        # dim 0 of flat buffers: gathering on another dim would wait inside
        naming = Naming(self.where, "all_gather", self.group)
        with naming:
            work = _torch.all_gather(received, send, self.group, async_op=async_op)
        return Transfer(naming, [work], send if async_op else None, finish)


@dataclass(frozen=True)
class ReduceScatter(Move):
    """Sum each tensor over the ranks, in its dtype, and keep this rank's part along one dim."""

    cuts: tuple[Cut, ...]
    shapes: tuple[Shape, ...]  # of the whole tensors
    rows_first: bool = False  # of the gather that this mirrors

    def mirror(self, needed: Sequence[int]) -> Gather:
        """Give every rank the gradient of each part of the sum."""
        cuts, shapes = tuple(self.cuts[t] for t in needed), tuple(self.shapes[t] for t in needed)
        return Gather(self.where, self.group, cuts, shapes, self.rows_first)

    def start(self, xs: Sequence[Tensor], *, overlap: bool) -> Pending:
        """Launch one reduce-scatter per tensor."""
        async_op = overlap or len(xs) > 1
        return Pending(
            [((t,), self._start(t, x, overlap, async_op)) for t, x in enumerate(xs)],
        )

    def start_given(self, xs: Sequence[Tensor]) -> Pending:
        """Launch and go on, as ``overlap`` does, with ``xs`` given away: sent where they lie."""
        return Pending([((t,), self._start(t, x, False, True)) for t, x in enumerate(xs)])

    def _start(self, t: int, x: Tensor, overlap: bool, async_op: bool) -> Transfer:
        cut, shape = self.cuts[t], self.shapes[t]
        size, rank = _torch.group_size(self.group), _torch.group_rank(self.group)
        mine = cut.part(shape, rank)
        if cut.is_even():
            send = dense(x, cut, overlap=overlap)
            out = x.new_empty(mine)
            received = out.view(-1)
        else:
            send = _padded_parts(x, cut, shape)
            received = x.new_empty(send.numel() // size)
            out = received[: prod(mine)].view(mine)
        record("reduce_scatter", size, (size - 1) * received.numel() * received.element_size())
        naming = Naming(self.where, "reduce_scatter", self.group)
        with naming:
            work = _torch.reduce_scatter(received, send, self.group, async_op=async_op)
        return Transfer(naming, [work], send if async_op else None, lambda: [out])


def _padded_gather(
    x: Tensor, cut: Cut, shape: Shape
) -> tuple[Tensor, Tensor, Callable[[], list[Tensor]]]:
    """Gather parts of unequal length: backends want one size, so the short ones are padded."""
    ranks = range(len(cut.counts))
    largest = max(prod(cut.part(shape, p)) for p in ranks)
    send = x.new_zeros(largest)
    send[: x.numel()].view(x.shape).copy_(x)
    received = x.new_empty(len(cut.counts) * largest)

    def finish() -> list[Tensor]:
        out = received.new_empty(shape)
        for p, place in enumerate(torch.split(out, list(cut.counts), cut.dim)):
            piece = received[p * largest : p * largest + place.numel()]
            place.copy_(piece.view(place.shape))
        return [out]

    return send, received, finish


def _padded_parts(x: Tensor, cut: Cut, shape: Shape) -> Tensor:
    """Lay the parts of ``x`` one after the other, each padded to the size of the largest."""
    largest = max(prod(cut.part(shape, p)) for p in range(len(cut.counts)))
    buffer = x.new_zeros(len(cut.counts) * largest)
    for p, part in enumerate(torch.split(x, list(cut.counts), cut.dim)):
        buffer[p * largest : p * largest + part.numel()].view(part.shape).copy_(part)
    return buffer


@dataclass(frozen=True)
class Swap(Move):
    """Send a tensor to the rank ``peer`` of the group and take the one that comes from there."""

    peer: int

    def mirror(self, needed: Sequence[int]) -> Swap:
        """Swap back."""
        return self

    def start(self, xs: Sequence[Tensor], *, overlap: bool) -> Pending:
        """Launch one send and one receive."""
        return Pending([((0,), self.transfer(xs[0], overlap=overlap))])

    def transfer(self, x: Tensor, *, overlap: bool) -> Transfer:
        """Launch, as a part of a move."""
        send = dense(x, None, overlap=overlap)
        out = x.new_empty(x.shape)
        record("p2p", _torch.group_size(self.group), send.numel() * send.element_size())
        naming = Naming(self.where, "p2p", self.group)
        with naming:
            works = _torch.swap(out.view(-1), send, self.peer, self.group)
        return Transfer(naming, works, send, lambda: [out])
