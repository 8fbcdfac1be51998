"""seq_to_head and head_to_seq: every element in its place, every gradient the unsharded one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hp_comm import head_to_seq, seq_to_head
from hp_mesh.testing import assert_close, count_collectives, poison_empty, randn, ranks

LAYOUTS = {"BSHD": (1, 2), "BNSD": (2, 1), "SBHD": (0, 2), "BSHD-negative": (-3, -2)}


def _filled(B: int, S: int, H: int, D: int) -> Tensor:
    """Every element is its own global index, so that one in a wrong place shows."""
    b, s, h, d = torch.meshgrid(
        *[torch.arange(n, dtype=torch.float64) for n in (B, S, H, D)], indexing="ij"
    )
    return b * 1000_000 + s * 10_000 + h * 100 + d


def _lay(x: Tensor, layout: str) -> Tensor:
    order = {"BNSD": (0, 2, 1, 3), "SBHD": (1, 0, 2, 3)}.get(layout, (0, 1, 2, 3))
    return x.permute(order).contiguous()


def _rows(x: Tensor, dim: int, lengths: list[int], rank: int) -> Tensor:
    start = [0, *accumulate(lengths)][rank]
    return x.narrow(dim, start, lengths[rank])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("B", [1, 2, 3])
@pytest.mark.parametrize("P", [2, 4])
def test_every_element_arrives_where_it_belongs(P: int, B: int, layout: str) -> None:
    """B01: bit for bit, for any batch, any layout, and head_to_seq undoes it."""
    s, h = LAYOUTS[layout]
    whole = _lay(_filled(B, 3 * P, 2 * P, 3), layout)

    def on(rank: int) -> None:
        x = whole.chunk(P, s)[rank]
        with poison_empty():
            y = seq_to_head(x, dist.group.WORLD, seq_dim=s, head_dim=h)
            back = head_to_seq(y, dist.group.WORLD, seq_dim=s, head_dim=h)
        assert torch.equal(y, whole.chunk(P, h)[rank])
        assert y.is_contiguous() and back.is_contiguous()
        assert torch.equal(back, x)

    ranks(P).run(on)


def test_tokens_without_a_batch_dim_work_alike() -> None:
    """TND: three dims, the sequence in front."""
    whole = _filled(1, 12, 6, 5)[0]

    def on(rank: int) -> None:
        y = seq_to_head(whole.chunk(3, 0)[rank], dist.group.WORLD, seq_dim=0, head_dim=1)
        assert torch.equal(y, whole.chunk(3, 1)[rank])

    ranks(3).run(on)


STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "qkv-slice": lambda x: torch.stack([x, x + 0.5, -x], 2).unbind(2)[0],
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "last-dim-first": lambda x: x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    "every-second": lambda x: torch.repeat_interleave(x, 2, 1)[:, ::2],
    "negative-view": lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag,
}


@pytest.mark.parametrize("form", STRIDED)
@pytest.mark.parametrize("B", [1, 2])
def test_any_strides_give_the_bits_of_the_dense_tensor(B: int, form: str) -> None:
    """B02: what goes in need not be contiguous, nor the gradient that comes back."""
    whole = _filled(B, 16, 4, 3)

    def on(rank: int) -> None:
        dense = whole.chunk(2, 1)[rank].contiguous()
        x = STRIDED[form](dense).detach().requires_grad_()
        assert torch.equal(x, dense)
        y = seq_to_head(x, dist.group.WORLD, seq_dim=1, head_dim=2)
        z = head_to_seq(y.transpose(1, 2), dist.group.WORLD, seq_dim=2, head_dim=1)
        assert torch.equal(y, whole.chunk(2, 2)[rank])
        assert torch.equal(z, dense.transpose(1, 2))
        # a gradient of stride 0, transposed on its way
        z.transpose(1, 2).sum(-1).sum().backward()
        assert torch.equal(x.grad, torch.ones_like(dense))

    ranks(2).run(on)


def test_expanded_heads_are_sent_as_they_are_seen() -> None:
    """B02: k with stride 0 on heads; its gradient is the sum over the expanded heads."""
    whole = _filled(2, 16, 1, 3)

    def on(rank: int) -> None:
        leaf = whole.chunk(2, 1)[rank].clone().requires_grad_()
        y = seq_to_head(leaf.expand(2, 8, 4, 3), dist.group.WORLD, seq_dim=1, head_dim=2)
        assert torch.equal(y, whole.expand(2, 16, 4, 3).chunk(2, 2)[rank])
        y.sum().backward()
        assert torch.equal(leaf.grad, torch.full_like(leaf, 4.0))

    ranks(2).run(on)


def _kv_heads(H: int, Hkv: int, P: int) -> list[list[int]]:
    """The KV heads that the query heads of each rank need: query head h uses h * Hkv // H."""
    per = H // P
    return [sorted({h * Hkv // H for h in range(p * per, (p + 1) * per)}) for p in range(P)]


@pytest.mark.parametrize(("H", "Hkv"), [(8, 2), (8, 1), (12, 6), (8, 8)], ids=str)
@pytest.mark.parametrize("B", [1, 2])
def test_each_rank_gets_the_kv_heads_that_its_query_heads_need(B: int, H: int, Hkv: int) -> None:
    """B03: fewer KV heads than ranks, or neither divides the other; copies sum their gradients."""
    P = 4
    table = _kv_heads(H, Hkv, P)
    q, k, v = _filled(B, 12, H, 3), _filled(B, 12, Hkv, 3) + 0.25, _filled(B, 12, Hkv, 5) + 0.5
    upstream = [randn(B, 12, H, 3), randn(B, 12, Hkv, P, seed=1), randn(B, 12, Hkv, P, seed=2)]

    def on(rank: int) -> None:
        xs = [x.chunk(P, 1)[rank].clone().requires_grad_() for x in (q, k, v)]
        with count_collectives() as counted:
            ys = seq_to_head(
                xs, dist.group.WORLD, seq_dim=1, head_dim=2, heads=(None, table, table)
            )
            mine = torch.tensor(table[rank])
            assert torch.equal(ys[0], q.chunk(P, 2)[rank])
            assert torch.equal(ys[1], k[:, :, mine])
            assert torch.equal(ys[2], v[:, :, mine])
            # rank r weighs its copy of a head by its own numbers
            loss = (ys[0] * upstream[0].chunk(P, 2)[rank]).sum()
            loss += (ys[1] * upstream[1][:, :, mine, rank, None]).sum()
            loss += (ys[2] * upstream[2][:, :, mine, rank, None]).sum()
            loss.backward()
        assert counted.summary() == {"all_to_all": 2}
        has = torch.tensor([[h in table[p] for p in range(P)] for h in range(Hkv)])
        assert_close(xs[0].grad, upstream[0].chunk(P, 1)[rank], kind="grad")
        for x, up in zip(xs[1:], upstream[1:], strict=True):
            summed = (up * has).sum(-1, keepdim=True).expand(B, 12, Hkv, x.shape[-1])
            assert_close(x.grad, summed.chunk(P, 1)[rank], kind="grad")

    ranks(P).run(on)


def test_repeated_heads_may_be_expanded_one_per_query_head() -> None:
    """A table may name one head twice for one rank: it arrives twice, in that order."""
    whole = _filled(2, 6, 3, 2)
    table = [[1, 0, 1], [2, 2, 0]]

    def on(rank: int) -> None:
        x = whole.chunk(2, 1)[rank].clone().requires_grad_()
        y = seq_to_head(x, dist.group.WORLD, seq_dim=1, head_dim=2, heads=table)
        assert torch.equal(y, whole[:, :, table[rank]])
        y.sum().backward()
        assert torch.equal(x.grad[0, 0, :, 0], torch.tensor([2.0, 2.0, 2.0], dtype=x.dtype))

    ranks(2).run(on)


@pytest.mark.parametrize("lengths", [[4, 3, 3, 2], [5, 0, 1, 4], [3, 3, 3, 3]], ids=str)
@pytest.mark.parametrize("B", [1, 2])
def test_uneven_lengths_are_exchanged_exactly(B: int, lengths: list[int]) -> None:
    """B15: no padding, no lost row, a rank without any token included."""
    P, S = 4, sum(lengths)
    whole, up = _filled(B, S, 8, 3), randn(B, S, 8, 3)

    def on(rank: int) -> None:
        x = _rows(whole, 1, lengths, rank).clone().requires_grad_()
        with poison_empty():
            y = seq_to_head(x, dist.group.WORLD, seq_dim=1, head_dim=2, lengths=lengths)
            z = head_to_seq(y, dist.group.WORLD, seq_dim=1, head_dim=2, lengths=lengths)
            assert torch.equal(y, whole.chunk(P, 2)[rank])
            assert torch.equal(z, x)
            (z * _rows(up, 1, lengths, rank)).sum().backward()
        assert torch.equal(x.grad, _rows(up, 1, lengths, rank))

    ranks(P).run(on)


def test_uneven_head_counts_go_out_and_come_back() -> None:
    """Seven heads on three ranks, in an order of their own, one rank with none."""
    whole, table = _filled(2, 9, 7, 3), [[6, 0, 1], [], [5, 2, 4, 3]]

    def on(rank: int) -> None:
        x = whole.chunk(3, 1)[rank].clone().requires_grad_()
        y = seq_to_head(x, dist.group.WORLD, seq_dim=1, head_dim=2, heads=table)
        assert torch.equal(y, whole[:, :, table[rank]])
        z = head_to_seq(y, dist.group.WORLD, seq_dim=1, head_dim=2, heads=table)
        assert torch.equal(z, x)
        (z * z).sum().backward()
        assert torch.equal(x.grad, 2 * x)

    ranks(3).run(on)


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.float16, torch.float64, torch.float16),
        (torch.float8_e4m3fn, torch.float32, torch.float8_e5m2),
    ],
    ids=str,
)
def test_each_dtype_travels_in_its_own_collective_and_comes_back_in_it(
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """B18: nothing is cast; gradients have the input's dtype."""
    wholes = [(_filled(1, 8, 4, 2) % 7).to(dtype) for dtype in dtypes]

    def on(rank: int) -> None:
        xs = [w.chunk(2, 1)[rank].clone() for w in wholes]
        trained = [x.requires_grad_() for x in xs if x.dtype.itemsize > 1]
        with count_collectives() as counted:
            ys = seq_to_head(xs, dist.group.WORLD, seq_dim=1, head_dim=2)
        assert counted.count("all_to_all") == len(set(dtypes))
        for y, w in zip(ys, wholes, strict=True):
            assert y.dtype == w.dtype
            assert torch.equal(y.float(), w.chunk(2, 2)[rank].float())
        sum(y.double().sum() for y in ys if y.requires_grad).backward()
        for x in trained:
            assert x.grad.dtype == x.dtype
            assert torch.equal(x.grad, torch.ones_like(x))

    ranks(2).run(on)


def test_a_tensor_that_needs_no_gradient_costs_nothing_in_backward() -> None:
    """q needs one, k and v do not: backward carries q's bytes alone."""

    def on(rank: int) -> None:
        q = randn(2, 6, 4, 3, requires_grad=True)
        k, v = randn(2, 6, 2, 3, seed=1), randn(2, 6, 2, 5, seed=2)
        y, k2, v2 = seq_to_head((q, k, v), dist.group.WORLD, seq_dim=1, head_dim=2)
        assert y.requires_grad and not k2.requires_grad and not v2.requires_grad
        with count_collectives() as counted:
            (y.sum() * k2.sum() * v2.sum()).backward()
        assert counted.summary() == {"all_to_all": 1}
        assert counted.bytes("all_to_all") == q.numel() * 8 // 2

    ranks(2).run(on)


def test_a_result_that_the_loss_does_not_use_has_a_zero_gradient() -> None:
    """All ranks take part in backward even where one has no gradient to send."""

    def on(rank: int) -> None:
        q, k = randn(2, 6, 4, 3, requires_grad=True), randn(2, 6, 4, 3, requires_grad=True)
        y, k2 = seq_to_head((q, k), dist.group.WORLD, seq_dim=1, head_dim=2)
        (y.sum() + (k2.sum() if rank == 0 else 0)).backward()
        assert torch.equal(q.grad, torch.ones_like(q))
        expected = torch.zeros_like(k)
        expected[:, :, :2] = 1  # rank 0's heads
        assert torch.equal(k.grad, expected)

    ranks(2).run(on)


def test_gradients_match_the_unsharded_module_in_fp64() -> None:
    """Attention between the two exchanges, on three ranks, gives the single process's numbers."""
    B, S, H, D, P = 2, 12, 6, 5, 3
    data = [randn(B, S, H, D, seed=i) for i in range(3)]
    up = randn(B, S, H, D, seed=9)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bshd,bthd->bhst", q, k).softmax(-1)
        return torch.einsum("bhst,bthd->bshd", scores, v)

    leaves = [x.clone().requires_grad_() for x in data]
    expected = attend(*leaves)
    expected.backward(up)

    def on(rank: int) -> None:
        xs = [x.chunk(P, 1)[rank].clone().requires_grad_() for x in data]
        out = attend(*seq_to_head(xs, dist.group.WORLD, seq_dim=1, head_dim=2))
        out = head_to_seq(out, dist.group.WORLD, seq_dim=1, head_dim=2)
        out.backward(up.chunk(P, 1)[rank])
        assert_close(out, expected.chunk(P, 1)[rank])
        for x, leaf in zip(xs, leaves, strict=True):
            assert_close(x.grad, leaf.grad.chunk(P, 1)[rank], kind="grad")

    ranks(P).run(on)


def test_second_derivatives_cross_the_exchange() -> None:
    """Backward is made of the same exchanges, so create_graph works."""

    def on(rank: int) -> None:
        x = randn(1, 4, 4, 2, seed=rank, requires_grad=True)
        y = seq_to_head(x, dist.group.WORLD, seq_dim=1, head_dim=2)
        (grad,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
        assert_close(grad, 3 * x**2, kind="grad")
        assert_close(second, 6 * x, kind="grad")

    ranks(2).run(on)


def test_a_group_of_one_sends_nothing() -> None:
    """The result equals the input; a table still selects heads."""

    def on(rank: int) -> None:
        alone = [dist.new_group([r]) for r in range(2)][rank]
        x = _filled(2, 4, 3, 2).requires_grad_()
        with count_collectives() as counted:
            y = seq_to_head(x, alone, seq_dim=1, head_dim=2)
            z = seq_to_head((x,), alone, seq_dim=1, head_dim=2, heads=([[2, 0]],), async_op=True)
            w = head_to_seq(x, alone, seq_dim=1, head_dim=2, heads=[[2, 0, 1]])
        assert counted.records == []
        assert torch.equal(y, x)
        assert torch.equal(z.wait()[0], x[:, :, [2, 0]])
        assert torch.equal(w, x[:, :, [1, 2, 0]])
        (y.sum() + w.sum()).backward()
        assert torch.equal(x.grad, torch.full_like(x, 2.0))

    ranks(2).run(on)
