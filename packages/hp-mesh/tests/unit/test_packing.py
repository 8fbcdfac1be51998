"""A packed batch cut for a rank: what each token is told is what its document tells."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from hp_mesh import (
    join_sequence,
    local_cu_seqlens,
    pack_documents,
    shard_packed,
    unpack_documents,
)
from hp_mesh.sequence import Order

ORDERS: list[Order] = ["contiguous", "head_tail"]
LENGTHS = [5, 1, 0, 9, 6]


def documents() -> list[Tensor]:
    """Documents whose tokens are all different."""
    return list(torch.arange(100, 100 + sum(LENGTHS)).split(LENGTHS))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_token_learns_its_place_and_successor_in_its_own_document(
    size: int, order: Order
) -> None:
    """Joined over the ranks: tokens, positions that restart, labels that end with a document."""
    tokens, cu_seqlens = pack_documents(documents())
    assert cu_seqlens == [0, 5, 6, 6, 15, 21]
    shards = [
        shard_packed(tokens[None], cu_seqlens, (rank, size), order=order, pad_value=7)
        for rank in range(size)
    ]
    whole = join_sequence([s.tokens for s in shards], seq_dim=1, order=order)[0]
    labels = join_sequence([s.labels for s in shards], seq_dim=1, order=order)[0]
    positions = join_sequence([s.position_ids for s in shards], seq_dim=0, order=order)

    multiple = size if order == "contiguous" else 2 * size
    missing = -21 % multiple
    assert whole.tolist() == [*tokens.tolist(), *[7] * missing]
    for i, document in enumerate(documents()):
        rows = slice(cu_seqlens[i], cu_seqlens[i + 1])
        assert positions[rows].tolist() == list(range(len(document)))
        assert labels[rows].tolist() == [*document.tolist()[1:], *[-100] * bool(len(document))]
    assert labels[21:].tolist() == [-100] * missing
    for shard in shards:
        assert shard.length == 21
        assert shard.cu_seqlens == (*cu_seqlens, *[21 + missing] * bool(missing))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_unpacking_gives_the_documents_back(size: int, order: Order) -> None:
    """The inverse, with the padding dropped; for anything with a row per token."""
    docs = [torch.stack([d, -d]) for d in documents()]  # [2, S_i]
    tokens, cu_seqlens = pack_documents(docs)
    shards = [shard_packed(tokens, cu_seqlens, (r, size), order=order).tokens for r in range(size)]
    back = unpack_documents(join_sequence(shards, seq_dim=1, order=order), cu_seqlens)
    assert len(back) == len(docs)
    for one, other in zip(back, docs, strict=True):
        assert torch.equal(one, other)


def test_labels_of_ones_own_are_shifted_with_their_ignored_tokens() -> None:
    """A prompt that is no target stays none; nothing is shifted over the end of a document."""
    tokens = torch.tensor([1, 2, 3, 4, 5, 6])
    given = torch.tensor([-100, 2, 3, -100, -100, 6])
    parts = [shard_packed(tokens, [0, 3, 6], (r, 2), labels=given) for r in range(2)]
    assert [p.labels.tolist() for p in parts] == [[2, 3, -100], [-100, 6, -100]]


def test_balanced_styles_pad_to_twice_the_ranks() -> None:
    """``load_balance=True``: 6 tokens on 2 ranks become 8, the tail a document of its own."""
    shard = shard_packed(torch.arange(6), [0, 6], (0, 2), load_balance=True)
    assert shard.tokens.tolist() == [0, 1, 2, 3]
    assert shard.cu_seqlens == (0, 6, 8)


def test_local_boundaries_follow_the_order_of_the_data() -> None:
    """The tokens between two local boundaries are of one document, in both orders."""
    _, cu_seqlens = pack_documents([*documents(), torch.arange(3)])
    index = torch.repeat_interleave(torch.arange(6), torch.tensor(cu_seqlens).diff())
    for order in ORDERS:
        for rank in range(3):
            shard = shard_packed(index, cu_seqlens, (rank, 3), order=order)
            local = list(shard.local_cu_seqlens)
            assert local == local_cu_seqlens(cu_seqlens, rank, 3, order=order)
            assert len(local) == (7 if order == "contiguous" else 13) and local[-1] == 8
            pieces = [shard.tokens[a:b] for a, b in pairwise(local)]
            assert all(len(p.unique()) <= 1 for p in pieces)
            assert torch.equal(torch.cat(pieces), shard.tokens)


@pytest.mark.parametrize(
    ("tokens", "bounds", "options", "message"),
    [
        (6, [0, 4], {}, r"cu_seqlens \(\[0, 4\]\) must end at the number of tokens \(6"),
        (6, [0, 4, 8], {}, "must end at the number of tokens"),
        (6, [1, 6], {}, "must start with 0 and not descend"),
        (6, [0, 4, 3, 6], {}, "must start with 0 and not descend"),
        (6, [0], {}, "must start with 0"),
        (6, [0, 4.5, 6], {}, r"cu_seqlens \(\[0, 4\.5, 6\]\) must be integers, a list or a tensor"),
        (6, torch.tensor([[0, 6]]), {}, r"cu_seqlens \(torch\.int64 of shape \(1, 2\)\) must be"),
        (6, [False, 6], {}, "must be integers"),
        (6, 6, {}, r"cu_seqlens \(6\) must be integers"),
        (6, [0, 6], {"labels": torch.arange(5)}, r"labels \(shape \[5\]\) must have the shape"),
        (6, [0, 6], {"order": "zigzag"}, "order"),
    ],
)
def test_lengths_that_do_not_add_up_are_refused(
    tokens: int, bounds: Any, options: dict[str, Any], message: str
) -> None:
    """Documents that end elsewhere than the tokens, or labels of another length."""
    with pytest.raises(ValueError, match=message):
        shard_packed(torch.arange(tokens), bounds, (0, 2), **options)


def test_unpacking_a_shard_is_refused() -> None:
    """Its boundaries lie beyond it; and packing nothing is refused, too."""
    with pytest.raises(ValueError, match=r"must end at most at the sequence length \(4\).*join"):
        unpack_documents(torch.arange(4), [0, 5, 8])
    with pytest.raises(ValueError, match="at least one document"):
        pack_documents([])
    with pytest.raises(ValueError, match="make the padding a document"):
        local_cu_seqlens([0, 7], 0, 2, global_length=8, order="head_tail")
