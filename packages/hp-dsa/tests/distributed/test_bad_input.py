"""Bad input is one error with the rule, the numbers and the way out, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hp_dsa import (
    AsyncDSAIndexerContextParallel,
    DSAIndexerContextParallel,
    DSAIndexerLossContextParallel,
    DSASparseAttentionContextParallel,
    make_plan,
    ops,
)
from hp_mesh.boundary import boundary_of
from hp_mesh.testing import randn, ranks

from ._layer import Attention, Case, Indexer, Loss

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


def fails_otherwise(rank: int, module: Any, q: Tensor, k: Tensor, w: Tensor) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("DSAIndexerContextParallel: out of memory")

    if rank == 1:
        boundary_of(module)._read = fails
    module(*(_shard(rank, x) for x in (q, k, w)))


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
    (fails_otherwise, {}, "out of memory (on rank 1 of 2)"),
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
    q, k = (randn(2, 6, heads, 5, seed=rank) for heads in (3, 1))
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


def test_a_plan_does_not_predict_what_cannot_be_cut() -> None:
    for plan, options, rule in (
        (make_plan(4), {"seq_len": 10}, r"seq_len \(10\) must be divisible by .* \(4\)"),
        (make_plan(4, load_balance=True), {"seq_len": 12}, r"seq_len \(12\) must be .* \(8\)"),
        (make_plan(4), {"seq_len": -8}, r"seq_len \(-8\) must be at least 1"),
        (make_plan(4), {"seq_len": 8.0}, r"seq_len \(8.0\) must be an integer"),
        (make_plan(4), {"seq_len": 8, "rank": 4}, r"rank \(4\) must be one of 4 CP ranks"),
    ):
        with pytest.raises(ValueError, match=rule):
            plan.describe(**options)  # type: ignore[arg-type]


def test_a_plan_says_what_it_does_not_take() -> None:
    with pytest.raises(ValueError, match="cp_size"):
        make_plan(0)
    assert make_plan(3, layout="tnd").seq_dim == 0
    assert make_plan(3, load_balance=True).multiple() == 6


class _Attention(Attention):
    """With a keyword for what blocks of keys an index stands for."""

    def forward(self, *tensors: Tensor, sparse_block_size: Any = 1) -> Any:
        return ops.sparse_flash_attention(*tensors, 0.4, sparse_block_size=sparse_block_size)


def _attend(rank: int, heads: int, block: Any, *, use_local_input: bool) -> None:
    case = Case(P=2)
    module = DSASparseAttentionContextParallel(use_local_input=use_local_input).apply(
        _Attention(case), case.mesh()
    )
    q, k = (case.local(case.inputs()[name], rank) for name in ("query", "latent"))
    k = k.expand(-1, -1, heads, -1)
    topk = torch.zeros(*q.shape[:2], 1, 3, dtype=torch.int32)
    module(q, k, k, topk, sparse_block_size=block)


@pytest.mark.parametrize("local", [False, True], ids=["whole", "local input"])
@pytest.mark.parametrize(
    ("heads", "block", "rule"),
    [
        (1, 0, "sparse_block_size (0) must be at least 1"),
        (1, "2", "sparse_block_size ('2') must be an integer of at least 1"),
        (1, None, "sparse_block_size (None) must be an integer of at least 1"),
        (2, 1, "key (shape (.., 2, 5)) must be one head of query's size ((.., 1, 5))"),
    ],
)
def test_what_an_operator_refuses_reads_alike_on_every_rank(
    heads: int, block: Any, rule: str, local: bool
) -> None:
    """Whatever keys the ranks' windows hold."""
    errors = ranks(2).errors(_attend, heads, block, use_local_input=local)
    assert all(isinstance(error, ValueError) and rule in str(error) for error in errors), errors
    assert len({str(error) for error in errors}) == 1


def test_statistics_that_were_not_asked_for_are_missed_by_name() -> None:
    def run(rank: int) -> None:
        case = Case(P=2)
        module = DSAIndexerLossContextParallel().apply(Loss(case), case.mesh())
        x = {name: case.local(tensor, rank) for name, tensor in case.inputs().items()}
        topk = torch.zeros(*x["query"].shape[:2], 1, 3, dtype=torch.int32)
        index = (x["query_index"], x["key_index"], x["weights"])
        module(x["query"], x["latent"], *index, topk, torch.ones(0), torch.ones(0))

    for error in ranks(2).errors(run):
        assert "softmax_max (empty) must hold the softmax statistics" in str(error)
        assert "return_softmax_lse=True" in str(error)


def test_what_is_no_module_and_no_mesh_is_refused_before_anything_is_applied() -> None:
    def run(rank: int) -> None:
        mesh, module = Case(P=1).mesh(), torch.nn.Identity()
        style = AsyncDSAIndexerContextParallel()
        for args, options, rule in (
            ((len, mesh), {}, "module (builtin_function_or_method) must be a torch.nn.Module"),
            ((module, "cp"), {}, "device_mesh (str) must be a DeviceMesh"),
            ((module, mesh), {"key_handoff": len}, "key_handoff (builtin_function_or_method) must"),
        ):
            with pytest.raises(TypeError) as caught:
                style.apply(*args, **options)
            assert str(caught.value).startswith(f"{type(style).__name__}: {rule}")
        assert not module._forward_hooks and not module._forward_pre_hooks

    ranks(1).run(run)


class _Calls(torch.nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, query: Tensor, key: Tensor, weights: Tensor) -> Any:
        return self.call(query, key, weights)


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (
            lambda q, k, w: ops.lightning_indexer(q, k, w, 4),
            "positional arguments (4) must be at most 3: query, key, weights; pass the others by",
        ),
        (lambda q, k, w: ops.lightning_indexer(q, k, w, key=k), "key must be given once"),
        (lambda q, k, w: ops.lightning_indexer(key=k, weights=w), "query must be given once"),
    ],
    ids=["one too many", "twice", "no query"],
)
def test_what_is_no_call_on_one_device_is_none_inside(call: Callable[..., Any], rule: str) -> None:
    """An argument that nobody takes is not left out without a word."""
    x = Case(P=2).inputs()
    whole = [x[name] for name in ("query_index", "key_index", "weights")]
    with pytest.raises(TypeError):
        call(*whole)

    def run(rank: int) -> None:
        module = DSAIndexerContextParallel().apply(_Calls(call), Case(P=2).mesh())
        module(*(_shard(rank, one) for one in whole))

    for error in ranks(2).errors(run):
        assert isinstance(error, TypeError)
        assert f"DSAIndexerContextParallel: lightning_indexer: {rule}" in str(error)
