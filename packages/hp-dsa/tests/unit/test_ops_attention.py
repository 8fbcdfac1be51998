"""Sparse attention on inputs whose result is known, and what its rows may hold."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hp_dsa.ops import sparse_flash_attention
from hp_mesh.testing import assert_close, randn

from ._inputs import Case, Inputs, attention_statistics, base

pytestmark = pytest.mark.usefixtures("operators")


def dense(x: Inputs) -> Tensor:
    """Attend to every visible key, ``[B, S1, N1, D]``."""
    scores = torch.einsum("bqnd,bkxd->bnqk", x.q, x.k) + torch.einsum("bqnd,bkxd->bnqk", x.qr, x.kr)
    S1, S2 = scores.shape[-2:]
    hidden = torch.ones(S1, S2).triu(S2 - S1 + 1).bool()
    weights = (x.scale * scores).masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("bnqk,bkxd->bqnd", weights, x.k)


def test_rows_that_see_nothing_give_zeros_and_zero_gradients() -> None:
    """Case 5: 5 queries, 2 keys."""
    x = base(5, 2)
    leaves = x.leaves("q", "k", "qr", "kr")

    indices, _ = x.indexer(2)
    out, m, z = x.attention(indices)
    out.backward(x.do)

    assert indices[0, :, 0].tolist() == [[-1, -1]] * 3 + [[0, -1], [0, 1]]
    assert out[0, :3].eq(0).all()
    assert m[0, 0, :, 0].tolist() == pytest.approx([0, 0, 0, -0.4514, 0.4958], abs=5e-5)
    assert z[0, 0, :, 0].tolist() == pytest.approx([0, 0, 0, 1, 1.8607], abs=5e-5)
    for leaf in leaves.values():
        assert leaf.grad is not None and leaf.grad.isfinite().all()
    assert x.q.grad is not None and x.q.grad[0, :3].eq(0).all()


def test_attention_by_hand() -> None:
    """Case 11."""
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k = torch.tensor([0.0, math.log(3), 9.0], dtype=torch.float64).view(1, 3, 1, 1)
    v = torch.tensor([10.0, 20.0, 99.0], dtype=torch.float64).view(1, 3, 1, 1)
    indices = torch.tensor([1, 0, -1], dtype=torch.int32).view(1, 1, 1, 3)

    out, m, z = sparse_flash_attention(
        q, k, v, indices, 1.0, sparse_mode=0, return_softmax_lse=True
    )

    assert (out.item(), m.item(), z.item()) == pytest.approx((17.5, 1.098612289, 4 / 3))


def test_all_keys_selected_is_dense_attention() -> None:
    """Case 12."""
    x = base(6)

    out, _, _ = x.attention(x.indexer(6)[0])

    known = [[0.05064, -0.064999, 0.161751, 0.046112], [0.034378, 0.0689, 0.145489, 0.180011]]
    assert_close(out, dense(x))
    torch.testing.assert_close(out[0, 5], torch.tensor(known).double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("block", [2, 3, 16])
def test_blocks_are_cut_at_what_a_row_sees(block: int) -> None:
    """Case 14: block 2, indices 0 1 2 in every row."""
    x = base(5)
    indices = torch.arange(-(-5 // block), dtype=torch.int32).expand(1, 5, 1, -1)

    out, _, _ = x.attention(indices, sparse_block_size=block)

    assert_close(out, dense(x))


def test_statistics_are_of_the_scaled_scores() -> None:
    """Case 15: layout ``[B, 1, S, N1]``."""
    x = base(4)

    _, m, z = x.attention(x.indexer(2)[0])

    maximum = [
        [-0.009722, 0.4875], [0.406944, 0.340278], [0.015278, 0.559722], [0.445833, 0.034722],
    ]  # fmt: skip
    total = [[1, 1], [1.720523, 1.662913], [1.913677, 1.468447], [1.877608, 1.772338]]
    torch.testing.assert_close(m, torch.tensor([[maximum]]).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(z, torch.tensor([[total]]).double(), atol=1e-6, rtol=0)


def test_gradients_of_the_keys_sum_to_zero() -> None:
    """Case 16b: softmax does not change when every key moves alike; value apart from the key."""
    x = base(7)
    x.value = x.k.clone()
    x.leaves("k", "kr")

    x.attention(x.indexer(3)[0])[0].backward(x.do)

    assert x.k.grad is not None and x.kr.grad is not None
    assert_close(x.k.grad.sum(1), torch.zeros(1, 1, 4).double())
    assert_close(x.kr.grad.sum(1), torch.zeros(1, 1, 2).double())


def test_a_row_ends_at_its_first_minus_one() -> None:
    x = base(4, mode=0)
    ended = torch.tensor([[0, -1, 3], [-1, 1, 2], [2, 1, -1], [3, -1, -1]], dtype=torch.int32)
    short = torch.tensor([[0, -1, -1], [-1, -1, -1], [2, 1, -1], [3, -1, -1]], dtype=torch.int32)

    for one, other in zip(
        x.attention(ended.view(1, 4, 1, 3)), x.attention(short.view(1, 4, 1, 3)), strict=True
    ):
        assert torch.equal(one, other)
    assert x.attention(ended.view(1, 4, 1, 3))[0][0, 1].eq(0).all()


def test_an_entry_that_the_row_does_not_see_is_skipped() -> None:
    x = base(4)
    future = torch.tensor([[3, 0, 1], [2, 1, 0], [0, 3, 1], [1, 2, 3]], dtype=torch.int32)
    compact = torch.tensor([[0, -1, -1], [1, 0, -1], [0, 1, -1], [1, 2, 3]], dtype=torch.int32)

    out, m, z = x.attention(future.view(1, 4, 1, 3))
    expected = x.attention(compact.view(1, 4, 1, 3))

    assert_close((out, m, z), expected)


def test_only_selected_keys_are_read() -> None:
    """B21: -1 must not read the last key, nor padding the first; a NaN there would spread."""
    x = base(8)
    indices = torch.full((1, 8, 1, 4), -1, dtype=torch.int32)
    indices[0, 2:7, 0, 0] = 2
    indices[0, 3:7, 0, 1] = 1
    leaves = x.leaves("q", "k", "qr", "kr")
    with torch.no_grad():
        for name in ("k", "kr"):
            leaves[name][0, [0, 3, 7]] = math.nan  # read by no row
        for name in ("q", "qr"):
            leaves[name][0, [0, 1, 7]] = math.nan  # rows without a key

    out, m, z = x.attention(indices)
    out.backward(x.do)

    for result in (out, m, z, *(leaf.grad for leaf in leaves.values())):
        assert result is not None and result.isfinite().all()
    assert out[0, [0, 1, 7]].eq(0).all()


def test_a_call_without_any_key_is_all_zeros() -> None:
    x = Case(S=3, S2=0, B=2).inputs()
    x.leaves("q", "k")
    indices = torch.full((2, 3, 1, 4), -1, dtype=torch.int32)

    out, m, z = x.attention(indices)
    out.backward(x.do)

    assert all(t.eq(0).all() for t in (out, m, z))
    assert x.q.grad is not None and x.q.grad.eq(0).all()


def test_every_input_gets_a_gradient_where_no_row_sees_a_key() -> None:
    """A gather behind a key sends in backward, on a rank without a visible key too."""
    x = Case(S=3, S2=4, B=2, query_lengths=[3, 0], key_lengths=[0, 4]).inputs()
    leaves = x.leaves("q", "k", "qr", "kr")
    indices = torch.full((2, 3, 1, 4), -1, dtype=torch.int32)

    x.attention(indices)[0].backward(x.do)

    for name, leaf in leaves.items():
        assert leaf.grad is not None and leaf.grad.eq(0).all(), name


def test_the_value_may_be_left_out_or_be_the_key() -> None:
    """The latent form: one gradient for the latent, the sum of key's and value's."""
    found = []
    for form in ("none", "same", "view", "apart"):
        x = base(6)
        x.leaves("q", "k")
        key = x.k
        value = {"none": None, "same": key, "view": key.view(key.shape), "apart": key.clone()}[form]
        out, _, _ = sparse_flash_attention(x.q, key, value, x.indexer(3)[0], 0.5)
        out.backward(x.do)
        found.append((out.detach(), x.q.grad, x.k.grad))

    for other in found[1:]:
        assert_close(other, found[0], kind="grad")


def test_a_detached_value_takes_no_gradient_with_it() -> None:
    x = base(6)
    x.leaves("k")
    indices = x.indexer(3)[0]
    apart = base(6)
    apart.leaves("k")

    sparse_flash_attention(x.q, x.k, x.k.detach(), indices, 0.5)[0].backward(x.do)
    sparse_flash_attention(x.q, apart.k, x.k.detach().clone(), indices, 0.5)[0].backward(x.do)

    assert_close(x.k.grad, apart.k.grad, kind="grad")


def test_value_may_have_another_size_and_rope_may_be_absent() -> None:
    x = base(6)
    value = randn(1, 6, 1, 7)
    indices = x.indexer(6)[0]

    out, m, z = sparse_flash_attention(x.q, x.k, value, indices, 0.5)

    x.qr, x.kr = torch.zeros_like(x.qr), torch.zeros_like(x.kr)
    m_all, z_all = attention_statistics(x)
    scores = 0.5 * torch.einsum("bqnd,bkxd->bqnk", x.q, x.k)
    p = (scores - m_all[:, 0, :, :, None]).exp() / z_all[:, 0, :, :, None]
    p = p * torch.ones(6, 6).tril()[:, None]
    assert_close(out, torch.einsum("bqnk,bkxd->bqnd", p, value))
    assert m.shape == z.shape == (0,)


def test_low_precision_is_summed_in_float32() -> None:
    """bfloat16 in and out; inside, what float32 gives for the same numbers."""
    case = Case(S=9, S2=9, dtype=torch.bfloat16)
    x, y = case.inputs(), case.inputs()
    for name in ("q", "k", "qr", "kr", "qi", "ki", "w", "do"):
        setattr(y, name, getattr(y, name).float())
    indices = y.indexer(4)[0]
    x.leaves("q", "k", "qr", "kr")
    y.leaves("q", "k", "qr", "kr")

    out, m, z = x.attention(indices)
    expected, m32, z32 = y.attention(indices)
    out.backward(x.do)
    expected.backward(y.do)

    assert out.dtype is torch.bfloat16 and m.dtype is z.dtype is torch.float32
    assert_close((m, z), (m32, z32))
    assert torch.equal(out, expected.bfloat16())
    for name in ("q", "qr", "kr"):
        a, b = getattr(x, name).grad, getattr(y, name).grad
        torch.testing.assert_close(a, b.bfloat16(), rtol=1e-2, atol=1e-6)
