"""Parts of the queries, each with the keys up to its last one, add up to the whole call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hp_mesh.testing import assert_close

from ._inputs import Case, Inputs, base

pytestmark = pytest.mark.usefixtures("operators")

QUERY_SIDE = ("q", "qr", "qi", "w", "do")
KEY_SIDE = ("k", "kr", "ki")
LEAVES = ("q", "k", "qr", "kr", "qi", "ki", "w")


def window(x: Inputs, first: int, last: int) -> Inputs:
    """Return rows ``[first, last)`` with the keys ``[0, last)``; documents are cut alike."""
    dim = 1 if x.layout == "BSND" else 0
    cut = {n: getattr(x, n).narrow(dim, first, last - first) for n in QUERY_SIDE}
    cut |= {n: getattr(x, n).narrow(dim, 0, last) for n in KEY_SIDE}
    if x.layout == "TND":
        ends = x.query_lengths
        cut["query_lengths"] = [min(max(end - first, 0), last - first) for end in ends]
        cut["key_lengths"] = [min(end, last) for end in ends]
    return replace(x, **cut)


def step(x: Inputs, count: int) -> list[Tensor]:
    """Run all operators; return row-wise results and the loss."""
    indices, values = x.indexer(count, return_value=True)
    out, m, z = x.attention(indices)
    full = x.attention(x.indexer(x.ki.shape[1 if x.layout == "BSND" else 0])[0])[1:]
    loss = x.sparse(indices, m, z) + x.dense(*full)
    heads_first = 2 if x.layout == "BSND" else 1
    objective = (out * x.do).sum() + values.where(indices >= 0, 0.0).sum() + loss.sum()
    objective.backward()
    return [indices, values, out, *(t.movedim(heads_first, -3) for t in (m, z)), loss]


def whole_and_parts(x: Inputs, count: int, windows: list[tuple[int, int]]) -> Any:
    leaves = x.leaves(*LEAVES)
    *expected, loss = step(x, count)
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    for leaf in leaves.values():
        leaf.grad = None
    parts = [step(window(x, first, last), count) for first, last in windows]
    row_wise = zip(*(part[:-1] for part in parts), strict=True)
    found = [torch.cat(rows, 1 if x.layout == "BSND" else 0) for rows in row_wise]
    added = sum(part[-1] for part in parts)
    return (
        (found, {name: leaf.grad for name, leaf in leaves.items()}, added),
        (expected, gradients, loss),
    )


def shards(S: int, P: int) -> list[tuple[int, int]]:
    return [(S // P * rank, S // P * (rank + 1)) for rank in range(P)]


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("tokens", [8, 16], ids=["case 10", "case 20b"])
def test_a_batch_in_parts(tokens: int, parts: int) -> None:
    """Ranks hold parts, or two of them when balanced: order does not matter to a sum."""
    found, expected = whole_and_parts(base(tokens), 3, shards(tokens, parts))

    assert torch.equal(found[0][0], expected[0][0])
    assert_close(found, expected, kind="grad")


@pytest.mark.parametrize("ends", [[8], [3, 8], [1, 2, 6, 8], [0, 5, 5, 8]], ids=str)
@pytest.mark.parametrize("parts", [2, 4])
def test_documents_that_straddle_parts(ends: list[int], parts: int) -> None:
    """Cases 21 and 22: a document before the part keeps its keys and has no query."""
    x = base(8, layout="TND", query_lengths=ends, key_lengths=ends)

    found, expected = whole_and_parts(x, 2, shards(8, parts))

    assert torch.equal(found[0][0], expected[0][0])
    assert_close(found, expected, kind="grad")


def test_keys_that_are_not_cut_are_refused_in_a_stream() -> None:
    """Case 22: one document of 8 tokens, its first half with all keys gathered."""
    x = base(8, layout="TND", query_lengths=[8], key_lengths=[8])
    uncut = replace(window(x, 0, 4), ki=x.ki)

    with pytest.raises(ValueError, match=r"last end 4\) must end at the tensor's length \(8\)"):
        uncut.indexer(2)


def test_random_batches_in_parts() -> None:
    x = Case(S=15, S2=15, B=2, heads=3, K=4).inputs()

    found, expected = whole_and_parts(x, 4, shards(15, 3))

    assert_close(found, expected, kind="grad")
