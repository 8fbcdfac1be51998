"""Real models on many ranks: logits, both losses and every gradient equal the unmodified model."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hp_dsa import init_device_mesh
from hp_dsa.async_boundary import AsyncDSABoundary
from hp_mesh import next_token_labels, shard_sequence
from hp_mesh.boundary import boundary_of
from hp_mesh.testing import assert_close, count_collectives, ranks

pytest.importorskip("transformers", reason="the extra is not installed")

from hp_dsa.transformers import indexer_loss, prepare_model

from ._tiny import IDS, TOPK, B, S, build, exact, formula_loss, lm_loss, watch

WEIGHT = 0.7
"""Of the indexers' loss beside the LM's."""


@cache
def unmodified(family: str, dense: bool = False) -> dict[str, Any]:
    """Return what transformers' own model gives, and the indexers' loss by the formulas."""
    model = build(family, **({"index_topk": S} if dense else {}))
    seen = watch(model)
    with exact():
        logits = model(input_ids=IDS).logits
        loss = lm_loss(logits)
        summed = formula_loss(model, seen, dense=dense)
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        (WEIGHT * summed / (B * S)).backward()
    learned = {n: p.grad for n, p in model.named_parameters()}
    assert all(torch.equal(learned[n], g) for n, g in grads.items()), "only indexers learn from it"
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    return {
        "logits": logits.detach(),
        "loss": loss.detach(),
        "indexer": summed.detach() / (B * S),
        "grads": learned,
    }


def prepared(rank: int, model: Any, size: int, **options: Any) -> dict[str, Any]:
    """Return the same on one of ``size`` ranks, gradients summed over them."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    model = prepare_model(copy.deepcopy(model), mesh["cp"], gradient_divisor=1, **options)
    order = "head_tail" if options.get("load_balance") else "contiguous"
    ids = shard_sequence(IDS, mesh["cp"], order=order)
    targets = next_token_labels(IDS, mesh["cp"], order=order)
    for _ in range(2 if options.get("overlap") else 1):  # handoffs learn from a first call
        model.zero_grad()
        with count_collectives() as sent:
            out = model(input_ids=ids, labels=ids, shift_labels=targets)
            learned = indexer_loss(model)
            (out.loss + WEIGHT * learned).backward()
    for parameter in model.parameters():
        if parameter.grad is None:  # an expert that none of the rank's tokens go to
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
    if options.get("overlap") and size > 1:
        assert_overlaps(model)
    return {
        "logits": out.logits.detach(),
        "loss": out.loss.detach(),
        "indexer": learned.detach(),
        "grads": {n: p.grad for n, p in model.named_parameters()},
        "sent": {kind: n for kind, n in sent.summary().items() if kind != "preflight"},
        "order": order,
    }


def assert_overlaps(model: Any) -> None:
    """Assert that every handoff was learned, works, and holds nothing."""
    found = [boundary_of(module) for module in model.modules()]
    handoffs = [h for b in found if isinstance(b, AsyncDSABoundary) for h in b.handoffs.values()]
    assert len(handoffs) >= 6
    for handoff in handoffs:
        assert handoff.learned is not None and not handoff.disarmed
        assert not [lane for lane in handoff.lanes.values() if lane.items]


def exactly(rank: int, model: Any, size: int, options: dict[str, Any]) -> dict[str, Any]:
    """Run `prepared` in a process of its own."""
    with exact():
        return prepared(rank, model, size, **options)


def assert_equals(got: dict[str, Any], rank: int, size: int, expected: dict[str, Any]) -> None:
    local: Tensor = shard_sequence(expected["logits"], (rank, size), order=got["order"])
    assert_close(got["logits"], local, name="logits")
    assert_close(got["loss"], expected["loss"], kind="loss", name="LM loss")
    assert_close(got["indexer"], expected["indexer"], kind="loss", name="indexers' loss")
    for name, grad in expected["grads"].items():
        assert_close(got["grads"][name], grad, kind="grad", name=name)


@pytest.mark.parametrize(
    ("size", "balance"),
    [(1, False), (2, False), (2, True), (4, False), (4, True)],
    ids=["1", "2", "2-balanced", "4", "4-balanced"],
)
@pytest.mark.parametrize("family", ["deepseek", "glm"])
def test_ranks_train_as_the_unmodified_model_does(family: str, size: int, balance: bool) -> None:
    """The selection is real: ``index_topk`` is 5 of 24 keys."""
    assert TOPK < S
    model = build(family)
    with exact():
        outcomes = ranks(size).run(prepared, model, size, load_balance=balance)
    for rank, got in enumerate(outcomes):
        assert_equals(got, rank, size, unmodified(family))
        assert got["sent"] == layer_by_layer(family, size)


def layer_by_layer(family: str, size: int) -> dict[str, int]:
    """Keys travel once in each direction: latent and rotary part together, the index key by itself.

    A scalar for each indexer's loss, and two for the LM's: its sum and the number of targets.
    """
    if size == 1:
        return {}
    layers, indexers = 3, 2 if family == "glm" else 3
    keys = layers + indexers
    return {"all_gather": keys, "reduce_scatter": keys, "all_reduce": indexers + 2}


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"overlap": True}),
        (4, {"overlap": True, "load_balance": True}),
        (2, {"keep_keys": False}),
    ],
    ids=["overlapping", "overlapping-balanced", "keys gathered again"],
)
@pytest.mark.parametrize("family", ["deepseek", "glm"])
def test_options_of_the_styles_change_no_number(
    family: str, size: int, options: dict[str, Any]
) -> None:
    model = build(family)
    with exact():
        outcomes = ranks(size).run(prepared, model, size, **options)
    for rank, got in enumerate(outcomes):
        assert_equals(got, rank, size, unmodified(family))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", ["deepseek", "glm"])
def test_dense_warm_up_attends_to_all_keys_and_learns_from_all(family: str, size: int) -> None:
    """Equals the unmodified model with ``index_topk`` as long as the sequence."""
    model = build(family)
    with exact():
        outcomes = ranks(size).run(
            prepared, model, size, indexer_loss="dense", load_balance=size > 1, overlap=size > 1
        )
    for rank, got in enumerate(outcomes):
        assert_equals(got, rank, size, unmodified(family, dense=True))


def test_processes_train_as_the_unmodified_model_does() -> None:
    """No state of torch or transformers is shared between ranks."""
    outcomes = ranks(2, backend="processes").run(exactly, build("glm"), 2, {"load_balance": True})
    for rank, got in enumerate(outcomes):
        assert_equals(got, rank, 2, unmodified("glm"))
