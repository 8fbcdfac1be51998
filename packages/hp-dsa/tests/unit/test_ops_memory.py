"""The tiled operators hold tiles, never a matrix of queries times keys; float32."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hp_dsa.ops import tiles
from hp_mesh.testing import largest_allocation, peak_memory, randn

from ._inputs import Case, Inputs


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tiles so small that a matrix would show at 384 tokens."""
    monkeypatch.setitem(tiles.SIZES, "cpu", tiles.TileSize(1 << 15, 32, 1 << 15))
    monkeypatch.delenv("HP_DSA", raising=False)


def inputs(S: int) -> Inputs:
    x = Case(
        S=S, S2=S, B=1, heads=4, index_heads=8, D=32, Dr=8, DI=16, dtype=torch.float32
    ).inputs()
    x.leaves("q", "k", "qr", "kr", "qi", "ki", "w")
    return x


def indexer(x: Inputs) -> Tensor:
    indices, values = x.indexer(16, return_value=True)
    return values.where(indices >= 0, 0.0)


def attention(x: Inputs) -> Tensor:
    return x.attention(x.indexer(16)[0])[0]


def sparse(x: Inputs) -> Tensor:
    with torch.no_grad():
        indices = x.indexer(16)[0]
        _, m, z = x.attention(indices)
    return x.sparse(indices, m, z)


def dense(x: Inputs) -> Tensor:
    zeros = torch.zeros(1, 1, x.q.shape[1], 4)
    return x.dense(zeros, zeros + 1e30)


each = pytest.mark.parametrize("call", [indexer, attention, sparse, dense])


@each
def test_no_tensor_is_as_large_as_the_scores_of_one_head(call: Callable[[Inputs], Tensor]) -> None:
    """384 tokens: keys gathered for every row would be a larger one still."""
    x = inputs(384)

    with largest_allocation() as memory:
        call(x).sum().backward()

    assert memory.largest < 384 * 384 * 4 // 2, memory.largest_op


@each
def test_memory_grows_with_the_sequence_not_with_its_square(
    call: Callable[[Inputs], Tensor],
) -> None:
    peaks = []
    for S in (192, 384):
        x = inputs(S)
        gc.collect()
        with peak_memory() as memory:
            call(x).sum().backward()
        peaks.append(memory.peak)

    assert peaks[1] < 2.2 * peaks[0]


def test_tiles_that_no_row_sees_are_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the square, and at most a tile's rows more."""
    scored = 0
    score = tiles.IndexScores.forward

    def count(self: tiles.IndexScores, q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        nonlocal scored
        scored += q.shape[0] * k.shape[0]
        return score(self, q, k, w)

    monkeypatch.setattr(tiles.IndexScores, "forward", count)
    S, rows = 320, 32
    inputs(S).indexer(7)

    assert S * (S + 1) // 2 <= scored <= S * (S + rows) // 2


def test_4096_tokens_need_little_beyond_inputs_and_outputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """8 heads, K 512, the tiles that CPU users get: 0.15 GiB; all heads' scores would be 0.5."""
    monkeypatch.undo()
    shapes = {"qi": (1, 4096, 8, 128), "ki": (1, 4096, 1, 128), "w": (1, 4096, 8)}
    drawn = [
        randn(*shape, seed=seed, dtype=torch.float32) for seed, shape in enumerate(shapes.values())
    ]
    x = Inputs(*([drawn[0]] * 4), *drawn, do=drawn[0])

    with peak_memory() as memory:
        indices, values = x.indexer(512, return_value=True)

    extra = memory.peak - indices.nbytes - values.nbytes
    assert extra < 0.15 * (1 << 30)
