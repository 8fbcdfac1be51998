"""exchange_head_tail: the swap with the mirror rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hp_comm import exchange_head_tail
from hp_mesh.testing import count_collectives, poison_empty, randn, ranks


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
