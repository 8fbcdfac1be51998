"""What each collective moves: start it, finish it, and name the collective that undoes it.

A move knows nothing of autograd. ``start`` copies into a dense send buffer and launches;
`Pending.finish` waits and does all the layout work; ``mirror`` is the move that carries gradients
back. Moves are linear, and the mirror is the transpose: nothing of the forward pass has to be kept.

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

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from hp_comm import _torch
from hp_comm.kernels.ops import pack, unpack
from hp_comm.counters import record

__all__ = ["Cut", "Exchange", "Gather", "Move", "Pending", "ReduceScatter", "Swap"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """How one dim of a tensor is divided over the ranks of a group.

    Attributes:
        dim: The dim, not negative.
        counts: Positions per rank.
        index: The positions themselves, rank after rank; None for consecutive ranges.
    """

    dim: int
    counts: tuple[int, ...]
    index: tuple[int, ...] | None = None

    def part(self, shape: Shape, rank: int) -> Shape:
        """Return the shape of what ``rank`` has of a tensor of ``shape``."""
        return (*shape[: self.dim], self.counts[rank], *shape[self.dim + 1 :])

    def is_even(self) -> bool:
        """Say whether every rank has as many positions."""
        return len(set(self.counts)) == 1

    def is_in_place(self, shape: Shape) -> bool:
        """Say whether a dense tensor of ``shape`` already lies as a buffer does: part by part."""
        return self.index is None and prod(shape[: self.dim]) == 1


class _Transfer:
    """One collective under way: its works, the buffer that it reads, and what follows."""

    __slots__ = ("finish", "send", "works")

    def __init__(
        self, works: Sequence[Any], send: Tensor | None, finish: Callable[[], list[Tensor]]
    ) -> None:
        self.works = [work for work in works if work is not None]
        self.send = send
        self.finish = finish

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []
        self.send = None


class Pending:
    """The transfers of one move; it owns their buffers until they are finished."""

    def __init__(self, transfers: list[tuple[tuple[int, ...], _Transfer]]) -> None:
        self._transfers = transfers

    def done(self) -> bool:
        """Say whether nothing is left to wait for (a backend may only know after a wait)."""
        return all(w.is_completed() for _, transfer in self._transfers for w in transfer.works)

    def finish(self) -> tuple[Tensor, ...]:
        """Wait, then lay out the results, in the order of the inputs."""
        results: dict[int, Tensor] = {}
        transfers, self._transfers = self._transfers, []
        while transfers:
            places, transfer = transfers.pop(0)
            transfer.wait()
            results.update(zip(places, transfer.finish(), strict=True))
        return tuple(results[place] for place in sorted(results))

    def abandon(self) -> None:
        """Wait and drop the results: the peers take part whether or not anybody looks."""
        transfers, self._transfers = self._transfers, []
        for _, transfer in transfers:
            transfer.wait()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            with contextlib.suppress(Exception):
                self.abandon()


class Move(Protocol):
    """A linear rearrangement of tensors over the ranks of a group."""

    where: str

    def start(self, xs: Sequence[Tensor], *, overlap: bool) -> Pending:
        """Launch. With ``overlap`` the caller goes on, so ``xs`` themselves are never on the wire."""

    def mirror(self, needed: Sequence[int]) -> Move:
        """Return the move of the gradients of the results ``needed``."""


def _dense(x: Tensor, cut: Cut | None, *, overlap: bool) -> Tensor:
    """Return ``x`` as a flat send buffer, by a copy only where its layout or its owner asks."""
    in_place = cut is None or cut.is_in_place(tuple(x.shape))
    if in_place and not overlap and x.is_contiguous() and not (x.is_conj() or x.is_neg()):
        return x.detach().view(-1)
    if cut is not None:
        return pack([x], [cut.dim], list(cut.counts), list(cut.index or ()))
    buffer = x.new_empty(x.shape)
    buffer.copy_(x)
    return buffer.view(-1)


def _landing(like: Tensor, cut: Cut, shape: Shape) -> tuple[Tensor, Callable[[], list[Tensor]]]:
    """Return a flat receive buffer and what makes the result of it: nothing, or one copy."""
    if cut.is_in_place(shape):
        out = like.new_empty(shape)
        return out.view(-1), lambda: [out]
    counts, index = list(cut.counts), list(cut.index or ())
    buffer = like.new_empty(sum(prod(cut.part(shape, p)) for p in range(len(counts))))
    return buffer, lambda: unpack(buffer, [list(shape)], [cut.dim], counts, index)


def _flat(cuts: Sequence[Cut]) -> tuple[list[int], list[int], list[int]]:
    """Write cuts the way the operators want them: dims, counts, index."""
    index: list[int] = []
    if any(cut.index is not None for cut in cuts):
        for cut in cuts:
            index += cut.index if cut.index is not None else range(sum(cut.counts))
    return [cut.dim for cut in cuts], [n for cut in cuts for n in cut.counts], index


@dataclass(frozen=True)
class Exchange:
    """Cut each tensor one way, send a part to every rank, join what comes along another dim.

    Tensors of one dtype share one all-to-all. ``sends[t]`` cuts the input of shape ``in_shapes[t]``,
    ``receives[t]`` says how the result of shape ``out_shapes[t]`` is put together.
    """

    where: str
    group: ProcessGroup
    sends: tuple[Cut, ...]
    receives: tuple[Cut, ...]
    in_shapes: tuple[Shape, ...]
    out_shapes: tuple[Shape, ...]

    def mirror(self, needed: Sequence[int]) -> Exchange:
        return replace(
            self,
            sends=tuple(self.receives[t] for t in needed),
            receives=tuple(self.sends[t] for t in needed),
            in_shapes=tuple(self.out_shapes[t] for t in needed),
            out_shapes=tuple(self.in_shapes[t] for t in needed),
        )

    def start(self, xs: Sequence[Tensor], *, overlap: bool) -> Pending:
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
    ) -> _Transfer:
        size, rank = _torch.group_size(self.group), _torch.group_rank(self.group)
        sends, receives = [self.sends[t] for t in places], [self.receives[t] for t in places]
        shapes = [self.out_shapes[t] for t in places]
        send_sizes = self._sizes(self.sends, self.in_shapes, places)
        receive_sizes = self._sizes(self.receives, self.out_shapes, places)
        if len(xs) == 1:
            send = _dense(xs[0], sends[0], overlap=overlap)
            received, finish = _landing(xs[0], receives[0], shapes[0])
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
        return _Transfer([work], send if async_op else None, finish)


@dataclass(frozen=True)
class Gather:
    """Join the ranks' parts of each tensor along one dim, on every rank."""

    where: str
    group: ProcessGroup
    cuts: tuple[Cut, ...]
    shapes: tuple[Shape, ...]  # of the whole tensors

    def mirror(self, needed: Sequence[int]) -> ReduceScatter:
        cuts, shapes = tuple(self.cuts[t] for t in needed), tuple(self.shapes[t] for t in needed)
        return ReduceScatter(self.where, self.group, cuts, shapes)

    def start(self, xs: Sequence[Tensor], *, overlap: bool) -> Pending:
        async_op = overlap or len(xs) > 1
        return Pending(
            [((t,), self._start(t, x, overlap, async_op)) for t, x in enumerate(xs)],
        )

    def _start(self, t: int, x: Tensor, overlap: bool, async_op: bool) -> _Transfer:
        cut, shape, size = self.cuts[t], self.shapes[t], _torch.group_size(self.group)
        if cut.is_even():
            send = _dense(x, None, overlap=overlap)
            received, finish = _landing(x, cut, shape)
        else:
            send, received, finish = _padded_gather(x, cut, shape)
        record("all_gather", size, (size - 1) * send.numel() * send.element_size())
        # dim 0 of flat buffers: gathering on another dim would wait inside
        work = _torch.all_gather(received, send, self.group, async_op=async_op)
        return _Transfer([work], send if async_op else None, finish)


@dataclass(frozen=True)
class ReduceScatter:
    """Sum each tensor over the ranks, in its dtype, and keep this rank's part along one dim."""

    where: str
    group: ProcessGroup
    cuts: tuple[Cut, ...]
    shapes: tuple[Shape, ...]  # of the whole tensors

    def mirror(self, needed: Sequence[int]) -> Gather:
        cuts, shapes = tuple(self.cuts[t] for t in needed), tuple(self.shapes[t] for t in needed)
        return Gather(self.where, self.group, cuts, shapes)

    def start(self, xs: Sequence[Tensor], *, overlap: bool) -> Pending:
        async_op = overlap or len(xs) > 1
        return Pending(
            [((t,), self._start(t, x, overlap, async_op)) for t, x in enumerate(xs)],
        )

    def _start(self, t: int, x: Tensor, overlap: bool, async_op: bool) -> _Transfer:
        cut, shape = self.cuts[t], self.shapes[t]
        size, rank = _torch.group_size(self.group), _torch.group_rank(self.group)
        mine = cut.part(shape, rank)
        if cut.is_even():
            send = _dense(x, cut, overlap=overlap)
            out = x.new_empty(mine)
            received = out.view(-1)
        else:
            send = _padded_parts(x, cut, shape)
            received = x.new_empty(send.numel() // size)
            out = received[: prod(mine)].view(mine)
        record("reduce_scatter", size, (size - 1) * received.numel() * received.element_size())
        work = _torch.reduce_scatter(received, send, self.group, async_op=async_op)
        return _Transfer([work], send if async_op else None, lambda: [out])


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
        for p, place in enumerate(out.split(cut.counts, cut.dim)):
            piece = received[p * largest : p * largest + place.numel()]
            place.copy_(piece.view(place.shape))
        return [out]

    return send, received, finish


def _padded_parts(x: Tensor, cut: Cut, shape: Shape) -> Tensor:
    """Lay the parts of ``x`` one after the other, each padded to the size of the largest."""
    largest = max(prod(cut.part(shape, p)) for p in range(len(cut.counts)))
    buffer = x.new_zeros(len(cut.counts) * largest)
    for p, part in enumerate(x.split(cut.counts, cut.dim)):
        buffer[p * largest : p * largest + part.numel()].view(part.shape).copy_(part)
    return buffer


@dataclass(frozen=True)
class Swap:
    """Send a tensor to the rank ``peer`` of the group and take the one that comes from there."""

    where: str
    group: ProcessGroup
    peer: int

    def mirror(self, needed: Sequence[int]) -> Swap:
        return self

    def start(self, xs: Sequence[Tensor], *, overlap: bool) -> Pending:
        (x,) = xs
        send = _dense(x, None, overlap=overlap)
        out = x.new_empty(x.shape)
        record("p2p", _torch.group_size(self.group), send.numel() * send.element_size())
        works = _torch.swap(out.view(-1), send, self.peer, self.group)
        return Pending([((0,), _Transfer(works, send, lambda: [out]))])
