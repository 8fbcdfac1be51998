"""Whoever reads a gathered key adds to its gradient; nothing starts late and nothing stays."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hp_dsa import (
    AsyncDSASparseAttentionContextParallel,
    DSAGatherCache,
    DSAIndexerContextParallel,
    DSASparseAttentionContextParallel,
    Handoff,
    init_device_mesh,
)
from hp_mesh.testing import assert_close, count_collectives, eventually, randn, ranks

from ._layer import Case
from ._model import WIDTH, Model, apply, assert_overlaps, boundaries


class Read(nn.Module):
    """Reads the whole keys, every rank for itself."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, topk_indices: Tensor) -> Tensor:
        positions = torch.arange(1, key.size(1) + 1, dtype=key.dtype).view(1, -1, 1, 1)
        return (key * positions).sum() + value.sum() * 0


class Sums(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, topk_indices: Tensor) -> Tensor:
        return key.sum() + value.sum()


def _call(core: nn.Module, key: Tensor) -> Tensor:
    L = key.size(1)
    query, topk = torch.zeros(1, L, 2, 1, dtype=key.dtype), torch.zeros(1, L, 1, 1)
    return core(query, key, key, topk.to(torch.int32))


def _two_consumers(rank: int, is_async: bool) -> None:
    """Gradient of sum(gathered * (i + 1)) + 0.5 * sum(own): both are there, the first summed."""
    mesh, handoff, core = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), Handoff(), Read()
    if is_async:
        AsyncDSASparseAttentionContextParallel().apply(
            core, mesh, key_handoff=handoff, value_handoff=handoff
        )
    else:
        DSASparseAttentionContextParallel().apply(core, mesh)
    for _ in range(3):
        key = torch.arange(4.0, dtype=torch.float64).add(10 * rank).view(1, 4, 1, 1)
        key.requires_grad_()
        own = handoff(key * 1)
        (_call(core, own) + 0.5 * own.sum()).backward()
        expected = [2.5, 4.5, 6.5, 8.5] if rank == 0 else [10.5, 12.5, 14.5, 16.5]
        assert key.grad is not None and key.grad.flatten().tolist() == expected


@pytest.mark.parametrize("is_async", [False, True])
def test_a_second_consumer_adds_to_the_gradient(is_async: bool) -> None:
    ranks(2).run(_two_consumers, is_async)


def _shared(rank: int, P: int) -> None:
    core = Sums()
    mesh = init_device_mesh("cpu", (P,), mesh_dim_names=("cp",))
    DSASparseAttentionContextParallel().apply(core, mesh)
    key = randn(1, 3, 1, 1, seed=rank, requires_grad=True)
    _call(core, key).backward()
    assert key.grad is not None and key.grad.flatten().tolist() == [2.0 * P] * 3


@pytest.mark.parametrize("P", [1, 2, 3])
def test_a_latent_that_is_key_and_value_gets_both_gradients_of_every_rank(P: int) -> None:
    """Behaviour 38."""
    ranks(P).run(_shared, P)


def _starts(rank: int, case: Case) -> None:
    model = apply(Model(case), case)
    x = case.local(randn(*case.shape(WIDTH), seed=1), rank)
    for step in range(3):
        with count_collectives() as ahead:
            parts = model.parts(x)
        with count_collectives() as later:
            outputs = model.layer(*parts.values())
        assert ahead.count("all_gather") == (0 if step == 0 else 3 if case.cached else 6)
        assert ahead.count("all_gather") + later.count("all_gather") == (
            (2 if step == 0 else 3) if case.cached else (4 if step == 0 else 6)
        )
        assert outputs["loss"].numel() == 1
    assert_overlaps(model)


@pytest.mark.parametrize("cached", [False, True])
def test_gathers_start_behind_their_handoffs_from_the_second_call_on(cached: bool) -> None:
    """The first call packs latent and rotary part; two handoffs are two gathers."""
    ranks(2).run(_starts, Case(P=2, cached=cached))


def _live() -> int:
    gc.collect()
    return sum(isinstance(x, Tensor) for x in gc.get_objects())


def _leaks(rank: int, options: dict[str, Any]) -> tuple[int, int]:
    case = Case(P=2, cached=True)
    model = apply(Model(case), case, **options)
    DSAGatherCache().remove(model.layer)
    DSAGatherCache().apply(model.layer)
    counts = []
    for step in range(24):
        x = case.local(randn(*case.shape(WIDTH), seed=step), rank)
        out, loss = model(x)
        if step % 3:  # every third graph is dropped
            (out.sum() + loss.sum()).backward()
        if step == 5:
            with pytest.raises(ValueError, match="rows"):
                model.layer.attention(out, out[:, :2], out, out)
        del out, loss
        if step in (8, 23):  # looking through all objects takes a while
            # gloo's threads may hold some for a moment
            eventually(lambda: not counts or _live() <= counts[0])
            counts.append(_live())
    for boundary in boundaries(model):
        boundary.flush()
    return counts[0], counts[1]


@pytest.mark.parametrize("options", [{}, {"keep_keys": False}], ids=str)
def test_steps_leave_no_tensor_behind(options: dict[str, Any]) -> None:
    """Processes: the tensors of all ranks of a process look alike."""
    for early, late in ranks(2, backend="processes").run(_leaks, options):
        assert late <= early


class Mixing(nn.Module):
    def forward(self, query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
        return query.cumsum(1)


def _unordered(rank: int) -> None:
    case = Case(P=2, load_balance=True)
    module = DSAIndexerContextParallel(load_balance=True).apply(Mixing(), case.mesh())
    local = {n: case.local(x, rank) for n, x in case.inputs().items()}
    module(local["query_index"], local["key_index"], local["weights"])


def test_code_that_mixes_rows_is_refused_on_rows_in_another_order() -> None:
    for error in ranks(2).errors(_unordered):
        assert isinstance(error, ValueError) and "head-tail order" in str(error)


def _float32(rank: int) -> None:
    """Lower precision: keys' gradients are summed in their own dtype."""
    case = Case(P=2)
    core = DSASparseAttentionContextParallel().apply(Sums(), case.mesh())
    key = torch.ones(1, 3, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    out = _call(core, key)
    assert out.dtype is torch.bfloat16
    out.backward()
    assert key.grad is not None and key.grad.dtype is torch.bfloat16
    assert_close(key.grad, torch.full_like(key, 4.0), kind="grad")


def test_gradients_keep_the_dtype_of_the_keys() -> None:
    ranks(2).run(_float32)
