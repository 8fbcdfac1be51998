"""Gathers that start behind handoffs: right numbers, whatever happens between start and use."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hp_dsa import AsyncDSAIndexerLossContextParallel
from hp_mesh.handoffs import _warned
from hp_mesh.testing import ranks

from ._layer import Case
from ._model import Model, apply, assert_idle, assert_overlaps, boundaries, compare_steps

CASE = Case(P=2)
CASES = [
    Case(P=1),
    CASE,
    Case(P=3),
    Case(P=2, layout="TND", ends=(5, 12)),
    Case(P=2, load_balance=True),
    Case(P=3, layout="TND", ends=(7, 12), load_balance=True, cached=True),
    Case(P=2, cached=True),
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    _warned.clear()
    yield
    _warned.clear()


def _steps(rank: int, case: Case) -> None:
    model, sent = compare_steps(rank, case)
    if case.P > 1:
        assert_overlaps(model)
    # the latent is key and value: gathered once for attention, and once more for the loss
    gathers = 0 if case.P == 1 else 3 if case.cached else 6
    for counted in sent[1:]:
        assert counted.count("all_gather") == gathers
        assert counted.count("reduce_scatter") == (3 if case.P > 1 else 0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_equal_the_unsharded_model(case: Case) -> None:
    """The first call learns; from the second on every gather starts behind its handoff."""
    ranks(case.P).run(_steps, case)


def test_steps_of_processes_equal_the_unsharded_model() -> None:
    ranks(2, backend="processes").run(_steps, CASE)


def _redundant(rank: int) -> None:
    case = CASE.but(cached=True)

    def place(model: Any) -> Any:
        apply(model, case)
        AsyncDSAIndexerLossContextParallel().remove(model.layer.loss)
        AsyncDSAIndexerLossContextParallel().apply(
            model.layer.loss,
            case.mesh(),
            key_handoff=model.latent,
            key_index_handoff=model.key_index,
            key_rope_handoff=model.key_rope,
        )
        return model

    model, sent = compare_steps(rank, case, place=place)
    assert [counted.count("all_gather") for counted in sent[1:]] == [3, 3]
    assert all(handoff.disarmed for handoff in boundaries(model)[2].handoffs.values())
    assert_idle(model)


def test_handoffs_of_what_the_cache_has_are_given_up_without_a_word() -> None:
    ranks(2).run(_redundant)


def two_in_flight(model: Any, xs: Sequence[Tensor], ups: Sequence[Tensor]) -> list[Any]:
    """F F B B: the second forward runs before the first backward."""
    outs = [model(x) for x in xs]
    for (out, loss), up in zip(outs, ups, strict=True):
        ((out * up).sum() + loss.sum()).backward()
    return outs


def interleaved(model: Any, xs: Sequence[Tensor], ups: Sequence[Tensor]) -> list[Any]:
    """All projections of two micro-batches before either layer runs: first in, first out."""
    parts = [model.parts(x) for x in xs]
    results = [model.layer(*part.values()) for part in parts]
    outs = [(result["out"], result["loss"]) for result in results]
    for (out, loss), up in reversed(list(zip(outs, ups, strict=True))):
        ((out * up).sum() + loss.sum()).backward()
    return outs


def second_consumer(model: Any, xs: Sequence[Tensor], ups: Sequence[Tensor]) -> list[Any]:
    """Latent and index key are used beside the boundaries: gradients add up."""
    outs = []
    for x, up in zip(xs, ups, strict=True):
        parts = model.parts(x)
        result = model.layer(*parts.values())
        out, loss = result["out"], result["loss"]
        beside = (parts["latent"] ** 2).sum() * 0.5 + parts["key_index"].sin().sum()
        ((out * up).sum() + loss.sum() + beside).backward()
        outs.append((out, loss))
    return outs


def checkpointed(reentrant: bool) -> Any:
    def run(model: Any, xs: Sequence[Tensor], ups: Sequence[Tensor]) -> list[Any]:
        outs = []
        for x, up in zip(xs, ups, strict=True):
            out, loss = checkpoint(model, x, use_reentrant=reentrant)
            ((out * up).sum() + loss.sum()).backward()
            outs.append((out, loss))
        return outs

    return run


def layer_checkpointed(model: Any, xs: Sequence[Tensor], ups: Sequence[Tensor]) -> list[Any]:
    """Only the layer is recomputed: its handoffs are not, so it gathers there itself."""
    outs = []
    for x, up in zip(xs, ups, strict=True):
        result = checkpoint(model.layer, *model.parts(x).values(), use_reentrant=False)
        out, loss = result["out"], result["loss"]
        ((out * up).sum() + loss.sum()).backward()
        outs.append((out, loss))
    return outs


def with_eval(model: Any, xs: Sequence[Tensor], ups: Sequence[Tensor]) -> list[Any]:
    """An evaluation and an abandoned forward pass before each step."""
    with torch.no_grad():
        model(xs[0])
    model.parts(xs[0])
    return two_in_flight(model, xs, ups)


RUNS = {
    "FFBB": (two_in_flight, 2),
    "first-in-first-out": (interleaved, 2),
    "second-consumer": (second_consumer, 1),
    "checkpoint": (checkpointed(False), 1),
    "checkpoint-reentrant": (checkpointed(True), 1),
    "checkpoint-layer": (layer_checkpointed, 1),
    "eval-and-abandoned": (with_eval, 2),
}


def _run(rank: int, case: Case, name: str) -> None:
    run, micro = RUNS[name]
    model, _ = compare_steps(rank, case, run, micro=micro)
    for boundary in boundaries(model):
        boundary.flush()
    assert_idle(model)


@pytest.mark.parametrize("case", [CASE, Case(P=2, cached=True)], ids=str)
@pytest.mark.parametrize("name", RUNS)
def test_numbers_are_right_in_any_order_of_calls(name: str, case: Case) -> None:
    ranks(case.P).run(_run, case, name)


def _changed(name: str, y: Tensor) -> Tensor:
    return y * 1.5 if name == "latent" else y


def _bypass(rank: int) -> None:
    model, sent = compare_steps(rank, CASE, between=_changed)
    attention = boundaries(model)[1]
    assert attention.handoffs["key"].disarmed and not attention.handoffs["key_rope"].disarmed
    assert_idle(model)
    # what was given up is gathered at the boundary, no more often than before
    assert [counted.count("all_gather") for counted in sent[1:]] == [6, 6]


def test_a_key_that_is_changed_on_its_way_is_never_bypassed() -> None:
    """One warning names the handoff; from then on it is gathered at the boundary."""
    with warnings.catch_warnings(record=True) as caught:  # here: ranks are threads and share it
        warnings.simplefilter("always")
        ranks(2).run(_bypass)
    texts = [str(w.message) for w in caught]
    assert sorted({text.split(":")[0] for text in texts}) == [
        "AsyncDSAIndexerLossContextParallel",
        "AsyncDSASparseAttentionContextParallel",
    ]
    assert len(set(texts)) == len(texts) == 2
    assert all("key handed off by Linear" in text and "synchronously" in text for text in texts)


class _Broken(RuntimeError):
    pass


def _exception(rank: int) -> None:
    case, fail = CASE, [False]

    def place(model: Any) -> Any:
        apply(model, case)
        inner = model.layer.attention.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if fail[0]:
                raise _Broken
            return inner(*args, **kwargs)

        model.layer.attention.forward = forward
        return model

    def run(model: Any, xs: Sequence[Tensor], ups: Sequence[Tensor]) -> list[Any]:
        from hp_dsa.async_boundary import AsyncDSABoundary
        from hp_mesh.boundary import boundary_of

        if isinstance(boundary_of(model.layer.attention), AsyncDSABoundary):
            fail[0] = True
            with pytest.raises(_Broken):
                model(xs[0])
            fail[0] = False
        return two_in_flight(model, xs, ups)

    model, _ = compare_steps(rank, case, run, micro=2, place=place)
    for boundary in boundaries(model):
        boundary.flush()
    assert_idle(model)


def test_an_exception_in_the_module_leaves_nothing_behind() -> None:
    ranks(2).run(_exception)


def _copies(rank: int) -> None:
    model = apply(Model(CASE), CASE)
    twin = copy.deepcopy(model)
    compare_steps(rank, CASE, place=lambda _: twin)
    assert_overlaps(twin)


def test_a_copied_model_has_handoffs_of_its_own() -> None:
    ranks(2).run(_copies)
