"""What is sent: kind, count and bytes of every collective, as `DSAPlan.describe` predicts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hp_comm import traffic
from hp_dsa import (
    DSAGatherCache,
    DSAIndexerContextParallel,
    DSAIndexerLossContextParallel,
    DSASparseAttentionContextParallel,
    init_device_mesh,
    make_plan,
)
from hp_dsa.plan import DSAPlan
from hp_mesh.testing import count_collectives, randn, ranks
from hp_mesh.window import head_tail_chunks

from ._layer import Case, Layer, compare, styles

SIZES = {"latent": 512, "rope": 64, "index_dim": 128, "index_heads": 2, "topk": 4}
"""The widths of DeepSeek-V3.2; heads and entries are few, they do not travel."""


def _step(layer: nn.Module, B: int, L: int) -> None:
    def draw(seed: int, *tail: int) -> Tensor:
        return randn(B, L, *tail, seed=seed).to(torch.bfloat16).requires_grad_()

    leaves = [draw(0, 2, 512), draw(1, 1, 512), draw(2, 2, 64), draw(3, 1, 64)]
    leaves += [draw(4, 2, 128), draw(5, 1, 128), draw(6, 2)]
    outputs = layer(*leaves)
    (outputs["out"].float().sum() + outputs["loss"].sum()).backward()
    assert all(x.grad is not None for x in leaves)


def _measure(rank: int, P: int, B: int, L: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return ``{kind: (calls, bytes)}`` of one layer at real widths in bf16."""
    cached, balance = options.get("cached", True), options.get("balance")
    case = Case(P=P, B=B, S=P * L)
    mesh, layer = init_device_mesh("cpu", (P,), mesh_dim_names=("cp",)), Layer(case)
    keep = {"keep_keys": options.get("keep_keys", True)}
    both = {**keep, "load_balance": balance == "head_tail"}
    order = {"order": "contiguous"} if balance == "contiguous" else {}
    if cached:
        DSAGatherCache().apply(layer)
    DSAIndexerContextParallel(**keep, load_balance=balance is not None, **order).apply(
        layer.indexer, mesh
    )
    DSASparseAttentionContextParallel(**both).apply(layer.attention, mesh)
    DSAIndexerLossContextParallel(**both).apply(layer.loss, mesh)
    with count_collectives() as counted, traffic() as told:
        _step(layer, B, L)
    found = {k: v for k, v in told.summary().items() if k != "preflight"}
    assert found == {k: (counted.count(k), counted.bytes(k)) for k in counted.summary()}
    return found


OPTIONS = {
    "cached": {},
    "alone": {"cached": False},
    "head-tail": {"balance": "head_tail"},
    "gathered-again": {"keep_keys": False},
}


@pytest.mark.parametrize("P", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_layer_sends_what_its_plan_says(name: str, P: int) -> None:
    B, L, options = 2, 6, OPTIONS[name]
    measured = ranks(P).run(_measure, P, B, L, options)

    plan = make_plan(P, load_balance=options.get("balance") == "head_tail")
    for rank, sent in enumerate(measured):
        description = plan.describe(
            seq_len=P * L,
            batch=B,
            shared=options.get("cached", True),
            keep_keys=options.get("keep_keys", True),
            rank=rank,
            **SIZES,
        )
        assert sent == description.totals()


def test_a_shared_layer_moves_1408_bytes_of_a_token_and_not_3840() -> None:
    """DeepSeek-V3.2 in bf16: latent 1024, rotary part 128, index key 256."""
    B, L = 1, 8
    bytes_per_token = {}
    for name in ("cached", "alone"):
        sent, _ = ranks(2).run(_measure, 2, B, L, OPTIONS[name])
        calls, total = sent["all_gather"]
        bytes_per_token[name] = total / (B * L)
        assert calls == (2 if name == "cached" else 4)
    assert bytes_per_token["cached"] == 1408
    # value, which is key, is not sent again even without a cache: 3840 less 1024
    assert bytes_per_token["alone"] == 2 * 1408
    description = make_plan(2).describe(seq_len=16)
    assert description.bytes_per_token == 1408


def test_balance_of_natural_order_costs_what_the_plan_says() -> None:
    P, B, L = 3, 1, 6
    measured = ranks(P).run(_measure, P, B, L, {"balance": "contiguous"})

    plan = make_plan(P, load_balance=True, order="contiguous")
    for rank, sent in enumerate(measured):
        # the layer returns the values too, which travel back with the indices
        values = L // 2 * SIZES["topk"] * 2
        expected = dict(plan.describe(seq_len=P * L, rank=rank, **SIZES).totals())
        if "p2p" in expected:
            calls, total = expected["p2p"]
            expected["p2p"] = (calls + 1, total + values)
        assert sent == expected
    assert "p2p" not in measured[1]  # its own mirror


@pytest.mark.parametrize("P", [2, 3, 8, 32])
def test_balance_makes_the_indexers_work_equal(P: int) -> None:
    """Slowest over mean: 2 - 1/P for contiguous rows, 1 for pairs of chunks."""

    def work(plan: DSAPlan) -> float:
        return plan.describe(seq_len=2 * P).indexer_work

    assert work(make_plan(P)) == pytest.approx(2 - 1 / P)
    assert work(make_plan(P, load_balance=True)) == pytest.approx(1)
    assert work(make_plan(P, load_balance=True, order="contiguous")) == pytest.approx(1)


def test_chunks_of_the_balanced_order_cover_equal_prefixes() -> None:
    """Both orders of facts known elsewhere: 2P + 1 chunks are seen on every rank."""
    for P in (1, 2, 3, 4, 8):
        plan = make_plan(P, load_balance=True)
        order = head_tail_chunks(P)
        assert sorted(order) == list(range(2 * P))
        for rank in range(P):
            assert [start for start, _ in plan.rows(rank, 2 * P)] == list(
                order[2 * rank : 2 * rank + 2]
            )
            assert sum(end for _, end in plan.rows(rank, 2 * P)) == 2 * P + 1


def _kinds(rank: int, case: Case) -> dict[str, int]:
    counted, *_ = compare(rank, case, styles(case))
    return counted.summary()


@pytest.mark.parametrize("case", [Case(P=3), Case(P=3, load_balance=True)], ids=str)
def test_no_query_is_ever_sent(case: Case) -> None:
    """Balance of head-tail data sends keys alone, as without balance."""
    for sent in ranks(case.P).run(_kinds, case):
        assert set(sent) == {"all_gather", "reduce_scatter", "all_reduce"}
