"""The indexer's losses on inputs whose result is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hp_dsa.ops import sparse_lightning_indexer_grad_kl_loss
from hp_mesh.testing import assert_close

from ._inputs import Inputs, attention_statistics, base, det

pytestmark = pytest.mark.usefixtures("operators")


def checksum(x: Tensor) -> tuple[float, float]:
    flat = x.flatten()
    return float(flat.sum()), float((flat * torch.arange(1, len(flat) + 1)).sum() / len(flat))


def test_sparse_loss_by_hand() -> None:
    """Case 17: p is 1/2 and 1/2, the index scores ln 3 and 0, the second dot negative."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    key_index = torch.tensor([math.log(3), -1.0], dtype=torch.float64).view(1, 2, 1, 1)

    d_query, d_key, d_weights, loss = sparse_lightning_indexer_grad_kl_loss(
        zero,
        torch.zeros(1, 2, 1, 1, dtype=torch.float64),
        torch.ones_like(zero),
        key_index,
        torch.ones(1, 1, 1, dtype=torch.float64),
        torch.tensor([0, 1], dtype=torch.int32).view(1, 1, 1, 2),
        zero,
        zero + 2,
        1.0,
        sparse_mode=0,
    )

    assert loss.shape == (1,)
    assert loss.item() == pytest.approx(0.143841036, abs=1e-9)
    assert d_weights.item() == pytest.approx(0.274653072, abs=1e-9)
    assert d_query.item() == pytest.approx(0.274653072, abs=1e-9)
    assert d_key.flatten().tolist() == pytest.approx([0.25, 0.0], abs=1e-9)


def dense_inputs() -> Inputs:
    x = base(4)
    x.k, x.kr = det(1, 4, 2, 4, a=29, b=5, m=19), det(1, 4, 2, 2, a=31, b=7, m=11)
    return x


def test_dense_loss_of_the_warm_up() -> None:
    """Case 19."""
    x = dense_inputs()

    m_index, z_index = x.index_lse()
    d_query, d_key, d_weights, loss = x.dense(*attention_statistics(x), grad=True)

    known = [0.523191, -0.219852, -0.071429, 0.519481], [1, 1.961788, 2.972385, 3.736186]
    assert m_index.shape == (1, 1, 4)
    assert m_index.flatten().tolist() == pytest.approx(known[0], abs=1e-6)
    assert z_index.flatten().tolist() == pytest.approx(known[1], abs=1e-6)
    assert loss.item() == pytest.approx(0.086654036, abs=1e-9)
    assert checksum(d_query) == pytest.approx((0.048143, 0.046803), abs=1e-6)
    assert checksum(d_key) == pytest.approx((0, 0.019507), abs=1e-6)
    assert checksum(d_weights) == pytest.approx((0.014155, 0.004855), abs=1e-6)


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_backward_gives_what_the_gradient_form_returns(kind: str) -> None:
    """Times what comes from above: the loss is a sum, the caller divides by the global count."""
    x = dense_inputs() if kind == "dense" else base(4)
    leaves = x.leaves("qi", "ki", "w")
    if kind == "dense":
        args = attention_statistics(x)
        loss, gradients = x.dense(*args), x.dense(*args, grad=True)
    else:
        indices = x.indexer(3)[0]
        _, m, z = x.attention(indices)
        loss, gradients = x.sparse(indices, m, z), x.sparse(indices, m, z, grad=True)

    (0.25 * loss).backward()

    assert_close(loss, gradients[3])
    for leaf, expected in zip(leaves.values(), gradients[:3], strict=True):
        assert leaf.grad is not None and not expected.requires_grad
        assert_close(leaf.grad, 0.25 * expected, kind="grad")


def test_all_keys_selected_is_the_dense_loss() -> None:
    x = base(5)
    indices = x.indexer(5)[0]
    _, m, z = x.attention(indices)

    sparse, dense = x.sparse(indices, m, z, grad=True), x.dense(m, z, grad=True)

    assert_close(sparse, dense, kind="grad")


def test_attention_gets_no_gradient_from_the_loss() -> None:
    x = base(5)
    leaves = x.leaves("q", "k", "qr", "kr", "qi")
    indices = x.indexer(3)[0]
    _, m, z = x.attention(indices)

    x.sparse(indices, m, z).backward()

    assert [name for name, leaf in leaves.items() if leaf.grad is not None] == ["qi"]


def test_without_gradients_nothing_is_kept() -> None:
    x = base(5)
    indices = x.indexer(3)[0]
    _, m, z = x.attention(indices)
    with torch.no_grad():
        plain = x.sparse(indices, m, z)
    x.leaves("w")
    with torch.no_grad():
        quiet = x.sparse(indices, m, z)

    assert not plain.requires_grad and not quiet.requires_grad
    assert_close(quiet, plain)
    assert x.sparse(indices, m, z).requires_grad


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_under_activation_checkpointing_nothing_is_recomputed_before_backward(kind: str) -> None:
    """The gradients are found in forward; that is no reason to run the caller's forward again."""
    x = base(5)
    indices = x.indexer(5)[0]
    _, m, z = x.attention(indices)
    leaves, runs = x.leaves("qi"), []

    def run(doubled: Tensor) -> Tensor:
        runs.append(1)
        x.qi = doubled / 2
        return x.dense(m, z) if kind == "dense" else x.sparse(indices, m, z)

    loss = checkpoint(run, leaves["qi"] * 2, use_reentrant=False)
    assert len(runs) == 1
    loss.backward()

    assert len(runs) == 2 and leaves["qi"].grad is not None


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_rows_that_see_nothing_add_nothing(kind: str) -> None:
    """Case 5, the losses: 5 queries, 2 keys."""
    x = base(5, 2)
    tail = Inputs(*(t[:, 3:] if t.shape[1] == 5 else t for t in list(vars(x).values())[:8]))
    found = []
    for call in (x, tail):
        call.leaves("qi", "ki", "w")
        indices = call.indexer(2)[0]
        _, m, z = call.attention(indices)
        loss = call.dense(m, z) if kind == "dense" else call.sparse(indices, m, z)
        loss.backward()
        found.append((loss.detach(), call.qi.grad, call.ki.grad, call.w.grad))

    (loss, d_q, d_k, d_w), (expected, *of_tail) = found
    assert_close(loss, expected, kind="loss")
    assert d_q[0, :3].eq(0).all() and d_w[0, :3].eq(0).all()
    assert_close((d_q[:, 3:], d_k, d_w[:, 3:]), tuple(of_tail), kind="grad")


def test_an_impossible_score_does_not_lose_the_gradient() -> None:
    """Where q underflows to 0 the gradient is still q - p; a clipped logarithm would give 0."""
    x = base(2, mode=0)
    x.w = torch.ones_like(x.w) * torch.tensor([1e3, 0.0]).double()
    x.qi, x.ki = torch.ones_like(x.qi), torch.ones_like(x.ki)
    x.ki[:, 1] = 2.0
    leaves = x.leaves("w")
    indices = x.indexer(2)[0]
    _, m, z = x.attention(indices)

    loss = x.sparse(indices, m, z)
    loss.backward()

    assert loss.isfinite().all() and loss.item() > 1e3
    assert leaves["w"].grad is not None and leaves["w"].grad[0, 0, 0] > 1.0


def test_losses_are_float32_for_low_precision() -> None:
    x = base(6)
    half = {n: getattr(x, n).bfloat16() for n in ("q", "k", "qr", "kr", "qi", "ki", "w")}
    y = Inputs(**half, do=x.do)
    z = Inputs(**{n: t.double() for n, t in half.items()}, do=x.do)
    indices = z.indexer(3)[0]
    stats = y.attention(indices)[1:]

    *gradients, loss = y.sparse(indices, *stats, grad=True)
    *_, expected = z.sparse(indices, *z.attention(indices)[1:], grad=True)

    assert loss.dtype is torch.float32 and {g.dtype for g in gradients} == {torch.bfloat16}
    assert_close(loss, expected.float(), kind="loss")
