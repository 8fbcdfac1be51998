"""Every operator's gradient against finite differences, in both layouts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from hp_dsa.ops import tiles

from ._inputs import Case, Inputs, attention_statistics


@pytest.fixture(params=["reference", "tiled"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use tiles of two rows, so that gradients of keys add up over several."""
    monkeypatch.setenv("HP_DSA", request.param)
    monkeypatch.setitem(tiles.SIZES, "cpu", tiles.TileSize(elements=30, rows=2, gathered=60))


CASES = [
    Case(S=3, S2=4, B=2, heads=2, index_heads=1, D=2, Dr=1, DI=2, K=2),
    Case(S=4, S2=2, B=1, heads=1, index_heads=3, D=2, Dr=1, DI=2, K=3),
    Case(S=3, S2=4, B=1, heads=2, index_heads=2, D=2, Dr=1, DI=2, K=2, mode=0),
    Case(
        S=5, S2=6, heads=2, index_heads=2, D=2, Dr=1, DI=2, K=2, layout="TND",
        query_lengths=[2, 2, 5], key_lengths=[3, 4, 6],
    ),
]  # fmt: skip
both = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def check(x: Inputs, names: tuple[str, ...], call: Callable[[], Tensor]) -> None:
    def function(*given: Tensor) -> Tensor:
        for name, tensor in zip(names, given, strict=True):
            setattr(x, name, tensor)
        return call()

    leaves = tuple(getattr(x, name).detach().clone().requires_grad_() for name in names)
    assert gradcheck(function, leaves, eps=1e-6, atol=1e-6, rtol=1e-5, nondet_tol=0.0)


@both
def test_values_of_the_indexer(case: Case) -> None:
    x = case.inputs()

    def values() -> Tensor:
        indices, found = x.indexer(case.K, return_value=True)
        return found.where(indices >= 0, 0.0)

    check(x, ("qi", "ki", "w"), values)


@both
@pytest.mark.parametrize("block", [1, 3])
def test_sparse_attention(case: Case, block: int) -> None:
    x = case.inputs()
    x.value = x.do.new_zeros(*x.k.shape[:-1], 2)
    x.value.copy_(x.kr[..., :1].expand_as(x.value))
    indices = x.indexer(case.K)[0]
    if block > 1:
        indices = torch.where(indices >= 0, indices // block, -1)
        indices[..., 1:].masked_fill_(indices[..., 1:] == indices[..., :1], -1)

    check(
        x,
        ("q", "k", "value", "qr", "kr"),
        lambda: x.attention(indices, sparse_block_size=block)[0],
    )


@both
def test_latent_attention(case: Case) -> None:
    x = case.inputs()
    indices = x.indexer(case.K)[0]
    check(x, ("q", "k", "qr", "kr"), lambda: x.attention(indices)[0])


@both
def test_sparse_loss(case: Case) -> None:
    x = case.inputs()
    indices = x.indexer(case.K)[0]
    _, m, z = x.attention(indices)
    check(x, ("qi", "ki", "w"), lambda: x.sparse(indices, m, z))


@both
def test_dense_loss(case: Case) -> None:
    x = case.inputs()
    everything = max(case.S2, 1)
    # all keys selected: the sparse operator's statistics are dense attention's
    _, m, z = x.attention(x.indexer(everything)[0])
    check(x, ("qi", "ki", "w"), lambda: x.dense(m, z))


def test_dense_loss_of_several_kv_heads() -> None:
    x = Case(S=3, S2=4, B=2, heads=4, kv_heads=2, index_heads=2, D=3, Dr=2, DI=3).inputs()
    m, z = attention_statistics(x)
    check(x, ("qi", "ki", "w"), lambda: x.dense(m, z))
