"""Bad input is one error with the rule, the numbers and the way out, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hp_dsa import (
    AsyncDSAIndexerContextParallel,
    DSAIndexerContextParallel,
    DSAIndexerLossContextParallel,
    DSASparseAttentionContextParallel,
    make_plan,
    ops,
)
from hp_mesh.testing import assert_close, randn, ranks

from ._layer import Attention, Case, Indexer

STYLES = [
    DSAIndexerContextParallel,
    DSASparseAttentionContextParallel,
    DSAIndexerLossContextParallel,
    AsyncDSAIndexerContextParallel,
]


@pytest.mark.parametrize("kind", STYLES)
def test_a_constructor_says_what_it_does_not_take(kind: Any) -> None:
    """Behaviour 33."""
    for options, rule in (
        ({"layout": "BNSD"}, "layout ('BNSD') must be 'BSND' or 'TND'; use 'BSND'"),
        ({"layout": None}, "layout (None) must be 'BSND' or 'TND'"),
        ({"mode": "ulysses"}, "mode ('ulysses') must be 'colossal', the only mode of DSA"),
        ({"load_balance": 1}, "load_balance (1) must be True or False"),
        ({"order": "zigzag", "load_balance": True}, "order ('zigzag') must be"),
        ({"order": "head_tail"}, "must be 'contiguous' without load_balance"),
        ({"use_local_output": "yes"}, "use_local_output ('yes') must be True or False"),
        ({"keep_keys": None}, "keep_keys (None) must be True or False"),
        ({"outputs": ("row",)}, "outputs (('row',)) must be a list of 'rows'"),
        ({"key_kwarg_name": 3}, "key_kwarg_name (3) must be the keyword of key"),
    ):
        with pytest.raises(ValueError) as caught:
            kind(**options)
        assert str(caught.value).startswith(f"{kind.__name__}: ") and rule in str(caught.value)
    with pytest.raises(TypeError):
        kind("BSND")
    shown = repr(kind(layout="tnd", use_local_output=True))
    assert shown.startswith(f"{kind.__name__}(") and "layout='tnd'" in shown
    assert "use_local_output=True" in shown


def test_a_loss_variant_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="must be 'sparse' or 'dense'"):
        DSAIndexerLossContextParallel(loss_variant="both")


def _indexer(rank: int, call: Callable[..., Any], case: Case, **options: Any) -> None:
    module = DSAIndexerContextParallel(layout=case.layout, **options).apply(
        Indexer(case), case.mesh()
    )
    xs = case.inputs()
    call(rank, module, *(xs[n] for n in ("query_index", "key_index", "weights")))


def _shard(rank: int, x: Tensor, dim: int = 1) -> Tensor:
    return x.chunk(2, dim)[rank]


def missing(rank: int, module: Any, q: Tensor, k: Tensor, w: Tensor) -> None:
    module(_shard(rank, q), _shard(rank, k))


def not_a_tensor(rank: int, module: Any, q: Tensor, k: Tensor, w: Tensor) -> None:
    module(_shard(rank, q), None, _shard(rank, w))


def whole_key(rank: int, module: Any, q: Tensor, k: Tensor, w: Tensor) -> None:
    module(_shard(rank, q), k, _shard(rank, w))


def whole_weights(rank: int, module: Any, q: Tensor, k: Tensor, w: Tensor) -> None:
    module(_shard(rank, q), _shard(rank, k), w)


def longer_key(rank: int, module: Any, q: Tensor, k: Tensor, w: Tensor) -> None:
    module(_shard(rank, q), _shard(rank, torch.cat([k, k[:, :2]], 1)), _shard(rank, w))


def uneven(rank: int, module: Any, q: Tensor, k: Tensor, w: Tensor) -> None:
    rows = slice(0, 7) if rank == 0 else slice(7, 12)
    module(q[:, rows], k[:, rows], w[:, rows])


def only_one_rank(rank: int, module: Any, q: Tensor, k: Tensor, w: Tensor) -> None:
    module(_shard(rank, q), _shard(rank, k)[:, : 6 if rank else 5], _shard(rank, w))


def other_dtype(rank: int, module: Any, q: Tensor, k: Tensor, w: Tensor) -> None:
    kind = torch.float64 if rank else torch.float32
    module(_shard(rank, q), _shard(rank, k).to(kind), _shard(rank, w))


def packed(rank: int, module: Any, q: Tensor, k: Tensor, w: Tensor) -> None:
    module(_shard(rank, q[0], 0), _shard(rank, k[0], 0), _shard(rank, w[0], 0))


def odd(rank: int, module: Any, q: Tensor, k: Tensor, w: Tensor) -> None:
    module(_shard(rank, q[:, :10]), _shard(rank, k[:, :10]), _shard(rank, w[:, :10]))


CALLS: list[tuple[Callable[..., None], dict[str, Any], str]] = [
    (missing, {}, "weights must be at position 2 or keyword 'weights'"),
    (not_a_tensor, {}, "key (argument 1) must be a tensor, got NoneType"),
    (whole_key, {}, "local_length * cp_size (12 * 2) must be the key length (6 * 2); pass this"),
    (whole_weights, {}, "weights (shape (2, 12, 3)) has 12 rows in dim 1, which must be as many"),
    (longer_key, {}, "if there are more keys than queries, pass the lengths of both"),
    (uneven, {}, "local sequence length must be the same on all ranks"),
    (only_one_rank, {}, "key has 5 rows on this rank and query 6"),
    (other_dtype, {}, "torch.float32 on rank 0"),
    (packed, {}, "must have the dims of layout 'BSND'; construct the style with layout='TND'"),
    (odd, {"load_balance": True}, "local sequence length (5) must be even with load_balance=True"),
]


@pytest.mark.parametrize(("call", "options", "rule"), CALLS, ids=[c[0].__name__ for c in CALLS])
def test_a_bad_call_is_one_error_on_every_rank(
    call: Callable[..., None], options: dict[str, Any], rule: str
) -> None:
    errors = ranks(2).errors(_indexer, call, Case(P=2), **options)
    assert all(isinstance(error, ValueError) for error in errors), errors
    assert len({str(error) for error in errors}) == 1
    assert str(errors[0]).startswith("DSAIndexerContextParallel: ") and rule in str(errors[0])


def test_shards_of_an_uneven_sequence_are_told_how_long_it_should_be() -> None:
    def thirteen(rank: int, module: Any, q: Tensor, k: Tensor, w: Tensor) -> None:
        rows = slice(0, 7) if rank == 0 else slice(7, 13)
        module(q[:, rows], k[:, rows], w[:, rows])

    errors = ranks(2).errors(_indexer, thirteen, Case(P=2, S=13))
    assert all("pad it to 14 with pad_sequence" in str(error) for error in errors)


def _packed(rank: int, ends: tuple[int, ...], names: tuple[str, str] | None) -> None:
    case = Case(P=2, layout="TND", ends=ends)
    module = DSAIndexerContextParallel(layout="TND").apply(Indexer(case), case.mesh())
    xs = [case.local(case.inputs()[n], rank) for n in ("query_index", "key_index", "weights")]
    module(*xs)


@pytest.mark.parametrize(
    ("ends", "rule"),
    [
        ((6,), "last end 6) must end at the length of the whole sequence (12: 6 local rows on 2"),
        ((24,), "last end 24) must end at the length of the whole sequence (12"),
        ((7, 5, 12), "must be cumulative ends that do not fall"),
        ((), "must be cumulative ends"),
        (None, '(None) must hold the cumulative ends of the documents for "TND"; pass [12]'),
    ],
    ids=str,
)
def test_lengths_that_do_not_add_up_are_one_error_on_every_rank(ends: Any, rule: str) -> None:
    errors = ranks(2).errors(_packed, ends, None)
    assert all(isinstance(error, ValueError) for error in errors), errors
    assert len({str(error) for error in errors}) == 1
    assert rule in str(errors[0]), errors[0]


def _other_layout(rank: int) -> None:
    case = Case(P=2)
    module = DSAIndexerContextParallel(layout="TND").apply(Indexer(case), case.mesh())
    module(randn(6, 3, 4), randn(6, 1, 4), randn(6, 3))


def test_an_operator_of_another_layout_than_the_style_is_refused() -> None:
    for error in ranks(2).errors(_other_layout):
        assert isinstance(error, ValueError)
        assert "layout_query ('BSND') must be the style's layout ('TND')" in str(error)


def _pools_after_errors(rank: int) -> None:
    case = Case(P=2)
    module = DSASparseAttentionContextParallel().apply(Attention(case), case.mesh())
    q, k = randn(2, 6, 3, 5, seed=rank), randn(2, 6, 1, 5)
    topk = torch.zeros(2, 6, 1, 3, dtype=torch.int32)
    for _ in range(2):
        with pytest.raises(ValueError, match="topk_indices"):
            module(q, k, k)
        module(q, k, k, topk)


def test_a_module_works_after_an_error() -> None:
    ranks(2).run(_pools_after_errors)


def _indices(rank: int, value: float, dtype: torch.dtype) -> None:
    case = Case(P=2)
    module = DSASparseAttentionContextParallel().apply(Attention(case), case.mesh())
    q, k = randn(2, 6, 3, 5), randn(2, 6, 1, 5)
    topk = torch.zeros(2, 6, 1, 3, dtype=dtype)
    if rank == 1:
        topk[0, 3, 0, 1] = value
    module(q, k, k, topk)


@pytest.mark.parametrize(
    ("value", "dtype", "rule"),
    [
        (12, torch.int32, "topk_indices (12) must be -1 or below the number of keys (12)"),
        (-2, torch.int64, "topk_indices (-2) must be -1 or below the number of keys (12)"),
        (0, torch.float32, "topk_indices (torch.float32) must be int32 or int64"),
    ],
)
def test_an_index_out_of_range_on_one_rank_is_an_error_on_all(
    value: float, dtype: torch.dtype, rule: str
) -> None:
    errors = ranks(2).errors(_indices, value, dtype)
    assert all(isinstance(error, ValueError) for error in errors), errors
    assert len({str(error) for error in errors}) == 1 and rule in str(errors[0])


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


def _another_order(rank: int) -> None:
    case = Case(P=2)
    styles = [DSAIndexerContextParallel(), DSAIndexerContextParallel(use_local_output=True)]
    modules = [s.apply(Indexer(case), case.mesh()) for s in styles]
    xs = [case.local(case.inputs()[n], rank) for n in ("query_index", "key_index", "weights")]
    modules[rank](*xs)


def test_ranks_in_different_modules_are_told() -> None:
    errors = ranks(2).errors(_another_order)
    assert len({str(error) for error in errors}) == 1
    assert "module must be the same on all ranks" in str(errors[0])


def test_a_plan_says_what_it_does_not_take() -> None:
    with pytest.raises(ValueError, match="cp_size"):
        make_plan(0)
    assert make_plan(3, layout="tnd").seq_dim == 0
    assert make_plan(3, load_balance=True).multiple() == 6
