"""Shares are summed once, forward and backward."""

from __future__ import annotations

import pytest
import torch

from hp_comm import scatter_seq, sum_shares, traffic
from hp_comm.reductions import scatter_seq_given
from hp_comm.sequence import count_tokens
from hp_mesh.sequence import Order, join_sequence, shard_sequence
from hp_mesh.testing import assert_close, count_collectives, least_peak, randn, ranks


def _group() -> torch.distributed.ProcessGroup:
    group = torch.distributed.group.WORLD
    assert group is not None
    return group


def _scatter(rank: int, size: int, order: Order) -> None:
    shares = [randn(2, 4 * size, 5, seed=r) for r in range(size)]
    mine = shares[rank].clone().requires_grad_()
    ups = [randn(2, 4, 5, seed=10 + r) for r in range(size)]

    with count_collectives() as sent, traffic() as told:
        rows = scatter_seq(mine, _group(), seq_dim=1, order=order)
        rows.backward(ups[rank])

    assert_close(rows, shard_sequence(sum(shares), (rank, size), order=order))
    assert_close(mine.grad, join_sequence(ups, order=order), kind="grad")
    bytes_sent = (size - 1) * 2 * 4 * 5 * 8
    expected = {"reduce_scatter": (1, bytes_sent), "all_gather": (1, bytes_sent)}
    for kind, (calls, sent_bytes) in ({} if size == 1 else expected).items():
        assert (sent.count(kind), sent.bytes(kind)) == (calls, sent_bytes)
        assert (told.count(kind), told.bytes(kind)) == (calls, sent_bytes)


@pytest.mark.parametrize("order", ["contiguous", "head_tail"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_of_a_sum_mirror_the_gather(size: int, order: Order) -> None:
    ranks(size).run(_scatter, size, order)


def _given(rank: int, size: int) -> None:
    shares = [randn(3 * size, 2, 5, seed=r) for r in range(size)]
    later = [randn(2, 3 * size, 4, seed=20 + r).transpose(0, 1) for r in range(size)]

    with count_collectives() as sent:
        handle = scatter_seq_given([shares[rank], later[rank]], _group(), seq_dim=0)
        rows, strided = handle.wait()

    assert_close(rows, sum(shares).chunk(size)[rank])
    assert_close(strided, sum(later).chunk(size)[rank])
    assert sent.count("reduce_scatter") == (0 if size == 1 else 2)
    if size > 1:  # the dense one is sent where it lies, and the other copied
        limit = rows.nbytes + strided.nbytes + later[rank].nbytes

        def again() -> object:
            given = [shares[rank], later[rank]]
            return scatter_seq_given(given, _group(), seq_dim=0).wait()

        assert least_peak(again, limit) <= limit


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_given_away_is_summed_later_and_not_copied(size: int) -> None:
    """Two tensors at once, one of which does not lie as the wire wants it."""
    ranks(size).run(_given, size)


def _sum(rank: int, size: int) -> None:
    share = torch.tensor([rank + 1.5], requires_grad=True)

    with count_collectives() as sent:
        total = sum_shares(share, _group())
        (total * 3).backward()

    assert total.item() == sum(r + 1.5 for r in range(size))
    assert share.grad is not None and share.grad.item() == 3.0  # not times the ranks
    assert sent.count("all_reduce") == (size > 1)
    assert count_tokens(torch.ones(3, dtype=torch.bool), _group()) == 3 * size


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_loss_of_shares_leaves_each_rank_its_own_gradient(size: int) -> None:
    ranks(size).run(_sum, size)


def _uneven(rank: int) -> None:
    scatter_seq(torch.ones(1, 5, 2), _group(), seq_dim=1)


def test_rows_that_do_not_divide_are_refused_on_every_rank() -> None:
    for error in ranks(2).errors(_uneven):
        assert isinstance(error, ValueError) and "divisible" in str(error)
