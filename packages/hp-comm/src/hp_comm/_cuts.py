"""From a caller's arguments to cuts, or to the error that says what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_comm import _torch
from hp_comm.moves import Cut
from hp_mesh.checks import fail, require

__all__ = [
    "group_of",
    "head_tables",
    "heads_of_ranks",
    "heads_to_ranks",
    "lengths_of_ranks",
    "one_dim",
    "put_back",
    "require_tensors",
    "rows_to_ranks",
    "take",
    "two_dims",
]


def require_tensors(where: str, xs: Sequence[Any]) -> None:
    """Refuse an empty call and what is not a tensor."""
    require(bool(xs), where, "x (empty sequence) must hold at least one tensor")
    for one in xs:
        if not isinstance(one, Tensor):
            raise TypeError(
                f"{where}: x ({type(one).__name__}) must be a tensor or a sequence of them"
            )
    devices = sorted({str(one.device) for one in xs})
    require(len(devices) == 1, where, f"x (on {', '.join(devices)}) must be on one device")


def group_of(where: str, group: ProcessGroup) -> tuple[int, int]:
    """Return size and own rank of a group that this rank is in."""
    rank = _torch.group_rank(group)
    require(rank >= 0, where, f"group ({group}) must contain this rank")
    return _torch.group_size(group), rank


def one_dim(where: str, x: Tensor, name: str, dim: int) -> int:
    """Return ``dim`` counted from the front."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise fail(where, f"{name} ({dim!r}) must be an integer")
    n = x.ndim
    require(-n <= dim < n, where, f"{name} ({dim}) must be a dim of x ({tuple(x.shape)})")
    return dim % n


def two_dims(where: str, x: Tensor, seq_dim: int, head_dim: int) -> tuple[int, int]:
    """Return both dims counted from the front; they must differ."""
    s, h = one_dim(where, x, "seq_dim", seq_dim), one_dim(where, x, "head_dim", head_dim)
    require(
        s != h,
        where,
        f"seq_dim ({seq_dim}) must not be the same dim as head_dim ({head_dim}) of x "
        f"({tuple(x.shape)})",
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
    where: str, x: Tensor, dim: int, lengths: Sequence[int] | None, size: int, rank: int
) -> Cut:
    """Cut the whole sequence into the ranks' shards; ``x`` is this rank's."""
    local = x.shape[dim]
    if lengths is None:
        return Cut(dim, (local,) * size)
    counts = _numbers(where, "lengths", lengths, size)
    require(
        counts[rank] == local,
        where,
        f"lengths[{rank}] ({counts[rank]}) must be this rank's length on dim {dim} of x ({local})",
    )
    return Cut(dim, counts)


def rows_to_ranks(where: str, x: Tensor, dim: int, lengths: Sequence[int] | None, size: int) -> Cut:
    """Cut ``x``, which holds the whole sequence, into the ranks' shards."""
    whole = x.shape[dim]
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
    where: str, xs: Sequence[Tensor], heads: Any, *, single: bool
) -> list[Sequence[Sequence[int]] | None]:
    """Return one table, or None, per tensor."""
    if heads is None:
        return [None] * len(xs)
    if single:
        return [heads]
    tables = list(heads)
    require(
        len(tables) == len(xs),
        where,
        f"heads ({len(tables)} tables) must have one table, or None, per tensor of x ({len(xs)})",
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
    where: str, x: Tensor, dim: int, table: Sequence[Sequence[int]] | None, size: int
) -> Cut:
    """Cut the heads of ``x`` for the ranks; some may go to several, some to none."""
    num_heads = x.shape[dim]
    if table is None:
        require(
            num_heads % size == 0,
            where,
            f"number of heads (dim {dim} of x {tuple(x.shape)}, {num_heads}) must be divisible by "
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
    where: str, x: Tensor, dim: int, table: Sequence[Sequence[int]] | None, size: int, rank: int
) -> Cut:
    """Say where the heads of each rank belong; ``x`` has this rank's."""
    local = x.shape[dim]
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
