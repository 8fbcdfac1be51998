"""What an operator is given, inside or by keyword, is one error on every rank if it is wrong.

Lengths, options and indices that one rank alone knows: no rank computes with them, none waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hp_dsa import DSAIndexerContextParallel, DSASparseAttentionContextParallel, ops
from hp_mesh.testing import assert_close, randn, ranks

from ._layer import Case


class Attend(nn.Module):
    """Attention with options of the operator, given inside or as keywords of the call."""

    def __init__(self, layout: str, **options: Any) -> None:
        super().__init__()
        self.options = {"layout_query": layout, "layout_kv": layout, **options}

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, topk_indices: Tensor, **options: Any
    ) -> Any:
        given = {**self.options, "return_softmax_lse": True, **options}
        return ops.sparse_flash_attention(query, key, value, topk_indices, 0.4, **given)


ENDS = ("actual_seq_lengths_query", "actual_seq_lengths_kv")


def _attend(
    rank: int,
    case: Case,
    topk: Tensor,
    inside: dict[str, Any],
    keywords: dict[str, Any],
    **options: Any,
) -> Any:
    style = DSASparseAttentionContextParallel(
        layout=case.layout, load_balance=case.load_balance, **options
    )
    module = style.apply(Attend(case.layout, **inside), case.mesh())
    q, k = randn(*case.shape(3, 5), seed=1), randn(*case.shape(1, 5), seed=2)
    q, k, topk = (case.local(x, rank) for x in (q, k, topk))
    return module(q, k, k, topk, **keywords)


def _same(errors: list[Any], *rules: str) -> None:
    assert all(isinstance(error, ValueError) for error in errors), errors
    assert len({str(error) for error in errors}) == 1, errors
    for rule in rules:
        assert rule in str(errors[0]), errors[0]


OWN_ROWS = [
    Case(P=2, layout="TND", ends=(5, 12)),
    Case(P=3, layout="TND", ends=(5, 12)),
    Case(P=2, layout="TND", ends=(5, 12), load_balance=True),
]


@pytest.mark.parametrize("how", ["inside", "keywords", "local"])
@pytest.mark.parametrize("case", OWN_ROWS, ids=str)
def test_indices_that_count_from_the_start_of_the_stream_are_refused(case: Case, how: str) -> None:
    """Each is below the number of all keys; the first document alone would not notice."""
    topk = torch.arange(12, dtype=torch.int32).view(12, 1, 1)
    lengths = case.lengths(*ENDS)
    inside, keywords = (lengths, {}) if how == "inside" else ({}, lengths)
    local = how == "local"
    errors = ranks(case.P).errors(_attend, case, topk, inside, keywords, use_local_input=local)
    _same(errors, "indices (11) must be -1 or below 7, the keys of document 1; indices count from")


@pytest.mark.parametrize("how", ["inside", "keywords", "local"])
@pytest.mark.parametrize("case", OWN_ROWS, ids=str)
def test_the_last_key_of_a_rows_own_document_is_no_error(case: Case, how: str) -> None:
    """Rows are held against the document that they are of, in whatever order the data is."""
    topk = torch.tensor([[0, 4]] * 5 + [[0, 6]] * 7, dtype=torch.int32).view(12, 1, 2)
    lengths = case.lengths(*ENDS)
    q, k = randn(12, 3, 5, seed=1), randn(12, 1, 5, seed=2)
    whole = Attend("TND", **lengths)(q, k, k, topk)[0]
    inside, keywords = (lengths, {}) if how == "inside" else ({}, lengths)
    local = how == "local"
    outs = ranks(case.P).run(_attend, case, topk, inside, keywords, use_local_input=local)
    for rank, out in enumerate(outs):
        assert_close(out[0], case.local(whole, rank))


@pytest.mark.parametrize("local", [False, True])
def test_indices_behind_the_keys_of_a_batch_row_are_refused(local: bool) -> None:
    """Those of padding rows are not looked at, as on one device."""
    case = Case(P=2)
    lengths = dict(zip(ENDS, ([12, 9], [7, 12]), strict=True))
    topk = torch.zeros(2, 12, 1, 2, dtype=torch.int32)
    topk[1, 9:] = 11
    ranks(2).run(_attend, case, topk, {}, lengths, use_local_input=local)
    topk[0, 8, 0, 1] = 7
    errors = ranks(2).errors(_attend, case, topk, {}, lengths, use_local_input=local)
    _same(errors, "indices (7) must be -1 or below 7, the keys of row 0", "(on rank 1 of 2)")
    topk[0, 8, 0, 1] = 4
    lengths["sparse_block_size"] = 2  # type: ignore[assignment]
    errors = ranks(2).errors(_attend, case, topk, {}, lengths, use_local_input=local)
    _same(errors, "indices (4) must be -1 or below 4, the blocks of 2 keys of row 0")


def _differently(
    rank: int,
    case: Case,
    mine: list[dict[str, Any]],
    how: str,
) -> None:
    topk = torch.zeros(*case.shape(1, 2), dtype=torch.int32)
    inside, keywords = (mine[rank], {}) if how == "inside" else ({}, mine[rank])
    _attend(rank, case, topk, inside, keywords, use_local_input=how == "local")


def _ends(ends: Any, kind: Callable[[Any], Any] = list) -> dict[str, Any]:
    return {name: kind(ends) for name in ENDS}


PACKED, BATCH = Case(P=2, layout="TND"), Case(P=2)
HOWS = ["inside", "keywords", "local"]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_ranks_with_different_lengths_are_told(kind: Callable[[Any], Any], how: str) -> None:
    """Both are valid: nothing but the comparison can know."""
    given = [_ends([5, 12], kind), _ends([7, 12], kind)]
    errors = ranks(2).errors(_differently, PACKED, given, how)
    _same(errors, "lengths_kv must be the same on all ranks", "(5, 12) on rank 0 and (7, 12) on")
    given = [_ends([12, 9], kind), {}]
    errors = ranks(2).errors(_differently, BATCH, given, how)
    _same(errors, "lengths_query must be the same on all ranks", "(12, 9) on rank 0 and")


WRONG = [
    (PACKED, [5, 12], [5, 11]),
    (PACKED, [5, 12], [7, 5, 12]),
    (BATCH, [12, 9], [12, 13]),
    (BATCH, [12, 9], [12]),
    (BATCH, [12, 9], [12.0, 9.0]),
]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", [list, torch.tensor])
@pytest.mark.parametrize(("case", "right", "wrong"), WRONG, ids=str)
def test_lengths_that_are_wrong_on_one_rank_are_an_error_on_all(
    case: Case, right: list[int], wrong: list[float], kind: Callable[[Any], Any], how: str
) -> None:
    given = [_ends(right, kind), _ends(wrong, kind)]
    errors = ranks(2).errors(_differently, case, given, how)
    _same(errors, "actual_seq_lengths_")


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize(
    ("case", "wrong", "rule"),
    [
        (BATCH, [12, 13], "([12, 13]) must be valid lengths of at most 12"),
        (BATCH, [12], "(1 entries) must have one for each row of the batch (B = 2)"),
        (BATCH, 12, "(12) must be integers, a list or a tensor of one dim"),
        (PACKED, [5, 11], "(last end 11) must end at the length of the whole sequence (12"),
    ],
    ids=str,
)
def test_wrong_lengths_in_a_call_are_refused_before_anything_moves(
    case: Case, wrong: Any, rule: str, local: bool
) -> None:
    given = dict.fromkeys(ENDS, wrong)
    how = "local" if local else "keywords"
    _same(ranks(2).errors(_differently, case, [given, given], how), rule)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    ("mine", "rule"),
    [
        ([{"sparse_mode": 3}, {"sparse_mode": 0}], "sparse_mode must be the same on all ranks"),
        ([{}, {"sparse_block_size": 2}], "sparse_block_size must be the same on all ranks"),
    ],
    ids=str,
)
def test_ranks_with_different_options_are_told(
    mine: list[dict[str, Any]], rule: str, how: str
) -> None:
    if how == "local":  # what a module adds for itself is not seen there, keywords are
        rule = rule.partition(" ")[0]
    _same(ranks(2).errors(_differently, BATCH, mine, how), rule)


class Counts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, query: Tensor, key: Tensor, weights: Tensor) -> Any:
        return ops.lightning_indexer(query, key, weights, sparse_count=self.count)[0]


def _counts(rank: int, counts: list[int]) -> None:
    case = Case(P=2)
    module = DSAIndexerContextParallel().apply(Counts(counts[rank]), case.mesh())
    xs = case.inputs()
    names = ("query_index", "key_index", "weights")
    for _ in range(2):
        module(*(case.local(xs[name], rank) for name in names))


def test_ranks_that_select_different_numbers_of_keys_are_told() -> None:
    ranks(2).run(_counts, [3, 3])
    errors = ranks(2).errors(_counts, [3, 4])
    _same(errors, "lightning_indexer: sparse_count must be the same on all ranks", "3 on rank 0")


@pytest.mark.parametrize("keep", [True, False])
def test_backward_in_another_order_on_one_rank_is_told_by_the_next_call(keep: bool) -> None:
    """Two layers send alike: their gradients would change places without a word."""
    case = Case(P=2)
    style = DSASparseAttentionContextParallel(layout=case.layout, keep_keys=keep)

    def run(rank: int) -> None:
        modules = [style.apply(Attend(case.layout), case.mesh()) for _ in range(2)]
        q, k = (
            case.local(randn(*case.shape(heads, 5), seed=heads), rank).clone().requires_grad_()
            for heads in (3, 1)
        )
        topk = case.local(torch.zeros(*case.shape(1, 2), dtype=torch.int32), rank)
        outputs = [module(q, k, k, topk)[0] for module in modules]
        for output in outputs[::-1] if rank else outputs:
            output.sum().backward()
        modules[0](q, k, k, topk)

    errors = ranks(2).errors(run)
    _same(errors, "backward passes since the ranks last compared must be the same on all ranks")


def test_ranks_may_use_some_outputs_of_a_call_each() -> None:
    """The statistics have a gradient on one rank only: the same backward on both."""
    case = Case(P=2)
    style = DSASparseAttentionContextParallel(layout=case.layout)

    def run(rank: int) -> None:
        module = style.apply(Attend(case.layout), case.mesh())
        q, k = (
            case.local(randn(*case.shape(heads, 5), seed=heads), rank).clone().requires_grad_()
            for heads in (3, 1)
        )
        topk = case.local(torch.zeros(*case.shape(1, 2), dtype=torch.int32), rank)
        for _ in range(2):
            outputs = module(q, k, k, topk)
            sum(x.sum() for x in outputs[: 1 + rank]).backward()

    ranks(2).run(run)
