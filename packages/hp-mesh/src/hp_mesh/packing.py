"""Packed documents: one sequence of several, cut for this rank with all that goes with it.

Every rank holds the whole packed batch, as a data loader gives it, and takes its part::

    tokens, cu_seqlens = pack_documents(documents)
    batch = shard_packed(tokens, cu_seqlens, mesh["cp"], pad_value=pad_id)
    logits = model(batch.tokens, position_ids=batch.position_ids, cu_seqlens=batch.cu_seqlens)
    loss = global_loss(token_loss(logits, batch.labels), group, weights=batch.labels != -100)

The padding that makes a length divide is a document of its own: it is no token's key, and its
labels are ignored. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from hp_mesh.checks import require
from hp_mesh.cu_seqlens import read_cu_seqlens
from hp_mesh.sequence import (
    ContextRank,
    Order,
    multiple_for,
    next_token_labels,
    pad_sequence,
    position_ids,
    rank_and_size,
    rank_rows,
    shard_sequence,
)

__all__ = ["PackedShard", "local_cu_seqlens", "pack_documents", "shard_packed", "unpack_documents"]


@dataclass(frozen=True)
class PackedShard:
    """This rank's part of a packed batch of ``S`` tokens, padding included.

    Attributes:
        tokens: ``[..., S/P]``.
        labels: The token that follows each one in its document, ``[..., S/P]``; ignored at the ends
            of documents and in the padding.
        position_ids: Positions that restart in each document, int64 ``[S/P]``.
        cu_seqlens: Boundaries of the documents in the whole sequence, ``[0, ..., S]``, the same on
            every rank; what `hp_cp.packed_attention` takes. The padding is the last document.
        local_cu_seqlens: Boundaries within this rank's tokens, ``[0, ..., S/P]``, as
            `local_cu_seqlens` gives them: for what works on a rank's tokens alone.
        length: Number of tokens of the whole sequence without the padding.
    """

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    cu_seqlens: tuple[int, ...]
    local_cu_seqlens: tuple[int, ...]
    length: int


def pack_documents(documents: Sequence[Tensor], *, seq_dim: int = -1) -> tuple[Tensor, list[int]]:
    """Join documents to one sequence.

    Args:
        documents: ``[..., S_i, ...]`` each, alike in the other dims; empty ones are allowed.
        seq_dim: Dim of the sequence.

    Returns:
        ``(packed, cu_seqlens)``: ``[..., T, ...]`` and ``[0, ..., T]``.
    """
    require(len(documents) > 0, "pack_documents", "documents must hold at least one document")
    cu_seqlens = [0]
    for document in documents:
        cu_seqlens.append(cu_seqlens[-1] + document.shape[seq_dim])
    return torch.cat(list(documents), seq_dim), cu_seqlens


def unpack_documents(
    packed: Tensor, cu_seqlens: Sequence[int] | Tensor, *, seq_dim: int = -1
) -> list[Tensor]:
    """Return the documents of a packed sequence, as views; undoes `pack_documents`.

    Undoes `shard_packed`, too, of anything with a row per token::

        whole = join_sequence(shards, order=order)  # or hp_comm.unshard_sequence, over the ranks
        documents = unpack_documents(whole, cu_seqlens)

    Args:
        packed: ``[..., S, ...]``.
        cu_seqlens: ``[0, ..., T]``; rows from ``T`` on are padding, and dropped.
        seq_dim: Dim of the sequence.
    """
    bounds = read_cu_seqlens("unpack_documents", cu_seqlens)
    length = packed.shape[seq_dim]
    require(
        bounds[-1] <= length,
        "unpack_documents",
        f"cu_seqlens ({bounds}) must end at most at the sequence length ({length})",
        "join the shards of all ranks first",
    )
    return [packed.narrow(seq_dim, a, b - a) for a, b in pairwise(bounds)]


def shard_packed(
    tokens: Tensor,
    cu_seqlens: Sequence[int] | Tensor,
    cp: ContextRank,
    *,
    labels: Tensor | None = None,
    seq_dim: int = -1,
    order: Order = "contiguous",
    load_balance: bool = False,
    pad_value: float = 0,
    ignore_index: int = -100,
) -> PackedShard:
    """Return this rank's part of a packed batch: tokens, labels, positions, boundaries.

    Args:
        tokens: The whole packed sequence, the same on every rank, ``[T]`` or ``[1, T]``.
        cu_seqlens: ``[0, ..., T]``.
        cp: The CP mesh, or ``(rank, size)``.
        labels: A label for each token, *not* shifted, where some are ``ignore_index`` (a prompt).
            Default: the tokens.
        seq_dim: Dim of the sequence.
        order: Order of the data; the modes of context parallelism take ``"contiguous"``.
        load_balance: Whether the style is balanced, which needs a multiple of twice the CP size.
        pad_value: What the padding holds.
        ignore_index: Label of what nothing follows.

    Raises:
        ValueError: If the lengths do not add up.
    """
    where = "shard_packed"
    bounds = read_cu_seqlens(where, cu_seqlens)
    length = tokens.shape[seq_dim]
    require(
        bounds[-1] == length,
        where,
        f"cu_seqlens ({bounds}) must end at the number of tokens ({length}, shape "
        f"{list(tokens.shape)})",
        "pass the whole packed sequence and its boundaries on every rank, without padding or with "
        "the padding as a last document",
    )
    source = tokens if labels is None else labels
    require(
        source.shape == tokens.shape,
        where,
        f"labels (shape {list(source.shape)}) must have the shape of tokens ({list(tokens.shape)})",
        "pass one label for each token, not shifted and not cut",
    )
    multiple = multiple_for(cp, order, load_balance=load_balance)
    padded, _ = pad_sequence(tokens, multiple, seq_dim=seq_dim, value=pad_value)
    source, _ = pad_sequence(source, multiple, seq_dim=seq_dim, value=ignore_index)
    whole = padded.shape[seq_dim]
    if whole > length:
        bounds = [*bounds, whole]
    rank, size = rank_and_size(where, cp)
    return PackedShard(
        tokens=shard_sequence(padded, cp, seq_dim=seq_dim, order=order),
        labels=next_token_labels(
            source, cp, seq_dim=seq_dim, ignore_index=ignore_index, order=order, cu_seqlens=bounds
        ),
        position_ids=position_ids(
            cp, global_length=whole, order=order, cu_seqlens=bounds, device=tokens.device
        ),
        cu_seqlens=tuple(bounds),
        local_cu_seqlens=tuple(local_cu_seqlens(bounds, rank, size, order=order)),
        length=length,
    )


def local_cu_seqlens(
    cu_seqlens: Sequence[int] | Tensor,
    rank: int,
    size: int,
    *,
    global_length: int | None = None,
    order: Order = "contiguous",
) -> list[int]:
    """Return the document boundaries within this rank's part, ``[0, ..., <= S/P]``.

    Documents of which the rank has nothing stay, with length 0: every rank has as many. With
    documents of 3 and 5 tokens on 2 ranks, ``[0, 3, 8]`` gives ``[0, 3, 4]`` and ``[0, 0, 4]``. In
    head-tail order the pieces of the head chunk come first, then those of the tail chunk: twice as
    many documents, of which one that goes on from the head into the tail is two.

    Args:
        cu_seqlens: Boundaries in the whole sequence, ``[0, ..., end]``.
        rank: CP rank.
        size: CP size.
        global_length: Length of the whole sequence if padding follows the last document; not in
            head-tail order, where it would lie in between.
        order: Order of the data.
    """
    where = "local_cu_seqlens"
    bounds = read_cu_seqlens(where, cu_seqlens, global_length)
    length = bounds[-1] if global_length is None else global_length
    rows = rank_rows((rank, size), length, order, where=where)
    require(
        len(rows) == 1 or bounds[-1] == length,
        where,
        f"the end of cu_seqlens ({bounds[-1]}) must be the sequence length ({length}) with order "
        "'head_tail'",
        "make the padding a document of its own",
    )
    local, taken = [0], 0
    for start, stop in rows:
        cut = [taken + min(max(bound, start), stop) - start for bound in bounds]
        local, taken = [*local[:-1], *cut], taken + stop - start
    return local
