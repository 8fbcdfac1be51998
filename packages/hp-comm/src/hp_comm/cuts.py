"""How an exchange cuts what it sends and joins what it receives, from a caller's arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from math import prod
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from hp_comm.arguments import per_rank, read_table, require_no_lengths, two_dims
from hp_comm.moves import Cut, Shape
from hp_mesh.checks import require, require_divisible
from hp_mesh.window import head_tail_chunks

__all__ = [
    "Cuts",
    "chunks_of_ranks",
    "heads_to_sequence",
    "lengths_of_ranks",
    "put_back",
    "rows_to_ranks",
    "sequence_to_heads",
    "take",
]


@dataclass(frozen=True)
class Cuts:
    """How an exchange cuts what it sends and joins what it receives, one entry per tensor."""

    sends: tuple[Cut, ...]
    receives: tuple[Cut, ...]
    in_shapes: tuple[Shape, ...]
    out_shapes: tuple[Shape, ...]
    joined: tuple[int, ...]


Tables = Sequence[Sequence[Sequence[int]] | None]
F = TypeVar("F", bound=Callable[..., Cuts])


def _remembered(function: F) -> F:
    """Check the arguments of an exchange and cut once for all calls that say the same."""
    known = lru_cache(maxsize=512, typed=True)(function)

    @wraps(function)
    def remember(*args: Any) -> Cuts:
        try:
            hash(args)
        except TypeError:  # tables given as lists
            return function(*args)
        return known(*args)

    return cast(F, remember)


@_remembered
def sequence_to_heads(
    where: str,
    shapes: tuple[Shape, ...],
    seq_dim: int,
    head_dim: int,
    tables: Tables,
    lengths: Sequence[int] | None,
    size: int,
    rank: int,
    dense: bool,
) -> Cuts:
    """Send heads, receive rows; see `hp_comm.seq_to_head`."""
    dims = [two_dims(where, shape, seq_dim, head_dim) for shape in shapes]
    sends, receives = [], []
    for shape, (s, h), table in zip(shapes, dims, tables, strict=True):
        sends.append(heads_to_ranks(where, shape, h, table, size))
        receives.append(lengths_of_ranks(where, shape, s, lengths, size, rank))
    joined = () if dense else _joined(sends, receives, shapes)
    return _cuts(sends, receives, shapes, rank, joined)


@_remembered
def heads_to_sequence(
    where: str,
    shapes: tuple[Shape, ...],
    seq_dim: int,
    head_dim: int,
    tables: Tables,
    lengths: Sequence[int] | None,
    size: int,
    rank: int,
) -> Cuts:
    """Send rows, receive heads; see `hp_comm.head_to_seq`."""
    dims = [two_dims(where, shape, seq_dim, head_dim) for shape in shapes]
    sends, receives = [], []
    for shape, (s, h), table in zip(shapes, dims, tables, strict=True):
        sends.append(rows_to_ranks(where, shape, s, lengths, size))
        receives.append(heads_of_ranks(where, shape, h, table, size, rank))
    # what lies apart because of it is the gradient, which nobody looks at as a dense tensor;
    # where heads lead, they lie in one piece as they are
    heads_lead = len(shapes) == 1 and prod(shapes[0][: receives[0].dim]) == 1
    joined = () if heads_lead else _joined(receives, sends, shapes)
    return _cuts(sends, receives, shapes, rank, joined)


def _cuts(
    sends: Sequence[Cut],
    receives: Sequence[Cut],
    shapes: tuple[Shape, ...],
    rank: int,
    joined: tuple[int, ...],
) -> Cuts:
    """Return the exchange: of what is cut a rank keeps its own part, of what is joined all."""
    outs = [
        _with(_with(shape, receive.dim, sum(receive.counts)), send.dim, send.counts[rank])
        for shape, send, receive in zip(shapes, sends, receives, strict=True)
    ]
    return Cuts(tuple(sends), tuple(receives), shapes, tuple(outs), joined)


def _joined(heads: Sequence[Cut], rows: Sequence[Cut], shapes: Sequence[Shape]) -> tuple[int, ...]:
    """Return ``(seq_dim, head_dim)`` if the tensors fit side by side: they differ in heads only."""
    alike = {_with(shape, cut.dim, 0) for shape, cut in zip(shapes, heads, strict=True)}
    places = {(row.dim, head.dim) for row, head in zip(rows, heads, strict=True)}
    return next(iter(places)) if len(alike) == len(places) == 1 else ()


def _with(shape: Shape, dim: int, length: int) -> Shape:
    return (*shape[:dim], length, *shape[dim + 1 :])


def lengths_of_ranks(
    where: str, shape: Shape, dim: int, lengths: Sequence[int] | None, size: int, rank: int
) -> Cut:
    """Cut the whole sequence into the ranks' shards; ``shape`` is that of this rank's."""
    local = shape[dim]
    if lengths is None:
        return Cut(dim, (local,) * size)
    counts = per_rank(where, "lengths", lengths, size)
    require(
        counts[rank] == local,
        where,
        f"lengths[{rank}] ({counts[rank]}) must be this rank's length on dim {dim} of x ({local})",
    )
    return Cut(dim, counts)


def chunks_of_ranks(
    where: str, length: int, dim: int, lengths: Sequence[int] | None, size: int
) -> Cut:
    """Cut a whole sequence into the ranks' chunks, ``r`` and ``2P - 1 - r`` of ``2P``."""
    require_no_lengths(where, lengths)
    require_divisible(where, f"sequence length (dim {dim} of x)", length, "2P", 2 * size)
    if not length:  # no rows: no chunk has a size
        return Cut(dim, (0,) * size)
    return Cut(dim, (2,) * size, head_tail_chunks(size), length // (2 * size))


def rows_to_ranks(
    where: str, shape: Shape, dim: int, lengths: Sequence[int] | None, size: int
) -> Cut:
    """Cut x, which holds the whole sequence, into the ranks' shards."""
    whole = shape[dim]
    if lengths is None:
        require(
            whole % size == 0,
            where,
            f"sequence length (dim {dim} of x, {whole}) must be divisible by the group size "
            f"({size})",
            "pass lengths= for unequal shards",
        )
        return Cut(dim, (whole // size,) * size)
    counts = per_rank(where, "lengths", lengths, size)
    require(
        sum(counts) == whole,
        where,
        f"lengths {counts} must sum to the sequence length (dim {dim} of x, {whole}), "
        f"not to {sum(counts)}",
    )
    return Cut(dim, counts)


def _named(dim: int, counts: tuple[int, ...], index: tuple[int, ...]) -> Cut:
    """Forget an index that says what consecutive ranges say."""
    return Cut(dim, counts, None if index == tuple(range(len(index))) else index)


def heads_to_ranks(
    where: str, shape: Shape, dim: int, table: Sequence[Sequence[int]] | None, size: int
) -> Cut:
    """Cut the heads of x for the ranks; some may go to several, some to none."""
    num_heads = shape[dim]
    if table is None:
        require(
            num_heads % size == 0,
            where,
            f"number of heads (dim {dim} of x {tuple(shape)}, {num_heads}) must be divisible by "
            f"the group size ({size})",
            "pass heads= to say which rank gets which, or check seq_dim and head_dim",
        )
        return Cut(dim, (num_heads // size,) * size)
    counts, index = read_table(where, table, size)
    for position in index:
        require(
            0 <= position < num_heads,
            where,
            f"heads ({position}) must be positions on dim {dim} of x, which has {num_heads} heads",
        )
    if len(index) < num_heads:  # an unsent tail is not what consecutive ranges say
        return Cut(dim, counts, index)
    return _named(dim, counts, index)


def heads_of_ranks(
    where: str, shape: Shape, dim: int, table: Sequence[Sequence[int]] | None, size: int, rank: int
) -> Cut:
    """Say where the heads of each rank belong; x has this rank's."""
    local = shape[dim]
    if table is None:
        return Cut(dim, (local,) * size)
    counts, index = read_table(where, table, size)
    require(
        counts[rank] == local,
        where,
        f"heads[{rank}] ({counts[rank]} heads) must be as many as dim {dim} of x has ({local})",
    )
    require(
        sorted(index) == list(range(len(index))),
        where,
        f"heads {index} must hold each of the {len(index)} heads once",
    )
    return _named(dim, counts, index)


def take(x: Tensor, cut: Cut) -> Tensor:
    """Return what the only rank of a group gets of ``x``."""
    if cut.index is None:
        return x
    return x.index_select(cut.dim, torch.tensor(cut.index, dtype=torch.long, device=x.device))


def put_back(x: Tensor, cut: Cut) -> Tensor:
    """Return the heads of the only rank of a group in their order."""
    if cut.index is None:
        return x
    order = sorted(range(len(cut.index)), key=cut.index.__getitem__)
    return x.index_select(cut.dim, torch.tensor(order, dtype=torch.long, device=x.device))
