"""exchange_head_tail, split_head_tail and merge_head_tail: the swap with the mirror rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hp_comm import exchange_head_tail, merge_head_tail, split_head_tail
from hp_mesh.testing import assert_close, count_collectives, poison_empty, randn, ranks


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("P", [2, 3, 4])
def test_each_rank_gets_its_mirrors_tensor_and_its_gradient_goes_back(
    P: int, async_op: bool
) -> None:
    """Bit for bit, strided in, dense out; with an odd P the middle rank sends nothing."""

    def on(rank: int) -> None:
        mirror = P - 1 - rank
        leaf = randn(2, 6, 3, seed=rank, requires_grad=True)
        with count_collectives() as counted, poison_empty():
            y = exchange_head_tail(leaf[:, 3:], dist.group.WORLD, async_op=async_op)
            y = y.wait() if async_op else y
            assert torch.equal(y, randn(2, 6, 3, seed=mirror)[:, 3:])
            (y * randn(2, 3, 3, seed=100 + rank)).sum().backward()
        assert counted.count("p2p") == (0 if mirror == rank else 2)
        assert counted.bytes("p2p") == (0 if mirror == rank else 2 * 2 * 3 * 3 * 8)
        expected = torch.zeros(2, 6, 3, dtype=torch.float64)
        expected[:, 3:] = randn(2, 3, 3, seed=100 + mirror)
        assert torch.equal(leaf.grad, expected)

    ranks(P).run(on)


def test_the_swap_stays_in_its_group() -> None:
    """Ranks are counted within the group, not globally: two groups of two swap among themselves."""

    def on(rank: int) -> None:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        x = torch.full((2,), float(rank))
        y = exchange_head_tail(x, groups[rank % 2])
        assert torch.equal(y, torch.full((2,), float({0: 2, 2: 0, 1: 3, 3: 1}[rank])))

    ranks(4).run(on)


def test_two_swaps_in_flight_keep_their_tensors() -> None:
    """Messages between the same two ranks arrive in the order in which they were sent."""

    def on(rank: int) -> None:
        first = exchange_head_tail(torch.full((3,), 10.0 + rank), dist.group.WORLD, async_op=True)
        second = exchange_head_tail(torch.full((3,), 20.0 + rank), dist.group.WORLD, async_op=True)
        assert torch.equal(second.wait(), torch.full((3,), 21.0 - rank))
        assert torch.equal(first.wait(), torch.full((3,), 11.0 - rank))

    ranks(2).run(on)


@pytest.mark.parametrize("trade", [True, False], ids=["traded", "head-tail data"])
@pytest.mark.parametrize("seq_dim", [0, 1, 2])
@pytest.mark.parametrize("P", [1, 2, 3])
def test_halves_part_and_come_together_again(P: int, seq_dim: int, trade: bool) -> None:
    """Bit for bit, strided in, with gradients; a middle rank, and head-tail data, send nothing."""
    shape = [4, 4, 4]
    shape[seq_dim] = 6
    wholes, ups = ([randn(*shape, seed=10 * n + r) for r in range(P)] for n in (1, 2))

    def on(rank: int) -> None:
        group = dist.group.WORLD
        mirror = P - 1 - rank if trade else rank
        sends = mirror != rank
        leaf = wholes[rank].transpose(0, 2).contiguous().requires_grad_()
        with count_collectives() as counted, poison_empty():
            head, tail = split_head_tail(leaf.transpose(0, 2), group, seq_dim=seq_dim, trade=trade)
            assert torch.equal(head, wholes[rank].narrow(seq_dim, 0, 3))
            assert torch.equal(tail, wholes[mirror].narrow(seq_dim, 3, 3))
            again = merge_head_tail(head * 2, tail * 3, group, seq_dim=seq_dim, trade=trade)
            factor = torch.cat([torch.full_like(head, 2), torch.full_like(tail, 3)], seq_dim)
            assert torch.equal(again, wholes[rank] * factor) and again.is_contiguous()
            (again * ups[rank]).sum().backward()
        assert torch.equal(leaf.grad.transpose(0, 2), ups[rank] * factor.detach())
        assert counted.summary() == ({"p2p": 4} if sends else {})
        assert counted.bytes("p2p") == (4 * 3 * 16 * 8 if sends else 0)

    ranks(P).run(on)


def test_a_half_that_nobody_looks_at_has_a_gradient_of_zero() -> None:
    """And the peers still meet: both take part in a swap that only one of them needs."""

    def on(rank: int) -> None:
        x = randn(2, 4, 3, seed=rank, requires_grad=True)
        head, tail = split_head_tail(x, dist.group.WORLD, seq_dim=1)
        ((head if rank == 0 else tail) * 3).sum().backward()
        # rank 0 looks at its own head, rank 1 at rank 0's tail: nobody at what rank 1 has
        assert torch.equal(x.grad, torch.full_like(x, 3.0 if rank == 0 else 0.0))
        frozen = randn(2, 2, 3, seed=rank)
        half = randn(2, 2, 3, seed=9, requires_grad=True)
        merge_head_tail(frozen, half, dist.group.WORLD, seq_dim=1).sum().backward()
        assert torch.equal(half.grad, torch.ones_like(half)) and frozen.grad is None

    ranks(2).run(on)


def test_halves_have_second_derivatives() -> None:
    """The mirror of a split is a merge, whose mirror is a split."""

    def on(rank: int) -> None:
        x = randn(2, 4, 3, seed=rank, requires_grad=True)
        head, tail = split_head_tail(x, dist.group.WORLD, seq_dim=1)
        loss = (head**3).sum() + (tail**3).sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
        assert_close(grad, 3 * x**2, kind="grad")
        assert_close(second, 6 * x, kind="grad")

    ranks(2).run(on)


def test_halves_that_cannot_be_are_refused() -> None:
    """An odd length has no half; both halves are alike."""

    def on(rank: int) -> None:
        group = dist.group.WORLD
        with pytest.raises(ValueError, match=r"local length \(dim 1 of x\) \(5\) must be"):
            split_head_tail(torch.zeros(2, 5), group, seq_dim=1)
        with pytest.raises(ValueError, match=r"tail \(\(2, 3\), torch.float32\) must have"):
            merge_head_tail(torch.zeros(2, 2), torch.zeros(2, 3), group, seq_dim=1)
        with pytest.raises(ValueError, match=r"seq_dim \(2\) must be a dim of x"):
            split_head_tail(torch.zeros(2, 4), group, seq_dim=2)

    ranks(2).run(on)
