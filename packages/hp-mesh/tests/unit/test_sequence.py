"""Cutting a sequence for a rank: shards, padding, positions, labels, document boundaries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_mesh.packing import local_cu_seqlens
from hp_mesh.sequence import (
    Order,
    join_sequence,
    multiple_for,
    next_token_labels,
    pad_sequence,
    position_ids,
    rank_rows,
    shard_sequence,
)
from hp_mesh.testing import assert_close, randn

ORDERS: list[Order] = ["contiguous", "head_tail"]


def shards(x: torch.Tensor, size: int, seq_dim: int, order: Order) -> list[torch.Tensor]:
    return [shard_sequence(x, (r, size), seq_dim=seq_dim, order=order) for r in range(size)]


def test_both_orders_on_two_ranks() -> None:
    """Behaviour 43."""
    x = torch.arange(8)

    assert [s.tolist() for s in shards(x, 2, 0, "contiguous")] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [s.tolist() for s in shards(x, 2, 0, "head_tail")] == [[0, 1, 6, 7], [2, 3, 4, 5]]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("seq_dim", [0, 1, 2, -1, -3])
def test_joining_restores_what_was_cut(order: Order, size: int, seq_dim: int) -> None:
    x = randn(60, 60, 60, dtype=torch.float32).transpose(0, 2)

    assert torch.equal(
        join_sequence(shards(x, size, seq_dim, order), seq_dim=seq_dim, order=order), x
    )


@pytest.mark.parametrize("order", ORDERS)
def test_gradients_return_to_the_rows_they_came_from(order: Order) -> None:
    x = randn(2, 12, 3, requires_grad=True)
    weights = randn(2, 4, 3, seed=1)

    (shard_sequence(x, (1, 3), order=order) * weights).sum().backward()

    expected = torch.zeros(2, 12, 3, dtype=torch.float64)
    for index, row in enumerate(r for a, b in rank_rows((1, 3), 12, order) for r in range(a, b)):
        expected[:, row] = weights[:, index]
    assert_close(x.grad, expected, kind="grad")


@pytest.mark.parametrize(
    ("length", "size", "order", "part"),
    [
        (10, 4, "contiguous", r"\(10\) must be divisible by cp_size \(4\); pad it to 12 with pad_"),
        (12, 4, "head_tail", r"\(12\) must be divisible by 2 \* cp_size \(8\) .* pad it to 16"),
        (7, 2, "contiguous", r"\(7\) must .* pad it to 8 with pad_sequence\(x, 2\)"),
    ],
)
def test_lengths_that_do_not_divide_name_the_padding_helper_and_the_next_good_length(
    length: int, size: int, order: Order, part: str
) -> None:
    """B15; the same text on every rank."""
    for rank in range(size):
        with pytest.raises(ValueError, match=f"shard_sequence: the sequence length {part}"):
            shard_sequence(randn(1, length, 2), (rank, size), order=order)
        with pytest.raises(ValueError, match=f"position_ids: the sequence length {part}"):
            position_ids((rank, size), global_length=length, order=order)
        with pytest.raises(ValueError, match=f"next_token_labels: the sequence length {part}"):
            next_token_labels(torch.zeros(1, length, dtype=torch.long), (rank, size), order=order)


def test_pad_value_pads_before_the_cut() -> None:
    x = torch.arange(7)

    parts = [shard_sequence(x, (r, 2), seq_dim=0, pad_value=-1) for r in range(2)]
    assert [p.tolist() for p in parts] == [[0, 1, 2, 3], [4, 5, 6, -1]]
    balanced = [
        shard_sequence(x, (r, 2), seq_dim=0, order="head_tail", pad_value=-1) for r in range(2)
    ]
    assert [p.tolist() for p in balanced] == [[0, 1, 6, -1], [2, 3, 4, 5]]


@pytest.mark.parametrize("seq_dim", [0, 1, -1])
def test_padding_comes_with_the_mask_of_what_is_real(seq_dim: int) -> None:
    x = randn(7, 7)

    padded, mask = pad_sequence(x, 4, seq_dim=seq_dim, value=9)

    rows = padded.movedim(seq_dim, 0)
    assert rows.shape == (8, 7) and padded.dtype == x.dtype
    assert torch.equal(rows[:7], x.movedim(seq_dim, 0)) and bool((rows[7] == 9).all())
    assert mask.tolist() == [True] * 7 + [False]


def test_padding_nothing_returns_the_tensor_itself() -> None:
    x = randn(2, 8)

    padded, mask = pad_sequence(x, 4)

    assert padded is x and mask.tolist() == [True] * 8


def test_padding_keeps_gradients() -> None:
    x = randn(2, 3, requires_grad=True)

    pad_sequence(x, 4)[0].pow(2).sum().backward()

    assert_close(x.grad, 2 * x, kind="grad")


def test_multiples() -> None:
    assert multiple_for((0, 3)) == 3
    assert multiple_for((0, 3), "head_tail") == multiple_for((0, 3), load_balance=True) == 6


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_positions_are_those_of_the_tokens(order: Order, size: int) -> None:
    tokens = torch.arange(12)
    documents = [0, 5, 5, 11]
    restarting = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 0])

    for rank in range(size):
        cp = (rank, size)
        cut = shard_sequence(tokens, cp, seq_dim=0, order=order)
        assert torch.equal(position_ids(cp, global_length=12, order=order), cut)
        assert torch.equal(position_ids(cp, local_length=12 // size, order=order), cut)
        for bounds in (documents, torch.tensor(documents, dtype=torch.int32)):
            assert torch.equal(
                position_ids(cp, global_length=12, order=order, cu_seqlens=bounds),
                shard_sequence(restarting, cp, seq_dim=0, order=order),
            )


def test_positions_want_exactly_one_length() -> None:
    with pytest.raises(ValueError, match="exactly one of local_length and global_length"):
        position_ids((0, 2))
    with pytest.raises(ValueError, match="exactly one"):
        position_ids((0, 2), local_length=2, global_length=4)


@pytest.mark.parametrize("order", ORDERS)
def test_labels_are_shifted_before_the_cut(order: Order) -> None:
    """B10: per-token losses equal the single-process ones, also at the edges of the shards."""
    torch_generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(11, (2, 16), generator=torch_generator)
    logits = randn(2, 16, 11, seed=4)
    whole = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    ).view(2, 15)

    losses = []
    for rank in range(4):
        labels = next_token_labels(tokens, (rank, 4), order=order)
        local = shard_sequence(logits, (rank, 4), order=order)
        losses.append(F.cross_entropy(local.movedim(2, 1), labels, reduction="none"))
    joined = join_sequence(losses, order=order)

    assert_close(joined[:, :15], whole)
    assert joined[:, 15].tolist() == [0, 0]


def test_labels_of_the_whole_sequence_and_of_ignored_slices() -> None:
    tokens = torch.tensor([[-100, -100, -100, -100, 4, 5, 6, 7]])

    assert next_token_labels(tokens).tolist() == [[-100, -100, -100, 4, 5, 6, 7, -100]]
    assert next_token_labels(tokens, (0, 4)).tolist() == [[-100, -100]]
    assert next_token_labels(tokens, ignore_index=-1)[0, -1] == -1
    assert next_token_labels(tokens.T, seq_dim=0).T.tolist() == next_token_labels(tokens).tolist()


def test_labels_do_not_reach_into_the_next_document() -> None:
    tokens = torch.arange(8)[None]

    labels = next_token_labels(tokens, cu_seqlens=[0, 3, 3, 8])

    assert labels.tolist() == [[1, 2, -100, 4, 5, 6, 7, -100]]


def test_document_boundaries_of_each_rank() -> None:
    """Behaviour 43: local lengths (3, 1) and (0, 4)."""
    assert local_cu_seqlens([0, 3, 8], 0, 2) == [0, 3, 4]
    assert local_cu_seqlens(torch.tensor([0, 3, 8], dtype=torch.int32), 1, 2) == [0, 0, 4]


def test_padding_after_the_last_document_belongs_to_no_document() -> None:
    """A document of 7 tokens in a sequence padded to 8 keeps its 7."""
    assert local_cu_seqlens([0, 7], 0, 2, global_length=8) == [0, 4]
    assert local_cu_seqlens([0, 7], 1, 2, global_length=8) == [0, 3]
    assert local_cu_seqlens([0, 2, 3], 3, 4, global_length=8) == [0, 0, 0]


@pytest.mark.parametrize(
    ("bounds", "length", "part"),
    [
        ([1, 4], None, "must start with 0"),
        ([0, 5, 4], None, "must start with 0 and not descend"),
        ([0], 4, "must start with 0"),
        ([], None, "must start with 0"),
        ([0, 3.9], None, r"cu_seqlens \(\[0, 3\.9\]\) must be integers"),
        ([0, 6], 4, r"end of cu_seqlens \(6\) must be at most the sequence length \(4\)"),
        ([0, 3, 7], None, r"\(7\) must be divisible by cp_size \(2\); pad it to 8"),
    ],
)
def test_boundaries_that_make_no_sense_are_refused(
    bounds: Any, length: int | None, part: str
) -> None:
    for rank in range(2):
        with pytest.raises(ValueError, match=f"local_cu_seqlens: .*{part}"):
            local_cu_seqlens(bounds, rank, 2, global_length=length)


def test_wrong_arguments_are_refused_by_name() -> None:
    x = randn(2, 8)
    with pytest.raises(ValueError, match=r"order \('zigzag'\) must be"):
        shard_sequence(x, (0, 2), order="zigzag")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"order \('zigzag'\) must be"):
        multiple_for((0, 2), "zigzag")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"seq_dim \(2\) must be a dim of the tensor .*\(2, 8\)"):
        shard_sequence(x, (0, 2), seq_dim=2)
    with pytest.raises(ValueError, match=r"pad_sequence: seq_dim \(-3\)"):
        pad_sequence(x, 4, seq_dim=-3)
    with pytest.raises(ValueError, match=r"pad_sequence: multiple \(0\) must be at least 1"):
        pad_sequence(x, 0)
    with pytest.raises(ValueError, match=r"shard_sequence: rank \(2\) must be in \[0, 1\]"):
        shard_sequence(x, (2, 2))
    with pytest.raises(ValueError, match=r"shard_sequence: cp_size \(0\) must be at least 1"):
        shard_sequence(x, (0, 0))
    with pytest.raises(ValueError, match="the number of shards"):
        join_sequence([])
