"""gather_seq: the whole sequence on every rank; backward sums what all ranks found."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
import torch.distributed as dist

from hp_comm import gather_seq
from hp_mesh.testing import assert_close, count_collectives, poison_empty, randn, ranks


@pytest.mark.parametrize("P", [2, 3, 4])
@pytest.mark.parametrize("seq_dim", [0, 1, 2, -1])
def test_the_whole_sequence_arrives_bit_for_bit(seq_dim: int, P: int) -> None:
    """On any dim, from a strided shard, into a dense tensor."""
    whole = torch.arange(2 * 12 * 12 * 12, dtype=torch.float64).view(24, 12, 12)

    def on(rank: int) -> None:
        x = whole.chunk(P, seq_dim)[rank]
        with poison_empty():
            y = gather_seq(x, dist.group.WORLD, seq_dim=seq_dim)
            dense = gather_seq(x.contiguous(), dist.group.WORLD, seq_dim=seq_dim)
        assert torch.equal(y, whole) and torch.equal(dense, whole)
        assert y.is_contiguous()

    ranks(P).run(on)


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("P", [2, 4])
def test_the_gradient_of_a_shard_is_the_sum_over_ranks(P: int, async_op: bool) -> None:
    """B13: not this rank's slice alone, not the average; also where only rank 0 has a gradient."""
    up = randn(P, 2, 3 * P, 2, 5)

    def on(rank: int, active: list[int]) -> None:
        x = randn(2, 3, 2, 5, seed=rank, requires_grad=True)
        y = gather_seq(x, dist.group.WORLD, seq_dim=1, async_op=async_op)
        y = y.wait() if async_op else y
        (y * up[rank] * (rank in active)).sum().backward()
        assert_close(x.grad, up[active].sum(0).chunk(P, 1)[rank], kind="grad")

    ranks(P).run(on, list(range(P)))
    ranks(P).run(on, [0])


def test_backward_leaves_the_incoming_gradient_alone() -> None:
    """A gradient that is sent without a copy is read, never written."""

    def on(rank: int) -> None:
        x = randn(1, 4, 3, seed=rank, requires_grad=True)
        y = gather_seq(x, dist.group.WORLD, seq_dim=1)
        up = randn(1, 8, 3, seed=rank)
        kept = up.clone()
        y.backward(up)
        assert torch.equal(up, kept)

    ranks(2).run(on)


@pytest.mark.parametrize("lengths", [[4, 3, 3], [5, 0, 2], [1, 1, 7]], ids=str)
@pytest.mark.parametrize("B", [1, 2])
def test_uneven_shards_are_gathered_and_their_gradients_summed(B: int, lengths: list[int]) -> None:
    """B15: exact, although gloo refuses unequal parts; an empty shard too."""
    P, S = 3, sum(lengths)
    starts = [0, *accumulate(lengths)]
    whole, up = randn(B, S, 2, 3), randn(P, B, S, 2, 3, seed=1)

    def on(rank: int) -> None:
        x = whole.narrow(1, starts[rank], lengths[rank]).clone().requires_grad_()
        with poison_empty():
            y = gather_seq(x, dist.group.WORLD, seq_dim=1, lengths=lengths)
            assert torch.equal(y, whole)
            (y * up[rank]).sum().backward()
        assert_close(x.grad, up.sum(0).narrow(1, starts[rank], lengths[rank]), kind="grad")

    ranks(P).run(on)


def test_several_tensors_are_all_started_before_the_first_wait() -> None:
    """One all-gather each, forward; backward one reduce-scatter for each that needs a gradient."""

    def on(rank: int) -> None:
        k = randn(2, 3, 2, 5, seed=rank, requires_grad=True)
        v = randn(2, 3, 2, 4, seed=rank, dtype=torch.float32)
        with count_collectives() as counted:
            k2, v2 = gather_seq((k, v), dist.group.WORLD, seq_dim=1)
            k2.sum().backward()
        assert counted.summary() == {"all_gather": 2, "reduce_scatter": 1}
        assert v2.dtype == torch.float32 and not v2.requires_grad
        assert torch.equal(k.grad, torch.full_like(k, 2.0))

    ranks(2).run(on)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_are_reduced_in_their_own_dtype(dtype: torch.dtype) -> None:
    """No silent cast on the wire: bytes are those of the input's dtype."""

    def on(rank: int) -> None:
        x = randn(2, 3, 2, dtype=dtype, requires_grad=True)
        with count_collectives() as counted:
            gather_seq(x, dist.group.WORLD, seq_dim=1).sum().backward()
        assert x.grad.dtype == dtype
        assert torch.equal(x.grad, torch.full_like(x, 2.0))
        assert {record.dtype for record in counted.records} == {dtype}

    ranks(2).run(on)


def test_second_derivatives_cross_the_gather() -> None:
    """The mirror of a reduce-scatter is a gather again."""

    def on(rank: int) -> None:
        x = randn(1, 3, 2, seed=rank, requires_grad=True)
        y = gather_seq(x, dist.group.WORLD, seq_dim=1)
        (grad,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
        assert_close(grad, 2 * 3 * x**2, kind="grad")
        assert_close(second, 2 * 6 * x, kind="grad")

    ranks(2).run(on)
