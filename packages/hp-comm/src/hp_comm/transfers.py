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
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from hp_comm import _torch
from hp_comm.counters import record
from hp_comm.kernels.ops import pack, unpack
from hp_comm.moves import Cut, Move, Pending, Shape, Transfer, dense, landing

__all__ = ["Exchange", "Gather", "ReduceScatter", "Swap"]


def _flat(cuts: Sequence[Cut]) -> tuple[list[int], list[int], list[int]]:
    """Write cuts the way the operators want them: dims, counts, index."""
    index: list[int] = []
    if any(cut.index is not None for cut in cuts):
        for cut in cuts:
            index += cut.index if cut.index is not None else range(sum(cut.counts))
    return [cut.dim for cut in cuts], [n for cut in cuts for n in cut.counts], index


@dataclass(frozen=True)
class Exchange(Move):
    """Cut each tensor one way, send a part to every rank, join what comes along another dim.

    Tensors of one dtype share one all-to-all. ``sends[t]`` cuts the input of shape
    ``in_shapes[t]``, ``receives[t]`` says how the result, ``out_shapes[t]``, is put together.
    """

    sends: tuple[Cut, ...]
    receives: tuple[Cut, ...]
    in_shapes: tuple[Shape, ...]
    out_shapes: tuple[Shape, ...]

    def mirror(self, needed: Sequence[int]) -> Exchange:
        """Send the other way: what was joined is cut, what was cut is joined."""
        return replace(
            self,
            sends=tuple(self.receives[t] for t in needed),
            receives=tuple(self.sends[t] for t in needed),
            in_shapes=tuple(self.out_shapes[t] for t in needed),
            out_shapes=tuple(self.in_shapes[t] for t in needed),
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

    def _sizes(self, cuts: Sequence[Cut], shapes: Sequence[Shape], places: list[int]) -> list[int]:
        ranks = range(_torch.group_size(self.group))
        return [sum(prod(cuts[t].part(shapes[t], p)) for t in places) for p in ranks]

    def _start(
        self, places: list[int], xs: list[Tensor], overlap: bool, async_op: bool
    ) -> Transfer:
        size, rank = _torch.group_size(self.group), _torch.group_rank(self.group)
        sends, receives = [self.sends[t] for t in places], [self.receives[t] for t in places]
        shapes = [self.out_shapes[t] for t in places]
        send_sizes = self._sizes(self.sends, self.in_shapes, places)
        receive_sizes = self._sizes(self.receives, self.out_shapes, places)
        if len(xs) == 1:
            send = dense(xs[0], sends[0], overlap=overlap)
            received, finish = landing(xs[0], receives[0], shapes[0])
        else:
            send = pack(xs, *_flat(sends))
            buffer = received = xs[0].new_empty(sum(receive_sizes))
            flat = _flat(receives)

            def finish() -> list[Tensor]:
                return unpack(buffer, [list(shape) for shape in shapes], *flat)

        # a property of the cuts, which all ranks know alike: equal parts are a plain all-to-all
        even = all(cut.is_even() for cut in (*sends, *receives))
        record("all_to_all", size, (send.numel() - send_sizes[rank]) * send.element_size())
        work = _torch.all_to_all(
            received,
            send,
            None if even else receive_sizes,
            None if even else send_sizes,
            self.group,
            async_op=async_op,
        )
        return Transfer([work], send if async_op else None, finish)


@dataclass(frozen=True)
class Gather(Move):
    """Join the ranks' parts of each tensor along one dim, on every rank."""

    cuts: tuple[Cut, ...]
    shapes: tuple[Shape, ...]  # of the whole tensors

    def mirror(self, needed: Sequence[int]) -> ReduceScatter:
        """Sum what every rank found for a shard at the shard's owner."""
        cuts, shapes = tuple(self.cuts[t] for t in needed), tuple(self.shapes[t] for t in needed)
        return ReduceScatter(self.where, self.group, cuts, shapes)

    def start(self, xs: Sequence[Tensor], *, overlap: bool) -> Pending:
        """Launch one all-gather per tensor."""
        async_op = overlap or len(xs) > 1
        return Pending(
            [((t,), self._start(t, x, overlap, async_op)) for t, x in enumerate(xs)],
        )

    def _start(self, t: int, x: Tensor, overlap: bool, async_op: bool) -> Transfer:
        cut, shape, size = self.cuts[t], self.shapes[t], _torch.group_size(self.group)
        if cut.is_even():
            send = dense(x, None, overlap=overlap)
            received, finish = landing(x, cut, shape)
        else:
            send, received, finish = _padded_gather(x, cut, shape)
        record("all_gather", size, (size - 1) * send.numel() * send.element_size())
        # dim 0 of flat buffers: gathering on another dim would wait inside
        work = _torch.all_gather(received, send, self.group, async_op=async_op)
        return Transfer([work], send if async_op else None, finish)


@dataclass(frozen=True)
class ReduceScatter(Move):
    """Sum each tensor over the ranks, in its dtype, and keep this rank's part along one dim."""

    cuts: tuple[Cut, ...]
    shapes: tuple[Shape, ...]  # of the whole tensors

    def mirror(self, needed: Sequence[int]) -> Gather:
        """Give every rank the gradient of each part of the sum."""
        cuts, shapes = tuple(self.cuts[t] for t in needed), tuple(self.shapes[t] for t in needed)
        return Gather(self.where, self.group, cuts, shapes)

    def start(self, xs: Sequence[Tensor], *, overlap: bool) -> Pending:
        """Launch one reduce-scatter per tensor."""
        async_op = overlap or len(xs) > 1
        return Pending(
            [((t,), self._start(t, x, overlap, async_op)) for t, x in enumerate(xs)],
        )

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
        work = _torch.reduce_scatter(received, send, self.group, async_op=async_op)
        return Transfer([work], send if async_op else None, lambda: [out])


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
        (x,) = xs
        send = dense(x, None, overlap=overlap)
        out = x.new_empty(x.shape)
        record("p2p", _torch.group_size(self.group), send.numel() * send.element_size())
        works = _torch.swap(out.view(-1), send, self.peer, self.group)
        return Pending([((0,), Transfer(works, send, lambda: [out]))])
