"""From a caller's arguments to cuts, or to the error that says what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from math import prod
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_comm import _torch
from hp_comm.moves import Cut, Shape
from hp_mesh.checks import fail, require, require_divisible
from hp_mesh.window import head_tail_chunks

__all__ = [
    "Cuts",
    "chunks_of_ranks",
    "group_of",
    "head_tables",
    "heads_to_sequence",
    "lengths_of_ranks",
    "one_dim",
    "put_back",
    "require_addable",
    "require_no_lengths",
    "require_order",
    "require_tensor",
    "require_tensors",
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
    sends, receives, outs = [], [], []
    for shape, table in zip(shapes, tables, strict=True):
        s, h = two_dims(where, shape, seq_dim, head_dim)
        send = heads_to_ranks(where, shape, h, table, size)
        receive = lengths_of_ranks(where, shape, s, lengths, size, rank)
        outs.append(_with(_with(shape, s, sum(receive.counts)), h, send.counts[rank]))
        sends.append(send)
        receives.append(receive)
    joined = () if dense else _joined(sends, receives, shapes, h)
    return Cuts(tuple(sends), tuple(receives), shapes, tuple(outs), joined)


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
    sends, receives, outs = [], [], []
    for shape, table in zip(shapes, tables, strict=True):
        s, h = two_dims(where, shape, seq_dim, head_dim)
        send = rows_to_ranks(where, shape, s, lengths, size)
        receive = heads_of_ranks(where, shape, h, table, size, rank)
        outs.append(_with(_with(shape, s, send.counts[rank]), h, sum(receive.counts)))
        sends.append(send)
        receives.append(receive)
    # what lies apart because of it is the gradient, which nobody looks at as a dense tensor;
    # where heads lead, they lie in one piece as they are
    heads_lead = len(shapes) == 1 and prod(shapes[0][: receives[0].dim]) == 1
    joined = () if heads_lead else _joined(receives, sends, shapes, h)
    return Cuts(tuple(sends), tuple(receives), shapes, tuple(outs), joined)


def _joined(
    heads: Sequence[Cut], rows: Sequence[Cut], shapes: Sequence[Shape], head_dim: int
) -> tuple[int, ...]:
    """Return ``(seq_dim, head_dim)`` if the tensors fit side by side: they differ in heads only."""
    alike = {_with(shape, head_dim, 0) for shape in shapes}
    places = {(row.dim, head.dim) for row, head in zip(rows, heads, strict=True)}
    return next(iter(places)) if len(alike) == len(places) == 1 else ()


def _with(shape: Shape, dim: int, length: int) -> Shape:
    return (*shape[:dim], length, *shape[dim + 1 :])


def require_tensors(where: str, xs: Sequence[Any]) -> None:
    """Refuse an empty call and what is not a tensor."""
    require(bool(xs), where, "x (empty sequence) must hold at least one tensor")
    for one in xs:
        if not isinstance(one, Tensor):
            raise TypeError(
                f"{where}: x ({type(one).__name__}) must be a tensor or a sequence of them"
            )
    if len({one.device for one in xs}) > 1:
        devices = sorted({str(one.device) for one in xs})
        raise fail(where, f"x (on {', '.join(devices)}) must be on one device")


def require_tensor(where: str, name: str, x: Any) -> None:
    """Refuse what is not one tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{where}: {name} ({type(x).__name__}) must be a tensor")


def require_addable(where: str, x: Tensor) -> None:
    """Refuse a tensor whose sum over the ranks no backend knows, or that none is meant to have."""
    if x.dtype == torch.bool or not _torch.is_known(x.dtype):
        raise fail(
            where,
            f"x ({x.dtype}) must be of a dtype that can be added up over the ranks",
            "convert it to a wider one first",
        )


def group_of(where: str, group: ProcessGroup) -> tuple[int, int]:
    """Return size and own rank of a group that this rank is in."""
    rank = _torch.group_rank(group)
    require(rank >= 0, where, f"group ({group}) must contain this rank")
    return _torch.group_size(group), rank


def one_dim(where: str, shape: Shape, name: str, dim: int) -> int:
    """Return ``dim`` of x, of ``shape``, counted from the front."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise fail(where, f"{name} ({dim!r}) must be an integer")
    n = len(shape)
    require(-n <= dim < n, where, f"{name} ({dim}) must be a dim of x ({tuple(shape)})")
    return dim % n


def two_dims(where: str, shape: Shape, seq_dim: int, head_dim: int) -> tuple[int, int]:
    """Return both dims counted from the front; they must differ."""
    s, h = one_dim(where, shape, "seq_dim", seq_dim), one_dim(where, shape, "head_dim", head_dim)
    require(
        s != h,
        where,
        f"seq_dim ({seq_dim}) must not be the same dim as head_dim ({head_dim}) of x "
        f"({tuple(shape)})",
    )
    return s, h


def _numbers(where: str, name: str, values: Any, size: int) -> tuple[int, ...]:
    numbers = tuple(values)
    require(
        len(numbers) == size,
        where,
        f"{name} ({len(numbers)} entries) must have one entry per rank of the group ({size})",
    )
    for n in numbers:
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise fail(where, f"{name} ({n!r}) must hold integers of at least 0")
    return numbers


def lengths_of_ranks(
    where: str, shape: Shape, dim: int, lengths: Sequence[int] | None, size: int, rank: int
) -> Cut:
    """Cut the whole sequence into the ranks' shards; ``shape`` is that of this rank's."""
    local = shape[dim]
    if lengths is None:
        return Cut(dim, (local,) * size)
    counts = _numbers(where, "lengths", lengths, size)
    require(
        counts[rank] == local,
        where,
        f"lengths[{rank}] ({counts[rank]}) must be this rank's length on dim {dim} of x ({local})",
    )
    return Cut(dim, counts)


def require_order(where: str, order: str) -> None:
    """Refuse an order of data that there is not."""
    if order not in ("contiguous", "head_tail"):
        raise fail(where, f"order ({order!r}) must be 'contiguous' or 'head_tail'")


def chunks_of_ranks(
    where: str, length: int, dim: int, lengths: Sequence[int] | None, size: int
) -> Cut:
    """Cut a whole sequence into the ranks' chunks, ``r`` and ``2P - 1 - r`` of ``2P``."""
    require_no_lengths(where, lengths)
    require_divisible(where, f"sequence length (dim {dim} of x)", length, "2P", 2 * size)
    if not length:  # no rows: no chunk has a size
        return Cut(dim, (0,) * size)
    return Cut(dim, (2,) * size, head_tail_chunks(size), length // (2 * size))


def require_no_lengths(where: str, lengths: Sequence[int] | None) -> None:
    """Refuse lengths of shards that are pairs of equal chunks."""
    if lengths is not None:
        raise fail(
            where,
            f"lengths ({lengths!r}) must be None with order='head_tail', whose chunks are equal",
            "pad the sequence to a multiple of 2P, or use order='contiguous'",
        )


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
    counts = _numbers(where, "lengths", lengths, size)
    require(
        sum(counts) == whole,
        where,
        f"lengths {counts} must sum to the sequence length (dim {dim} of x, {whole}), "
        f"not to {sum(counts)}",
    )
    return Cut(dim, counts)


def head_tables(
    where: str, count: int, heads: Any, *, single: bool
) -> Sequence[Sequence[Sequence[int]] | None]:
    """Return one table, or None, for each of ``count`` tensors."""
    if heads is None:
        return (None,) * count
    if single:
        return (heads,)
    tables = tuple(heads)
    require(
        len(tables) == count,
        where,
        f"heads ({len(tables)} tables) must have one table, or None, per tensor of x ({count})",
    )
    return tables


def _read_table(
    where: str, table: Sequence[Sequence[int]], size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    rows = list(table)
    require(
        len(rows) == size,
        where,
        f"heads ({len(rows)} entries) must have one entry per rank of the group ({size})",
    )
    for row in rows:
        if not isinstance(row, Sequence):
            raise fail(
                where,
                f"heads ({row!r}) must list, per rank, the positions on the head dim",
                "for several tensors: one such table per tensor",
            )
        for position in row:
            if isinstance(position, bool) or not isinstance(position, int):
                raise fail(where, f"heads ({position!r}) must hold integers")
    return tuple(len(row) for row in rows), tuple(h for row in rows for h in row)


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
    counts, index = _read_table(where, table, size)
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
    counts, index = _read_table(where, table, size)
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
