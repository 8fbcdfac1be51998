"""What a collective moves: the parts of a cut tensor, the buffers on the wire, the wait.

A move knows nothing of autograd. ``start`` makes dense send buffers and launches; `Pending.finish`
waits and does all the layout work; ``mirror`` is the move that carries gradients back. Moves are
linear and the mirror is the transpose, so nothing of the forward pass has to be kept for it; only
one that computes on its way (`hp_comm.prepared`) keeps something.
"""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from hp_comm.kernels.ops import pack, unpack

__all__ = ["Cut", "Move", "Pending", "Shape", "Transfer", "dense", "landing", "slices"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """How one dim of a tensor is divided over the ranks of a group.

    Attributes:
        dim: The dim, not negative.
        counts: Positions per rank.
        index: The positions themselves, rank after rank; None for consecutive ranges.
        unit: Rows that stand for one position, as a chunk of a sequence does.
    """

    dim: int
    counts: tuple[int, ...]
    index: tuple[int, ...] | None = None
    unit: int = 1

    def part(self, shape: Shape, rank: int) -> Shape:
        """Return the shape of what ``rank`` has of a tensor of ``shape``."""
        return (*shape[: self.dim], self.counts[rank] * self.unit, *shape[self.dim + 1 :])

    def in_units(self, shape: Shape) -> Shape:
        """Return ``shape`` with a position on ``dim`` and its rows behind it."""
        if self.unit == 1:
            return shape
        return (*shape[: self.dim], shape[self.dim] // self.unit, self.unit, *shape[self.dim + 1 :])

    def is_even(self) -> bool:
        """Say whether every rank has as many positions."""
        return len(set(self.counts)) == 1

    def is_in_place(self, shape: Shape) -> bool:
        """Say whether a dense tensor of ``shape`` already lies as a buffer does: part by part."""
        return self.index is None and prod(shape[: self.dim]) == 1


class Transfer:
    """One collective under way: its works, the buffer that it reads, and what follows."""

    __slots__ = ("finish", "naming", "send", "works")

    def __init__(
        self,
        naming: AbstractContextManager[None],
        works: Sequence[Any],
        send: Tensor | None,
        finish: Callable[[], list[Tensor]],
    ) -> None:
        self.naming = naming
        self.works = [work for work in works if work is not None]
        self.send = send
        self.finish = finish

    def wait(self) -> None:
        """Wait for the wire, then let go of what was sent."""
        with self.naming:
            for work in self.works:
                work.wait()
        self.works = []
        self.send = None


class Pending:
    """The transfers of one move; it owns their buffers until they are finished."""

    def __init__(self, transfers: list[tuple[tuple[int, ...], Transfer]]) -> None:
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


@dataclass(frozen=True)
class Move(ABC):
    """A linear rearrangement of tensors over the ranks of ``group``; ``where`` names the caller."""

    where: str
    group: ProcessGroup

    @abstractmethod
    def start(self, xs: Sequence[Tensor], *, overlap: bool) -> Pending:
        """Launch. With ``overlap`` the caller goes on, so ``xs`` are copied, never sent."""

    @abstractmethod
    def mirror(self, needed: Sequence[int]) -> Move:
        """Return the move of the gradients of the results ``needed``."""

    def results(self, needed: Sequence[int]) -> Sequence[int]:
        """Return which results have gradients if the inputs ``needed`` want some."""
        return needed

    def kept(self, xs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return what backward needs of the inputs: nothing, for a linear move."""
        return ()

    def gradients(
        self, arrived: Sequence[Tensor], kept: Sequence[Tensor], needed: Sequence[int]
    ) -> Sequence[Tensor]:
        """Return the gradients of the inputs ``needed``, of what the mirrored move brought."""
        return arrived


def dense(x: Tensor, cut: Cut | None, *, overlap: bool, joined: Sequence[int] = ()) -> Tensor:
    """Return ``x`` as a flat send buffer, by a copy only where its layout or its owner asks."""
    if cut is None:
        in_place, lying = True, x
    elif joined:
        in_place, lying = cut.dim == joined[0] and cut.index is None, x.movedim(joined[0], 0)
    else:
        in_place, lying = cut.is_in_place(tuple(x.shape)), x
    if in_place and not overlap and lying.is_contiguous() and not (x.is_conj() or x.is_neg()):
        return lying.detach().view(-1)
    if cut is not None:
        x = x.view(cut.in_units(tuple(x.shape))) if cut.unit > 1 else x  # any strides: one dim, two
        return pack([x], [cut.dim], list(cut.counts), list(cut.index or ()), joined)
    return pack([x], [0], [x.shape[0]], [])  # one part, in the order of its dims


def landing(like: Tensor, cut: Cut, shape: Shape) -> tuple[Tensor, Callable[[], list[Tensor]]]:
    """Return a flat receive buffer and what makes the result of it: nothing, or one copy."""
    if cut.is_in_place(shape):
        out = like.new_empty(shape)
        return out.view(-1), lambda: [out]
    counts, index = list(cut.counts), list(cut.index or ())
    buffer = like.new_empty(sum(prod(cut.part(shape, p)) for p in range(len(counts))))
    parts = list(cut.in_units(shape))

    def finish() -> list[Tensor]:
        (out,) = unpack(buffer, [parts], [cut.dim], counts, index)
        if cut.unit == 1:
            return [out]
        return [_no_view(out.view(shape))]

    return buffer, finish


def _no_view(x: Tensor) -> Tensor:
    """Return a tensor of its own on the memory of ``x``: autograd lets it be written in place."""
    out = x.new_empty(0)
    out.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())
    return out


def slices(buffer: Tensor, shapes: Sequence[Shape], joined: Sequence[int]) -> list[Tensor]:
    """Return the tensors that lie side by side in a received buffer, rows first, without a copy."""
    first, along = joined
    whole = list(shapes[0])
    whole[along] = sum(shape[along] for shape in shapes)
    rows = whole.pop(first)
    lying = buffer.view(rows, *whole).movedim(0, first)
    outs, at = [], 0
    for shape in shapes:
        outs.append(_no_view(lying.narrow(along, at, shape[along])))
        at += shape[along]
    return outs
