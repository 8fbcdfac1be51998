"""The Triton kernels, interpreted on a CPU, against the tiled operators.

Needs a triton that can be imported, and ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="no triton here; nox -s cuda_compile runs it")
# triton reads it when it is imported, so a test cannot set it; the nox sessions do
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernels run on a CPU only under TRITON_INTERPRET=1", allow_module_level=True)

from hp_dsa.ops import launch, sparse_flash_attention, tiles
from hp_mesh.testing import assert_close, randn

from ._inputs import Case, Inputs

f32 = torch.float32
SIZES = {"heads": 3, "D": 20, "Dr": 6, "DI": 12, "dtype": f32}
CASES = [
    Case(S=9, S2=9, B=2, index_heads=3, K=5, **SIZES),
    Case(S=7, S2=70, B=1, index_heads=1, K=37, strided=True, **SIZES),
    Case(S=9, S2=5, B=1, index_heads=2, K=3, **SIZES),
    Case(S=6, S2=8, B=2, index_heads=2, K=4, mode=0, **SIZES),
    Case(
        S=11, S2=15, index_heads=2, K=4, layout="TND", query_lengths=[3, 3, 7, 11],
        key_lengths=[3, 5, 10, 15], **SIZES,
    ),
    replace(Case(S=5, S2=6, B=1, index_heads=2, K=4, **SIZES), heads=40),
]  # fmt: skip
everywhere = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def both(
    monkeypatch: pytest.MonkeyPatch, case: Case, names: tuple[str, ...], call: Any
) -> list[Any]:
    found = []
    for name in ("triton", "tiled"):
        monkeypatch.setenv("HP_DSA", name)
        x = case.inputs()
        for leaf in names:
            getattr(x, leaf).requires_grad_()
        results, upstream = call(x)
        next(result for result in results if result.requires_grad).backward(upstream)
        gradients = [getattr(x, leaf).grad for leaf in names]
        found.append(([result.detach() for result in results], gradients))
    return found


def same(found: list[Any]) -> None:
    (results, gradients), (expected, expected_gradients) = found
    assert_close(results, expected)
    assert_close(gradients, expected_gradients, kind="grad")


@pytest.mark.parametrize(("rows", "keys", "heads", "size"), [(37, 71, 3, 20), (1, 5, 1, 16)])
def test_index_scores_and_their_gradient(rows: int, keys: int, heads: int, size: int) -> None:
    """Strided inputs; gradients are added to what is there."""
    q = randn(rows, 2 * heads, size, seed=1, dtype=f32)[:, ::2]
    k = randn(2 * keys, size, seed=2, dtype=f32)[::2]
    w = randn(rows, 2 * heads, seed=3, dtype=f32)[:, ::2]
    upstream = randn(rows, keys, seed=4, dtype=f32)
    found = []
    for scores in (launch._Scores(), tiles.IndexScores()):
        into = tuple(torch.ones_like(x, memory_format=torch.contiguous_format) for x in (q, k, w))
        result = scores.forward(q, k, w)
        scores.add_gradient(upstream, q, k, w, into)  # type: ignore[arg-type]
        found.append((result, into))

    assert_close(found[0][0], found[1][0])
    assert_close(found[0][1], found[1][1], kind="grad")


def test_a_nan_is_seen_in_the_scores() -> None:
    q, k, w = torch.full((1, 1, 16), float("nan")), torch.ones(3, 16), torch.ones(1, 1)

    assert launch._Scores().forward(q, k, w).isnan().all()


@everywhere
def test_indexer(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    def call(x: Inputs) -> tuple[Any, Tensor]:
        indices, values = x.indexer(case.K, return_value=True)
        return (indices, values), randn(*values.shape, seed=9, dtype=f32)

    same(both(monkeypatch, case, ("qi", "ki", "w"), call))


# the interpreter multiplies bfloat16 as the integers that hold its bits: float16 stands for both
@pytest.mark.parametrize(
    "case", [*CASES, replace(CASES[0], dtype=torch.float16)], ids=lambda case: case.id
)
@pytest.mark.parametrize("block", [1, 3])
def test_attention(monkeypatch: pytest.MonkeyPatch, case: Case, block: int) -> None:
    """Entries in any order, with ends and entries that the row does not see."""
    generator = torch.Generator().manual_seed(5)

    def call(x: Inputs) -> tuple[Any, Tensor]:
        with torch.no_grad():
            indices = x.indexer(case.K)[0] // block
            hole = torch.rand(indices.shape, generator=generator.manual_seed(5)) < 0.1
        return x.attention(indices.masked_fill(hole, -1), sparse_block_size=block), x.do

    same(both(monkeypatch, case, ("q", "k", "qr", "kr"), call))


@pytest.mark.parametrize("rope", [True, False])
def test_attention_with_values_of_their_own(monkeypatch: pytest.MonkeyPatch, rope: bool) -> None:
    found = []
    for name in ("triton", "tiled"):
        monkeypatch.setenv("HP_DSA", name)
        x = CASES[0].inputs()
        v = randn(2, 9, 1, 35, seed=8, dtype=f32).requires_grad_()
        leaves = [x.q, x.k, v, *([x.qr, x.kr] if rope else [])]
        for leaf in leaves:
            leaf.requires_grad_()
        options = {"query_rope": x.qr, "key_rope": x.kr} if rope else {}
        with torch.no_grad():
            indices = x.indexer(5)[0]
        out, m, z = sparse_flash_attention(
            x.q, x.k, v, indices, 0.3, return_softmax_lse=True, **options
        )
        out.backward(randn(*out.shape, seed=7, dtype=f32))
        found.append(([out.detach(), m, z], [leaf.grad for leaf in leaves]))

    same(found)


@everywhere
def test_losses(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    def call(x: Inputs) -> tuple[Any, Tensor]:
        with torch.no_grad():
            indices = x.indexer(case.K)[0]
            _, m, z = x.attention(indices)
            full = x.attention(x.indexer(case.S2)[0])[1:]
        return (x.dense(*full) + x.sparse(indices, m, z), *x.index_lse()), torch.ones(1)

    same(both(monkeypatch, case, ("qi", "ki", "w"), call))


def test_float64_and_deterministic_runs_take_the_tiled_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a kernel was called")

    monkeypatch.setattr(launch._Attention, "apply", refuse)
    monkeypatch.setenv("HP_DSA", "triton")
    x = replace(CASES[0], dtype=torch.float64).inputs()
    x.attention(x.indexer(3)[0])
    x = CASES[0].inputs()
    torch.use_deterministic_algorithms(True)
    try:
        x.attention(x.indexer(3)[0])
    finally:
        torch.use_deterministic_algorithms(False)
