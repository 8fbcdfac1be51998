"""gather_seq: the whole sequence on every rank; backward sums what all ranks found."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
import torch.distributed as dist

from hp_comm import (
    fetch_rows,
    gather_seq,
    merge_head_tail,
    scatter_seq,
    seq_to_head,
    split_head_tail,
    sum_shares,
    unshard_sequence,
)
from hp_mesh.sequence import Order, shard_sequence
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


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seq_dim", [0, 1, 2])
@pytest.mark.parametrize("P", [1, 2, 3])
def test_head_tail_data_arrives_in_the_order_of_the_sequence(
    P: int, seq_dim: int, async_op: bool
) -> None:
    """Bit for bit from a strided shard, dense; a gradient goes to the rows that a rank holds."""
    shape = [3, 3, 3]
    shape[seq_dim] = S = 2 * P * 3
    whole, up = randn(*shape), randn(P, *shape, seed=1)

    def on(rank: int, dense: bool) -> None:
        def mine(x: torch.Tensor) -> torch.Tensor:
            return shard_sequence(x, (rank, P), seq_dim=seq_dim, order="head_tail")

        leaf = mine(whole).transpose(0, 2).contiguous().requires_grad_()
        with count_collectives() as counted, poison_empty():
            y = gather_seq(
                leaf.transpose(0, 2), dist.group.WORLD, seq_dim=seq_dim, order="head_tail",
                dense=dense, async_op=async_op,
            )  # fmt: skip
            y = y.wait() if async_op else y
            assert torch.equal(y, whole) and y.shape[seq_dim] == S
            (y * up[rank]).sum().backward()
        assert P == 1 or y.is_contiguous()
        assert_close(leaf.grad.transpose(0, 2), mine(up.sum(0)), kind="grad")
        assert counted.summary() == ({} if P == 1 else {"all_gather": 1, "reduce_scatter": 1})

    for dense in (True, False):
        ranks(P).run(on, dense)


def test_head_tail_data_has_second_derivatives() -> None:
    """Rows are put in order on the way back, too."""

    def on(rank: int) -> None:
        x = randn(2, 4, 3, seed=rank, requires_grad=True)
        y = gather_seq(x, dist.group.WORLD, seq_dim=1, order="head_tail")
        (grad,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
        assert_close(grad, 2 * 3 * x**2, kind="grad")
        assert_close(second, 2 * 6 * x, kind="grad")

    ranks(2).run(on)


def test_orders_that_cannot_be_are_refused() -> None:
    """An odd shard has no halves; head-tail chunks are equal; there are two orders."""

    def on(rank: int) -> None:
        x, group = torch.zeros(1, 3, 2), dist.group.WORLD
        with pytest.raises(ValueError, match=r"local length \(dim 1 of x\) \(3\) must be div"):
            gather_seq(x, group, seq_dim=1, order="head_tail")
        for call in (gather_seq, unshard_sequence):
            with pytest.raises(ValueError, match=r"lengths \(\[2, 2\]\) must be None with order="):
                call(x[:, :2], group, seq_dim=1, order="head_tail", lengths=[2, 2])
        with pytest.raises(ValueError, match=r"order \('zigzag'\) must be 'contiguous' or"):
            gather_seq(x, group, seq_dim=1, order="zigzag")  # type: ignore[arg-type]

    ranks(2).run(on)


@pytest.mark.parametrize("order", ["contiguous", "head_tail"])
def test_a_sequence_without_rows_is_gathered_and_scattered(order: Order) -> None:
    """Nothing is a multiple of any number of chunks: an empty result, with an empty gradient."""

    def on(rank: int) -> None:
        for shape, dim in (((2, 0, 3), 1), ((0, 3), 0), ((0, 4, 3), 1), ((2, 4, 0), 1)):
            x = torch.zeros(shape, requires_grad=True)
            y = gather_seq(x, dist.group.WORLD, seq_dim=dim, order=order)
            z = scatter_seq(y, dist.group.WORLD, seq_dim=dim, order=order)
            assert y.shape[dim] == 2 * x.shape[dim] and z.shape == x.shape
            z.sum().backward()
            assert x.grad.shape == x.shape

    ranks(2).run(on)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int16, torch.uint16, torch.uint64, torch.float8_e4m3fn], ids=str
)
def test_what_backends_cannot_add_up_is_moved_all_the_same(dtype: torch.dtype) -> None:
    """Masks, small integers, 8-bit floats: bit for bit, also in parts of unequal size."""
    P, lengths = 3, (4, 1, 3)
    whole = (torch.arange(2 * 12 * 3) % 2).view(2, 12, 3).to(dtype)

    def on(rank: int) -> None:
        group = dist.group.WORLD
        mine = shard_sequence(whole, (rank, P), seq_dim=1, order="head_tail")
        y = gather_seq(mine, group, seq_dim=1, order="head_tail")
        head, tail = split_head_tail(mine, group, seq_dim=1)
        again = merge_head_tail(head, tail, group, seq_dim=1)
        start = sum(lengths[:rank])
        x = whole[:, :8, :, None].expand(2, 8, 3, 2)
        part = x[:, start : start + lengths[rank]]
        heads = seq_to_head(part, group, seq_dim=1, head_dim=2, lengths=lengths)
        for found, expected in ((y, whole), (again, mine), (heads, x[:, :, rank : rank + 1])):
            assert torch.equal(bits(found), bits(expected))

    def bits(x: torch.Tensor) -> torch.Tensor:
        return x.contiguous().view(torch.uint8)

    ranks(P).run(on)


def test_what_cannot_be_added_up_is_refused_before_it_is_sent() -> None:
    """A sum of 8-bit floats, of masks, of what is no tensor; gradients that would be such a sum."""

    def on(rank: int) -> None:
        for dtype in (torch.int16, torch.bool, torch.float8_e5m2):
            with pytest.raises(
                ValueError, match=r"scatter_seq: x \(torch\.\w+\) must be of a dtype"
            ):
                scatter_seq(torch.ones(1, 4).to(dtype), dist.group.WORLD, seq_dim=1)
            with pytest.raises(
                ValueError, match=r"sum_shares: x \(torch\.\w+\) must be of a dtype"
            ):
                sum_shares(torch.ones(2).to(dtype), dist.group.WORLD)
        trained = torch.ones(1, 4).to(dtype).requires_grad_()
        with pytest.raises(ValueError, match=r"gather_seq: x \(torch\.float8_e5m2\) must be of a"):
            gather_seq(trained, dist.group.WORLD, seq_dim=1)
        rows = [[(0, 6)], [(2, 8)]]
        with pytest.raises(ValueError, match=r"fetch_rows: x \(torch\.float8_e5m2\) must be of a"):
            fetch_rows(trained, dist.group.WORLD, seq_dim=1, rows=rows)
        with torch.no_grad():
            assert gather_seq(trained, dist.group.WORLD, seq_dim=1).shape == (1, 8)
            assert fetch_rows(trained, dist.group.WORLD, seq_dim=1, rows=rows).shape == (1, 6)
        for call in (scatter_seq, unshard_sequence, split_head_tail):
            with pytest.raises(TypeError, match=r"x \(list\) must be a tensor$"):
                call([torch.ones(1, 4)], dist.group.WORLD, seq_dim=1)
        with pytest.raises(TypeError, match=r"tail \(NoneType\) must be a tensor$"):
            merge_head_tail(torch.ones(1, 4), None, dist.group.WORLD, seq_dim=1)

    ranks(2).run(on)


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


@pytest.mark.parametrize("order", ["contiguous", "head_tail"])
def test_what_was_gathered_may_be_changed_in_place(order: Order) -> None:
    """Results are tensors of their own, not views that autograd forbids to write."""

    def on(rank: int) -> None:
        x = randn(2, 4, 3, seed=rank, requires_grad=True)
        whole, other = gather_seq([x, x], dist.group.WORLD, seq_dim=1, order=order)
        whole.mul_(2)
        with torch.no_grad():
            other.add_(1)
        (whole.sum() + other.sum()).backward()
        assert torch.equal(x.grad, torch.full_like(x, 2 * (2.0 + 1.0)))

    ranks(2).run(on)
