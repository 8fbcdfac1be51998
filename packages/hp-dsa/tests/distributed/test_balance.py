"""The indexer balanced on data in natural order: tails travel to the mirror rank and back."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from hp_dsa import (
    DSAIndexerContextParallel,
    DSAIndexerLossContextParallel,
    DSASparseAttentionContextParallel,
)
from hp_mesh.testing import ranks

from ._layer import Case, compare, styles

CASES = [
    *(Case(P=P) for P in (1, 2, 3)),
    Case(P=2, layout="TND", ends=(5, 6, 12)),
    Case(P=3, layout="TND", ends=(7, 12)),
    Case(P=2, ends=(9, 12)),
]


def _apply(case: Case, **options: Any) -> Any:
    def apply(layer: Any, mesh: Any) -> None:
        styles(case)(layer, mesh)
        DSAIndexerContextParallel().remove(layer.indexer)
        DSAIndexerContextParallel(
            layout=case.layout, load_balance=True, order="contiguous", **options
        ).apply(layer.indexer, mesh)

    return apply


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_balanced_indexer_on_natural_order_equals_the_whole(case: Case) -> None:
    ranks(case.P).run(compare, case, _apply(case))


@pytest.mark.parametrize("kind", [DSASparseAttentionContextParallel, DSAIndexerLossContextParallel])
def test_only_the_indexer_balances_data_in_natural_order(kind: Any) -> None:
    with pytest.raises(ValueError, match="must be 'head_tail'") as caught:
        kind(load_balance=True, order="contiguous")
    assert "shard_sequence(order='head_tail')" in str(caught.value)


def _rows(rank: int, case: Case) -> list[int]:
    """Return the key lengths that the operator is called with."""
    from hp_dsa.ops import indexer

    seen: list[int] = []
    original = indexer.read_rows

    def read(where: str, query: Tensor, key: Tensor, *rest: Any) -> Any:
        seen.append(key.size(case.seq_dim))
        return original(where, query, key, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexer, "read_rows", read)
        layer = DSAIndexerContextParallel(load_balance=True, order="contiguous")
        from ._layer import Indexer

        module = layer.apply(Indexer(case), case.mesh())
        xs = {n: case.but(load_balance=False).local(x, rank) for n, x in case.inputs().items()}
        module(xs["query_index"], xs["key_index"], xs["weights"])
    return seen


def test_every_rank_scores_as_many_keys() -> None:
    """S=24 on two ranks: chunks of 6 rows, prefixes 6 + 24 and 18 + 12."""
    pool = ranks(2, backend="processes")
    assert pool.run(_rows, Case(S=24)) == [[6, 24], [18, 12]]
