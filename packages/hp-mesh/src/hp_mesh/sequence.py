"""Cut a sequence, and what goes with it, for this rank. Nothing here communicates.

Every rank holds the whole sequence (as a data loader gives it) and takes its part::

    tokens, mask = pad_sequence(tokens, multiple_for(mesh["cp"]), value=pad_id)
    labels = next_token_labels(tokens.masked_fill(~mask, -100), mesh["cp"])
    tokens = shard_sequence(tokens, mesh["cp"])
    positions = position_ids(mesh["cp"], local_length=tokens.shape[1])

Two orders: ``"contiguous"``, which all modes of context parallelism take, and ``"head_tail"``,
where rank r holds chunk r and chunk ``2P-1-r`` of ``2P``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hp_mesh.checks import fail, require, require_positive
from hp_mesh.cu_seqlens import read_cu_seqlens
from hp_mesh.mesh import require_cp_axes
from hp_mesh.window import Range, contiguous_rows, head_tail_rows

__all__ = [
    "ContextRank",
    "Order",
    "join_sequence",
    "multiple_for",
    "next_token_labels",
    "pad_sequence",
    "position_ids",
    "rank_and_size",
    "rank_rows",
    "shard_sequence",
]

Order = Literal["contiguous", "head_tail"]
ContextRank = DeviceMesh | tuple[int, int]
"""The CP mesh (1-D, or 2-D with Ulysses inside), or ``(rank, size)`` within it."""


def shard_sequence(
    x: Tensor,
    cp: ContextRank,
    *,
    seq_dim: int = 1,
    order: Order = "contiguous",
    pad_value: float | None = None,
) -> Tensor:
    """Return this rank's part of ``x``, ``[..., S/P, ...]``; a view where the order allows it.

    Args:
        x: The whole sequence, the same on every CP rank, ``[..., S, ...]``.
        cp: The CP mesh, or ``(rank, size)``.
        seq_dim: Dim of the sequence.
        order: ``"contiguous"`` or ``"head_tail"``.
        pad_value: Pad at the end to the next good length with this; `pad_sequence` gives the mask.
            None refuses lengths that don't divide.
    """
    rank, size = rank_and_size("shard_sequence", cp)
    dim = _seq_dim("shard_sequence", x, seq_dim)
    if pad_value is not None:
        x, _ = pad_sequence(x, multiple_for(cp, order), seq_dim=dim, value=pad_value)
    return _cut(x, dim, _rows("shard_sequence", rank, size, x.shape[dim], order))


def join_sequence(
    shards: Sequence[Tensor], *, seq_dim: int = 1, order: Order = "contiguous"
) -> Tensor:
    """Return the whole sequence, ``[..., S, ...]``, from the parts of all ranks in rank order."""
    size = len(shards)
    require_positive("join_sequence", "the number of shards", size)
    dim = _seq_dim("join_sequence", shards[0], seq_dim)
    length = sum(shard.shape[dim] for shard in shards)
    pieces: dict[int, Tensor] = {}
    for rank, shard in enumerate(shards):
        taken = 0
        for start, stop in _rows("join_sequence", rank, size, length, order):
            pieces[start] = shard.narrow(dim, taken, stop - start)
            taken += stop - start
    return torch.cat([pieces[start] for start in sorted(pieces)], dim)


def pad_sequence(
    x: Tensor, multiple: int, *, seq_dim: int = 1, value: float = 0
) -> tuple[Tensor, Tensor]:
    """Return ``x`` padded at its end to a multiple, and the mask of what is real.

    Args:
        x: ``[..., S, ...]``.
        multiple: The padded length is the next multiple of this; see `multiple_for`.
        seq_dim: Dim of the sequence.
        value: What the new rows hold. Labels want ``ignore_index``.

    Returns:
        ``(padded, mask)``: ``[..., S', ...]``, which is ``x`` itself if nothing is missing, and a
        bool ``[S']``, True for the first ``S`` rows.
    """
    require_positive("pad_sequence", "multiple", multiple)
    dim = _seq_dim("pad_sequence", x, seq_dim)
    length = x.shape[dim]
    missing = -length % multiple
    mask = torch.arange(length + missing, device=x.device) < length
    if missing == 0:
        return x, mask
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_full(shape, value)], dim), mask


def multiple_for(
    cp: ContextRank, order: Order = "contiguous", *, load_balance: bool = False
) -> int:
    """Return what a sequence length must be a multiple of: P, or 2P for two chunks a rank."""
    _, size = rank_and_size("multiple_for", cp)
    return 2 * size if _two_chunks("multiple_for", order) or load_balance else size


def position_ids(
    cp: ContextRank,
    *,
    local_length: int | None = None,
    global_length: int | None = None,
    order: Order = "contiguous",
    cu_seqlens: Sequence[int] | Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the global positions of this rank's tokens, int64 ``[S/P]``.

    They start where the CP rank's part starts; data parallel replicas don't shift them.

    Args:
        cp: The CP mesh, or ``(rank, size)``.
        local_length: ``S/P``; give this or ``global_length``.
        global_length: ``S``.
        order: Order of the data.
        cu_seqlens: Starts of the packed documents and the end of the last, ``[0, ..., S]``:
            positions then restart in each document. Rows after the end (padding) count on from 0.
        device: Where the result lives.
    """
    where = "position_ids"
    rank, size = rank_and_size(where, cp)
    if (local_length is None) == (global_length is None):
        raise fail(where, "exactly one of local_length and global_length must be given")
    if local_length is not None:
        global_length = local_length * size
    assert global_length is not None, "one of the two was given"
    rows = _rows(where, rank, size, global_length, order)
    positions = torch.cat([torch.arange(*row, device=device) for row in rows])
    if cu_seqlens is None:
        return positions
    ends = read_cu_seqlens(where, cu_seqlens, global_length)
    starts = torch.tensor(ends, device=device)
    document = torch.searchsorted(starts, positions, right=True) - 1
    return positions - starts[document]


def next_token_labels(
    tokens: Tensor,
    cp: ContextRank | None = None,
    *,
    seq_dim: int = 1,
    ignore_index: int = -100,
    order: Order = "contiguous",
    cu_seqlens: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """Return for each token the one that follows it; shifted on the whole sequence, then cut.

    Shifting after the cut gives the last token of each shard a wrong target.

    Args:
        tokens: The whole sequence, ``[B, S]``; or labels in which prompt and padding are already
            ``ignore_index``.
        cp: The CP mesh or ``(rank, size)`` for this rank's part, ``[B, S/P]``; None for all.
        seq_dim: Dim of the sequence.
        ignore_index: Label of the last token, which nothing follows.
        order: Order of the data.
        cu_seqlens: As in `position_ids`: the last token of each document is ignored too.
    """
    where = "next_token_labels"
    dim = _seq_dim(where, tokens, seq_dim)
    labels = tokens.roll(-1, dim)
    length = tokens.shape[dim]
    last = [length - 1]
    if cu_seqlens is not None:
        last += [end - 1 for end in read_cu_seqlens(where, cu_seqlens, length)[1:]]
    index = torch.tensor(sorted({row for row in last if row >= 0}), device=tokens.device)
    labels = labels.index_fill(dim, index, ignore_index)
    if cp is None:
        return labels
    rank, size = rank_and_size(where, cp)
    return _cut(labels, dim, _rows(where, rank, size, length, order))


def rank_rows(
    cp: ContextRank, length: int, order: Order = "contiguous", *, where: str = "rank_rows"
) -> tuple[Range, ...]:
    """Return the ranges of the whole sequence that this rank holds, in the order it holds them."""
    rank, size = rank_and_size(where, cp)
    return _rows(where, rank, size, length, order)


def _rows(where: str, rank: int, size: int, length: int, order: Order) -> tuple[Range, ...]:
    two = _two_chunks(where, order)
    multiple = 2 * size if two else size
    if length % multiple:
        by = f"2 * cp_size ({multiple}) for head_tail" if two else f"cp_size ({size})"
        raise fail(
            where,
            f"the sequence length ({length}) must be divisible by {by}",
            f"pad it to {length + -length % multiple} with pad_sequence(x, {multiple})",
        )
    return head_tail_rows(rank, size, length) if two else (contiguous_rows(rank, size, length),)


def _cut(x: Tensor, dim: int, rows: Sequence[Range]) -> Tensor:
    parts = [x.narrow(dim, start, stop - start) for start, stop in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _two_chunks(where: str, order: str) -> bool:
    if order not in ("contiguous", "head_tail"):
        raise fail(where, f'order ({order!r}) must be "contiguous" or "head_tail"')
    return order == "head_tail"


def rank_and_size(where: str, cp: ContextRank) -> tuple[int, int]:
    """Read rank and size; on a 2-D mesh the rank counts along the second axis first."""
    if not isinstance(cp, DeviceMesh):
        rank, size = cp
        require_positive(where, "cp_size", size)
        require(0 <= rank < size, where, f"rank ({rank}) must be in [0, {size - 1}]")
        return rank, size
    require(
        cp.ndim in (1, 2),
        where,
        f"the CP mesh (shape {tuple(cp.shape)}) must have 1 or 2 axes",
        "pass the CP slice of the mesh, such as mesh['cp']",
    )
    require_cp_axes(where, cp)
    coordinate = cp.get_coordinate()
    if coordinate is None:
        raise fail(where, f"this rank ({cp.get_rank()}) must be in the CP mesh {cp.mesh.tolist()}")
    rank = 0
    for place, length in zip(coordinate, cp.shape, strict=True):
        rank = rank * length + place
    return rank, cp.size()


def _seq_dim(where: str, x: Tensor, seq_dim: int) -> int:
    require(
        -x.ndim <= seq_dim < x.ndim,
        where,
        f"seq_dim ({seq_dim}) must be a dim of the tensor (shape {tuple(x.shape)})",
    )
    return seq_dim % x.ndim
