"""The tiled operators against their definition, on sizes that fit no tile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hp_dsa.ops import tiles
from hp_mesh.testing import assert_close, poison_empty, randn

from ._inputs import Case, Inputs

DOCUMENTS = {"layout": "TND", "query_lengths": [7, 7, 20, 31], "key_lengths": [7, 11, 24, 43]}
CASES = [
    Case(S=17, S2=17, heads=3, index_heads=1, K=7),
    Case(S=15, S2=23, heads=4, index_heads=3, K=9, strided=True),
    Case(S=19, S2=13, B=1, heads=1, index_heads=8, K=5),
    Case(S=7, S2=11, B=3, heads=5, index_heads=3, K=31, mode=0),
    Case(S=31, S2=43, heads=3, index_heads=3, K=6, strided=True, **DOCUMENTS),
    Case(
        S=31, S2=20, heads=2, index_heads=8, K=9, layout="TND",
        query_lengths=[0, 12, 31], key_lengths=torch.tensor([5, 9, 20]),
    ),
    Case(S=19, S2=21, heads=2, index_heads=3, K=4, query_lengths=[0, 17], key_lengths=[21, 12]),
    Case(S=1, S2=41, B=1, heads=16, index_heads=3, K=3),
]  # fmt: skip
everywhere = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


@pytest.fixture(params=[(1 << 20, 64, 1 << 22), (70, 5, 900)], ids=["one tile", "tiles"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(tiles.SIZES, "cpu", tiles.TileSize(*request.param))
    with poison_empty():
        yield


def both(
    monkeypatch: pytest.MonkeyPatch, case: Case, names: tuple[str, ...], call: Any
) -> list[Any]:
    """Return ``call(inputs)`` and the gradients of ``names`` from each implementation."""
    found = []
    for name in ("tiled", "reference"):
        monkeypatch.setenv("HP_DSA", name)
        x = case.inputs()
        for leaf in names:
            getattr(x, leaf).requires_grad_()
        results, upstream = call(x)
        differentiable = next(result for result in results if result.requires_grad)
        differentiable.backward(upstream)
        detached = [result.detach() for result in results]
        found.append((detached, [getattr(x, leaf).grad for leaf in names]))
    return found


def same(found: list[Any]) -> None:
    (results, gradients), (expected, expected_gradients) = found
    assert_close(results, expected)
    assert_close(gradients, expected_gradients, kind="grad")


@everywhere
@pytest.mark.usefixtures("size")
def test_indexer(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    def call(x: Inputs) -> tuple[Any, Tensor]:
        indices, values = x.indexer(case.K, return_value=True)
        return (indices, values), randn(*values.shape, seed=9)

    same(both(monkeypatch, case, ("qi", "ki", "w"), call))


@everywhere
@pytest.mark.parametrize("block", [1, 3, 16])
@pytest.mark.usefixtures("size")
def test_attention(monkeypatch: pytest.MonkeyPatch, case: Case, block: int) -> None:
    def call(x: Inputs) -> tuple[Any, Tensor]:
        with torch.no_grad():
            indices = x.indexer(case.K)[0]
        if block > 1:  # distinct blocks, in the order of their best token, then -1
            kept = torch.full_like(indices, -1)
            flat, out = indices.flatten(0, -2), kept.flatten(0, -2)
            for row, target in zip(flat.tolist(), out, strict=True):
                blocks = list(dict.fromkeys(i // block for i in row if i >= 0))
                target[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            indices = out.view_as(indices)
        return x.attention(indices, sparse_block_size=block), x.do

    same(both(monkeypatch, case, ("q", "k", "qr", "kr"), call))


@everywhere
@pytest.mark.usefixtures("size")
def test_sparse_loss(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    def call(x: Inputs) -> tuple[Any, Tensor]:
        with torch.no_grad():
            indices = x.indexer(case.K)[0]
            _, m, z = x.attention(indices)
        return (x.sparse(indices, m, z),), torch.tensor([0.7]).double()

    same(both(monkeypatch, case, ("qi", "ki", "w"), call))


@everywhere
@pytest.mark.usefixtures("size")
def test_dense_loss(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    def call(x: Inputs) -> tuple[Any, Tensor]:
        with torch.no_grad():
            _, m, z = x.attention(x.indexer(max(case.S2, 1))[0])
        return (x.dense(m, z), *x.index_lse()), torch.tensor([0.7]).double()

    same(both(monkeypatch, case, ("qi", "ki", "w"), call))


@pytest.mark.usefixtures("size")
def test_entries_in_any_order_with_holes_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(S=17, S2=19, heads=3)
    generator = torch.Generator().manual_seed(5)
    indices = torch.randint(-1, 19, (2, 17, 1, 11), generator=generator, dtype=torch.int32)
    indices[indices == -1] = indices.flip(-1)[indices == -1]  # fewer ends

    same(both(monkeypatch, case, ("q", "k", "qr", "kr"), lambda x: (x.attention(indices), x.do)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_order_does_not_depend_on_tiles(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Scores of many ties, whole numbers: exact in every dtype, equal in every tiling."""
    generator = torch.Generator().manual_seed(2)
    x = Case(S=33, S2=61, dtype=dtype).inputs()
    for name in ("qi", "ki", "w"):
        drawn = torch.randint(-2, 3, getattr(x, name).shape, generator=generator)
        setattr(x, name, drawn.to(dtype))
    found = []
    for elements, rows in ((1 << 20, 64), (1000, 7), (64, 64), (1, 1)):
        monkeypatch.setitem(tiles.SIZES, "cpu", tiles.TileSize(elements, rows, 1))
        found.append(x.indexer(13, return_value=True))
    monkeypatch.setenv("HP_DSA", "reference")
    indices, values = x.indexer(13, return_value=True)

    for other_indices, other_values in found:
        assert torch.equal(other_indices, indices) and torch.equal(other_values, values)


def test_same_call_twice_gives_the_same_bits() -> None:
    case = Case(S=40, S2=40, B=1, dtype=torch.float32)
    runs = []
    for _ in range(2):
        x = case.inputs()
        x.leaves("q", "k", "qi", "ki", "w")
        indices, values = x.indexer(9, return_value=True)
        out, m, z = x.attention(indices)
        out.backward(x.do)
        (values.where(indices >= 0, 0.0).sum() + x.sparse(indices, m, z)).backward()
        runs.append([indices, out, m, z, *(getattr(x, n).grad for n in ("q", "k", "qi", "ki"))])

    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)
