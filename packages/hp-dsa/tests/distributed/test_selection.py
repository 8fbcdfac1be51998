"""Every rank selects and attends the keys that one device would: worked-out and hostile inputs."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hp_dsa import (
    DSAIndexerContextParallel,
    DSAIndexerLossContextParallel,
    DSASparseAttentionContextParallel,
    ops,
)
from hp_mesh import shard_sequence
from hp_mesh.testing import assert_close, randn, ranks

from ._layer import SCALE, Case


def det(*shape: int, a: int, b: int, m: int) -> Tensor:
    i = torch.arange(math.prod(shape), dtype=torch.float64)
    return ((((a * i + b) % m) - (m - 1) / 2) / ((m - 1) / 2)).view(shape)


def index_inputs(*lead: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        det(*lead, 2, 4, a=41, b=2, m=23),
        det(*lead, 1, 4, a=43, b=9, m=29),
        det(*lead, 2, a=47, b=13, m=15),
    )


class Indexer(nn.Module):
    """The indexer with any options; lengths are those of the whole sequence."""

    def __init__(self, count: int, layout: str = "BSND", **options: Any) -> None:
        super().__init__()
        layouts = {"layout_query": layout, "layout_key": layout}
        self.options = {**layouts, "sparse_count": count, **options}

    def forward(self, query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
        indices, _ = ops.lightning_indexer(query, key, weights, **self.options)
        return indices


def _select(
    rank: int, P: int, inputs: tuple[Tensor, ...], module: nn.Module, layout: str, balanced: bool
) -> list[Any]:
    order, dim = "head_tail" if balanced else "contiguous", 1 if layout == "BSND" else 0
    style = DSAIndexerContextParallel(layout=layout, load_balance=balanced)
    indexer = style.apply(copy.deepcopy(module), Case(P=P).mesh())
    local = [shard_sequence(x, (rank, P), seq_dim=dim, order=order) for x in inputs]
    return indexer(*local).squeeze(-2).squeeze(0).tolist()


EIGHT = [[0, -1, -1], [0, 1, -1], [2, 1, 0], [3, 2, 1], [0, 1, 2], [0, 1, 2], [6, 5, 0], [5, 4, 3]]


@pytest.mark.parametrize("P", [1, 2, 4])
def test_ranks_select_by_global_position(P: int) -> None:
    """Rank 1 finds keys of rank 0; rank 0 finds none of the future."""
    found = ranks(P).run(_select, P, index_inputs(1, 8), Indexer(3), "BSND", False)
    assert [row for rows in found for row in rows] == EIGHT


@pytest.mark.parametrize(("P", "balanced"), [(2, False), (4, False), (2, True), (4, True)])
@pytest.mark.parametrize("layout", ["BSND", "TND"])
def test_balanced_ranks_select_the_same(P: int, balanced: bool, layout: str) -> None:
    """S=16, K=4 of one device, whatever the order of the data."""
    lead = (1, 16) if layout == "BSND" else (16,)
    lengths = (
        {}
        if layout == "BSND"
        else {
            "actual_seq_lengths_query": [3, 10, 16],
            "actual_seq_lengths_key": [3, 10, 16],
        }
    )
    inputs, module = index_inputs(*lead), Indexer(4, layout, **lengths)
    whole = module(*inputs)
    found = ranks(P).run(_select, P, inputs, module, layout, balanced)
    order, dim = "head_tail" if balanced else "contiguous", 1 if layout == "BSND" else 0
    for rank, rows in enumerate(found):
        mine = shard_sequence(whole, (rank, P), seq_dim=dim, order=order)
        assert rows == mine.squeeze(-2).squeeze(0).tolist()


def test_one_document_over_all_ranks_is_cut_at_each() -> None:
    """TND, one document of 8 tokens on two ranks: full key lengths would show the future."""
    module = Indexer(3, "TND", actual_seq_lengths_query=[8], actual_seq_lengths_key=[8])
    found = ranks(2).run(_select, 2, index_inputs(8), module, "TND", False)
    assert [row for rows in found for row in rows] == EIGHT


def test_ties_are_the_same_on_every_rank() -> None:
    """Scores that are all zero: the lowest positions, whatever the length of the key."""
    q, k, w = -torch.ones(1, 12, 2, 4), torch.ones(1, 12, 1, 4), torch.ones(1, 12, 2)
    found = ranks(3).run(_select, 3, (q, k, w), Indexer(3), "BSND", False)
    rows = [row for rows in found for row in rows]
    assert rows == [[0, -1, -1], [0, 1, -1], *[[0, 1, 2]] * 10]


@pytest.mark.parametrize("mode", [0, 3])
def test_a_mode_without_causality_shows_all_keys(mode: int) -> None:
    """sparse_mode=0 cuts no key."""
    module = Indexer(12, sparse_mode=mode)
    inputs = index_inputs(1, 12)
    whole = module(*inputs)
    found = ranks(3).run(_select, 3, inputs, module, "BSND", False)
    assert [row for rows in found for row in rows] == whole.squeeze(-2).squeeze(0).tolist()


def _prefix(rank: int, balanced: bool) -> None:
    """More keys than queries: a cached prefix, per document and per batch row."""
    order = "head_tail" if balanced else "contiguous"
    for layout, lead, queries, keys, dim in (
        ("TND", (), [5, 12], [9, 20], 0),
        ("BSND", (2,), [12, 9], [20, 13], 1),
        ("TND", (), [12, 12], [3, 20], 0),  # fewer keys than queries; a document of keys alone
    ):
        q, w = randn(*lead, 12, 2, 4, seed=1), randn(*lead, 12, 2, seed=2)
        k = randn(*lead, 20, 1, 4, seed=3)

        class Keyword(nn.Module):
            def forward(self, query: Tensor, key: Tensor, weights: Tensor, **lengths: Any) -> Any:
                layouts = {"layout_query": layout, "layout_key": layout}  # noqa: B023
                return ops.lightning_indexer(
                    query, key, weights, sparse_count=4, return_value=True, **layouts, **lengths
                )

        lengths = {"actual_seq_lengths_query": queries, "actual_seq_lengths_key": keys}
        whole = Keyword()(q, k, w, **lengths)
        for local_input in (False, True):
            style = DSAIndexerContextParallel(
                layout=layout, load_balance=balanced, use_local_input=local_input
            )
            module = style.apply(Keyword(), Case(P=2).mesh())
            local = [shard_sequence(x, (rank, 2), seq_dim=dim, order=order) for x in (q, k, w)]
            for found, full in zip(module(*local, **lengths), whole, strict=True):
                assert_close(found, shard_sequence(full, (rank, 2), seq_dim=dim, order=order))


@pytest.mark.parametrize("balanced", [False, True])
def test_queries_and_keys_may_differ_in_length(balanced: bool) -> None:
    ranks(2).run(_prefix, balanced)


def _dense_indices(rank: int, case: Case, block: int, local_input: bool) -> None:
    """All keys are named in every row: causality alone decides."""
    count = -(-case.S // block)
    topk = torch.arange(count, dtype=torch.int32).expand(*case.shape(1, count))
    names = ("actual_seq_lengths_query", "actual_seq_lengths_kv")
    if case.ends is not None:  # no index may pass the end of its document
        shortest = min(b - a for a, b in pairwise((0, *case.ends)))
        topk = topk[..., : -(-shortest // block)]
    q, k = randn(*case.shape(3, 5), seed=1), randn(*case.shape(1, 5), seed=2)
    whole = [x.clone().requires_grad_() for x in (q, k)]
    lengths = {**case.lengths(*names), "sparse_block_size": block}
    expected = Attend(case.layout)(*whole, whole[1], topk, **lengths)[0]
    expected.sum().backward()
    style = DSASparseAttentionContextParallel(
        layout=case.layout, load_balance=case.load_balance, use_local_input=local_input
    )
    core = style.apply(Attend(case.layout), case.mesh())
    leaves = [case.local(x, rank).clone().requires_grad_() for x in (q, k)]
    out = core(*leaves, leaves[1], case.local(topk, rank), **lengths)[0]
    out.sum().backward()
    assert_close(out, case.local(expected, rank))
    for leaf, full in zip(leaves, whole, strict=True):
        assert full.grad is not None
        assert_close(leaf.grad, case.local(full.grad, rank), kind="grad")


@pytest.mark.parametrize("local_input", [False, True], ids=["", "local"])
@pytest.mark.parametrize("block", [1, 2])
@pytest.mark.parametrize(
    "case",
    [
        Case(P=3),
        Case(P=2, load_balance=True),
        Case(P=2, layout="TND", ends=(5, 12)),
        Case(P=2, layout="TND", ends=(5, 12), load_balance=True),
    ],
    ids=str,
)
def test_indices_that_a_row_does_not_see_are_skipped(
    case: Case, block: int, local_input: bool
) -> None:
    """Also those of keys that this rank is never handed."""
    ranks(case.P).run(_dense_indices, case, block, local_input)


class Attend(nn.Module):
    def __init__(self, layout: str = "BSND", **options: Any) -> None:
        super().__init__()
        self.options = {"layout_query": layout, "layout_kv": layout, **options}

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, topk_indices: Tensor, **lengths: Any
    ) -> Any:
        options = {"return_softmax_lse": True, **self.options, **lengths}
        return ops.sparse_flash_attention(query, key, value, topk_indices, SCALE, **options)


def _future(rank: int) -> None:
    """B21: few visible keys, -1 before valid entries, a key of the future changed."""
    S, P = 8, 2
    q, k = randn(1, S, 3, 5, seed=1), randn(1, S, 1, 5, seed=2)
    topk = torch.full((1, S, 1, 6), -1, dtype=torch.int32)
    for row in range(S):
        topk[0, row, 0, : row + 1] = torch.arange(row, -1, -1)[:6]
    topk[0, 3, 0] = torch.tensor([-1, -1, 0, 1, 2, 3])  # the row ends at its first -1
    core = DSASparseAttentionContextParallel().apply(Attend(), Case(P=P).mesh())

    def run(k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        leaves = [x.chunk(P, 1)[rank].clone().requires_grad_() for x in (q, k)]
        out, *_ = core(leaves[0], leaves[1], leaves[1], topk.chunk(P, 1)[rank])
        out.sum().backward()
        assert leaves[0].grad is not None and leaves[1].grad is not None
        return out.detach(), leaves[0].grad, leaves[1].grad

    whole = [x.clone().requires_grad_() for x in (q, k)]
    expected = Attend()(whole[0], whole[1], whole[1], topk)[0]
    expected.sum().backward()
    out, *grads = run(k)
    assert_close(out, expected.detach().chunk(P, 1)[rank])
    for grad, full in zip(grads, whole, strict=True):
        assert full.grad is not None and torch.isfinite(grad).all()
        assert_close(grad, full.grad.chunk(P, 1)[rank], kind="grad")
    if rank == 0:
        assert not out[0, 3].any() and not grads[0][0, 3].any()
    changed = k.clone()
    changed[0, 7] = 1e6
    again, *_ = run(changed)
    assert torch.equal(again[0, :3], out[0, :3])


def test_rows_see_no_future_key_and_no_padding() -> None:
    ranks(2).run(_future)


def _padding(rank: int) -> None:
    """The whole last rank is padding, a document of its own without keys to speak of."""
    ends = [5, 8, 12]
    q, k = randn(12, 3, 5, seed=1), randn(12, 1, 5, seed=2)
    qi, ki, w = randn(12, 2, 4, seed=3), randn(12, 1, 4, seed=4), randn(12, 2, seed=5)
    names = ("actual_seq_lengths_query", "actual_seq_lengths_key")
    index = Indexer(4, "TND", **dict.fromkeys(names, ends))
    attend = Attend("TND", actual_seq_lengths_query=ends, actual_seq_lengths_kv=ends)
    whole = [x.clone().requires_grad_() for x in (q, k)]
    topk = index(qi, ki, w)
    expected = attend(whole[0], whole[1], whole[1], topk)[0]
    expected[:8].sum().backward()

    mesh = Case(P=3).mesh()
    DSAIndexerContextParallel(layout="TND").apply(index, mesh)
    DSASparseAttentionContextParallel(layout="TND").apply(attend, mesh)
    leaves = [x.chunk(3)[rank].clone().requires_grad_() for x in (q, k)]
    local = index(*(x.chunk(3)[rank] for x in (qi, ki, w)))
    assert torch.equal(local, topk.chunk(3)[rank])
    out = attend(leaves[0], leaves[1], leaves[1], local)[0]
    assert_close(out, expected.chunk(3)[rank])
    (out * (rank < 2)).sum().backward()
    for leaf, full in zip(leaves, whole, strict=True):
        assert full.grad is not None and leaf.grad is not None
        assert_close(leaf.grad, full.grad.chunk(3)[rank], kind="grad")


def test_a_rank_whose_rows_are_all_padding_takes_part() -> None:
    ranks(3).run(_padding)


class DenseLoss(nn.Module):
    """The dense warm-up loss: statistics of the index scores are computed inside."""

    def __init__(self, layout: str, lengths: dict[str, Any], *, gradients: bool = False) -> None:
        super().__init__()
        self.options = {"layout": layout, **lengths}
        self.gradients = gradients

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        query_index: Tensor,
        key_index: Tensor,
        weights: Tensor,
        softmax_max: Tensor,
        softmax_sum: Tensor,
    ) -> Any:
        index = (query_index, key_index, weights)
        statistics = ops.dense_lightning_indexer_softmax_lse(*index, **self.options)
        run = ops.dense_lightning_indexer_kl_loss
        if self.gradients:
            run = ops.dense_lightning_indexer_grad_kl_loss
        return run(query, key, *index, softmax_max, softmax_sum, *statistics, SCALE, **self.options)


def _statistics(q: Tensor, k: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    """Return max and sum of dense causal attention, ``[B, N, S, 1]`` or ``[N, T, 1]``."""
    ends = [case.S] if case.ends is None else list(case.ends)
    document = torch.bucketize(torch.arange(case.S), torch.tensor(ends), right=True)
    mask = (document[:, None] == document[None, :]).tril()
    scores = SCALE * torch.einsum("...snd,...tnd->...nst", q, k)
    scores = scores.masked_fill(~mask, -math.inf)
    top = scores.max(-1, keepdim=True).values
    return top, (scores - top).exp().sum(-1, keepdim=True)


def _dense(rank: int, case: Case) -> None:
    lengths = case.lengths("actual_seq_qlen", "actual_seq_klen")
    heads = {"query": (2, 5), "key": (2, 5), "query_index": (3, 4), "key_index": (1, 4)}
    xs = {n: randn(*case.shape(*t), seed=i) for i, (n, t) in enumerate(heads.items())}
    xs["weights"] = randn(*case.shape(3), seed=9)
    statistics = _statistics(xs["query"], xs["key"], case)
    index = ("query_index", "key_index", "weights")
    whole = {n: x.clone().requires_grad_(n in index) for n, x in xs.items()}
    expected = DenseLoss(case.layout, lengths)(*whole.values(), *statistics)
    expected.sum().backward()

    options = {"layout": case.layout, "loss_variant": "dense", "load_balance": case.load_balance}
    leaves = {n: case.local(x, rank).clone().requires_grad_(n in index) for n, x in xs.items()}
    local = [case.local(x, rank, case.seq_dim + 1) for x in statistics]
    style = DSAIndexerLossContextParallel(**options)
    loss = style.apply(DenseLoss(case.layout, lengths), case.mesh())(*leaves.values(), *local)
    loss.sum().backward()
    assert_close(loss, expected, kind="loss")
    module = style.apply(DenseLoss(case.layout, lengths, gradients=True), case.mesh())
    *grads, again = module(*leaves.values(), *local)
    assert_close(again, expected, kind="loss")
    for name, grad in zip(index, grads, strict=True):
        full = whole[name].grad
        assert full is not None
        assert_close(leaves[name].grad, case.local(full, rank), kind="grad", name=name)
        assert_close(grad, case.local(full, rank), kind="grad", name=name)


DENSE = [
    Case(P=3),
    Case(P=2, load_balance=True),
    Case(P=2, layout="TND", ends=(5, 12)),
    Case(P=2, layout="TND", ends=(5, 12), load_balance=True),
]


@pytest.mark.parametrize("case", DENSE, ids=str)
def test_the_dense_loss_equals_the_whole(case: Case) -> None:
    ranks(case.P).run(_dense, case)
