"""Rows of other ranks' shards, by point-to-point messages: what a window needs, and no more.

============  ============================================  =====================================
function      result                                        backward
============  ============================================  =====================================
`fetch_rows`  the rows of the whole sequence that this      each gradient goes back to the rank
              rank asks for, its own among them             that has the row, and is added there
============  ============================================  =====================================

A rank sends one message to each rank that asks for some of its rows, with the rows of all tensors
of one dtype. Which rows every rank asks for is known to all of them, so nothing is asked::

    4 ranks of 6 rows, a window of 5: each rank asks for the 4 rows before its own

    rank 0   0-5                    sends 2-5   to rank 1
    rank 1   2-5,   6-11            sends 8-11  to rank 2
    rank 2   8-11,  12-17           sends 14-17 to rank 3
    rank 3   14-17, 18-23
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_comm import _torch, arguments
from hp_comm.autograd import move_tensors
from hp_comm.counters import record
from hp_comm.failures import Naming
from hp_comm.handle import Handle
from hp_comm.moves import Move, Pending, Transfer
from hp_mesh.checks import require
from hp_mesh.window import Range

__all__ = ["FetchRows", "Rows", "fetch_rows"]

Rows = Sequence[Sequence[Range]]
"""Per rank of the group, the ranges of the whole sequence that it asks for, ascending, disjoint."""

Message = tuple[int, tuple[Range, ...]]
"""A peer, and ranges of rows: of the shard where it is sent from, of the result where it lands."""


@dataclass(frozen=True, slots=True)
class Links:
    """What one rank sends and receives.

    Attributes:
        sends: For each peer, ranges of this rank's shard.
        receives: For each peer, ranges of this rank's result.
        own: Ranges of the result that lie in this rank's shard, and where they lie there.
        length: Rows of the result.
    """

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    own: tuple[tuple[Range, Range], ...]
    length: int


@lru_cache(maxsize=256)
def _links(rows: tuple[tuple[Range, ...], ...], shard: int, rank: int) -> Links:
    def shared(owner: int, asker: int) -> tuple[tuple[Range, Range], ...]:
        """Return where the rows of ``owner`` lie in the result of ``asker``, and in its shard."""
        first, last, at, found = owner * shard, (owner + 1) * shard, 0, []
        for start, stop in rows[asker]:
            low, high = max(start, first), min(stop, last)
            if low < high:
                place = (at + low - start, at + high - start)
                found.append((place, (low - first, high - first)))
            at += stop - start
        return tuple(found)

    peers = [peer for peer in range(len(rows)) if peer != rank]
    sends = [(peer, tuple(local for _, local in shared(rank, peer))) for peer in peers]
    receives = [(peer, tuple(place for place, _ in shared(peer, rank))) for peer in peers]
    return Links(
        sends=tuple(message for message in sends if message[1]),
        receives=tuple(message for message in receives if message[1]),
        own=shared(rank, rank),
        length=sum(stop - start for start, stop in rows[rank]),
    )


@dataclass(frozen=True)
class FetchRows(Move):
    """Give every rank the rows that it asks for, or with ``back`` their gradients to the owners."""

    dims: tuple[int, ...]
    links: Links
    shard: int
    back: bool = False

    def mirror(self, needed: Sequence[int]) -> FetchRows:
        """Send the other way what was received."""
        dims = tuple(self.dims[t] for t in needed)
        return FetchRows(self.where, self.group, dims, self.links, self.shard, not self.back)

    def start(self, xs: Sequence[Tensor], *, overlap: bool) -> Pending:
        """Launch one message per peer and dtype; what is sent is always a copy."""
        links = self.links
        sends, receives = (
            (links.receives, links.sends) if self.back else (links.sends, links.receives)
        )
        by_dtype: dict[torch.dtype, list[int]] = {}
        for t, x in enumerate(xs):
            by_dtype.setdefault(x.dtype, []).append(t)
        outs = [self._own(x, dim) for x, dim in zip(xs, self.dims, strict=True)]
        messages: list[tuple[Tensor, int]] = []
        landings: list[tuple[Tensor, int]] = []
        finishes: list[Callable[[], None]] = []
        for places in by_dtype.values():
            for peer, ranges in sends:
                pieces = [self._piece(xs[t], t, row) for t in places for row in ranges]
                messages.append((torch.cat([p.reshape(-1) for p in pieces]), peer))
            for peer, ranges in receives:
                into = [self._piece(outs[t], t, row) for t in places for row in ranges]
                buffer = into[0].new_empty(sum(piece.numel() for piece in into))
                landings.append((buffer, peer))
                finishes.append(self._landing(buffer, into))
        size = _torch.group_size(self.group)
        for message, _ in messages:
            record("p2p", size, message.numel() * message.element_size())
        naming = Naming(self.where, "p2p", self.group)
        with naming:
            works = _torch.trade(messages, landings, self.group)

        def finish() -> list[Tensor]:
            messages.clear()  # the wire is done with them
            for land in finishes:
                land()
            return outs

        return Pending([(tuple(range(len(xs))), Transfer(naming, works, None, finish))])

    def _own(self, x: Tensor, dim: int) -> Tensor:
        """Return the result with this rank's own rows in place."""
        shape = list(x.shape)
        shape[dim] = self.shard if self.back else self.links.length
        # gradients are added to what is there, so rows that nobody asked for are zero
        out = x.new_zeros(shape) if self.back else x.new_empty(shape)
        for place, local in self.links.own:
            to, source = (local, place) if self.back else (place, local)
            out.narrow(dim, to[0], to[1] - to[0]).copy_(
                x.narrow(dim, source[0], source[1] - source[0])
            )
        return out

    def _piece(self, x: Tensor, t: int, rows: Range) -> Tensor:
        return x.narrow(self.dims[t], rows[0], rows[1] - rows[0])

    def _landing(self, buffer: Tensor, into: Sequence[Tensor]) -> Callable[[], None]:
        def land() -> None:
            parts = torch.split(buffer, [piece.numel() for piece in into])
            for piece, part in zip(into, parts, strict=True):
                if self.back:
                    piece.add_(part.view(piece.shape))
                else:
                    piece.copy_(part.view(piece.shape))

        return land


@overload
def fetch_rows(
    x: Tensor, group: ProcessGroup, *, seq_dim: int, rows: Rows, async_op: Literal[False] = ...
) -> Tensor: ...
@overload
def fetch_rows(
    x: Tensor, group: ProcessGroup, *, seq_dim: int, rows: Rows, async_op: Literal[True]
) -> Handle[Tensor]: ...
@overload
def fetch_rows(
    x: Sequence[Tensor],
    group: ProcessGroup,
    *,
    seq_dim: int,
    rows: Rows,
    async_op: Literal[False] = ...,
) -> tuple[Tensor, ...]: ...
@overload
def fetch_rows(
    x: Sequence[Tensor], group: ProcessGroup, *, seq_dim: int, rows: Rows, async_op: Literal[True]
) -> Handle[tuple[Tensor, ...]]: ...
def fetch_rows(
    x: Tensor | Sequence[Tensor],
    group: ProcessGroup,
    *,
    seq_dim: int,
    rows: Rows,
    async_op: bool = False,
) -> Any:
    """Return the rows of the whole sequence that this rank asks for.

    Args:
        x: This rank's shard, ``[B, S/P, H, D]``, all shards of one length; or several tensors, of
            which those of one dtype travel together.
        group: The ``P`` ranks.
        seq_dim: Dim of ``x`` that holds the sequence.
        rows: Per rank, the ranges of the whole sequence that it asks for, ascending and disjoint;
            the same on every rank.
        async_op: Return a `Handle` and let the transfer overlap with what comes next.

    Returns:
        ``[B, R, H, D]`` for the ``R`` rows of this rank's ranges, in their order, dense; a tuple
        for several. Backward sends each gradient to the rank that has the row, where it is *added*.
    """
    where = "fetch_rows"
    xs, single = arguments.tensors_of(where, "x", x), isinstance(x, Tensor)
    for one in xs:
        arguments.require_addable_gradient(where, one)
    size, rank = arguments.group_of(where, group)
    dims = tuple(arguments.one_dim(where, one.shape, "seq_dim", seq_dim) for one in xs)
    lengths = {one.shape[dim] for one, dim in zip(xs, dims, strict=True)}
    require(
        len(lengths) == 1,
        where,
        f"the tensors (shapes {[list(one.shape) for one in xs]}) must have one length in dim "
        f"{seq_dim}",
    )
    shard = lengths.pop()
    table = tuple(tuple((int(a), int(b)) for a, b in ranges) for ranges in rows)
    _check(where, table, size, shard)
    move = FetchRows(where, group, dims, _links(table, shard, rank), shard)
    return move_tensors(move, xs, single=single, async_op=async_op)


def _check(where: str, table: tuple[tuple[Range, ...], ...], size: int, shard: int) -> None:
    require(
        len(table) == size,
        where,
        f"rows ({len(table)} entries) must have an entry for each of {size} ranks",
    )
    for rank, ranges in enumerate(table):
        ascending = all(b <= c for (_, b), (c, _) in pairwise(ranges))
        inside = all(0 <= a < b <= size * shard for a, b in ranges)
        require(
            ascending and inside,
            where,
            f"rows[{rank}] ({list(ranges)}) must be ascending, disjoint ranges of the "
            f"{size * shard} rows of all shards",
        )
