"""What a caller's arguments must be, said before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hp_comm import _torch
from hp_comm.moves import Shape
from hp_mesh.checks import fail, require

__all__ = [
    "group_of",
    "head_tables",
    "one_dim",
    "per_rank",
    "read_table",
    "require_addable",
    "require_addable_gradient",
    "require_no_lengths",
    "require_order",
    "require_tensor",
    "tensors_of",
    "two_dims",
]


def tensors_of(where: str, name: str, x: Any) -> list[Tensor]:
    """Return the tensors of ``x``, one or several; refuse an empty call and what is no tensor."""
    xs = list(x) if isinstance(x, Iterable) and not isinstance(x, Tensor) else [x]
    require(bool(xs), where, f"{name} (empty sequence) must hold at least one tensor")
    for one in xs:
        if not isinstance(one, Tensor):
            raise TypeError(
                f"{where}: {name} ({type(one).__name__}) must be a tensor or a sequence of them"
            )
    if len({one.device for one in xs}) > 1:
        devices = sorted({str(one.device) for one in xs})
        raise fail(where, f"{name} (on {', '.join(devices)}) must be on one device")
    return xs


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


def require_addable_gradient(where: str, x: Tensor) -> None:
    """Refuse a tensor whose gradients, of its dtype, are to be added up and cannot be."""
    if x.requires_grad and torch.is_grad_enabled():
        require_addable(where, x)


def group_of(where: str, group: ProcessGroup) -> tuple[int, int]:
    """Return size and own rank of a group that this rank is in."""
    if isinstance(group, DeviceMesh):
        raise TypeError(f"{where}: group (DeviceMesh) must be its group; pass mesh.get_group()")
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


def per_rank(where: str, name: str, values: Any, size: int) -> tuple[int, ...]:
    """Return as many numbers as there are ranks, none of them negative."""
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


def require_order(where: str, order: str) -> None:
    """Refuse an order of data that there is not."""
    if order not in ("contiguous", "head_tail"):
        raise fail(where, f"order ({order!r}) must be 'contiguous' or 'head_tail'")


def require_no_lengths(where: str, lengths: Sequence[int] | None) -> None:
    """Refuse lengths of shards that are pairs of equal chunks."""
    if lengths is not None:
        raise fail(
            where,
            f"lengths ({lengths!r}) must be None with order='head_tail', whose chunks are equal",
            "pad the sequence to a multiple of 2P, or use order='contiguous'",
        )


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


def read_table(
    where: str, table: Sequence[Sequence[int]], size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return how many heads each rank has, and their positions, rank after rank."""
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
