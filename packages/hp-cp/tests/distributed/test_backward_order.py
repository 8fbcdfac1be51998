"""Ranks that run backward of equal modules in other orders: the next call says so."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import Tensor, nn

from hp_mesh.testing import count_collectives, ranks

from ._compare import Case
from ._cores import Sdpa

COLOSSAL = Case(P=2, degree=1)
MODES: dict[str, tuple[Case, dict[str, Any]]] = {
    "ulysses": (Case(P=2), {}),
    "hybrid": (Case(P=4, degree=2), {}),
    "colossal": (COLOSSAL, {}),
    "keep_kv": (COLOSSAL, {"keep_kv": False}),
    "kv_chunks": (COLOSSAL, {"kv_chunks": 2}),
    "balanced": (COLOSSAL.but(load_balance=True), {}),
    "head_groups": (Case(P=2, head_groups=2), {}),
    "local": (Case(P=2), {"use_local_input": True}),
}


def _pair(case: Case, **options: Any) -> list[nn.Module]:
    mesh = case.mesh()
    return [case.style(**options).apply(Sdpa(), mesh) for _ in range(2)]


def _call(modules: list[nn.Module], case: Case, rank: int, wanted: str = "qkv") -> list[Tensor]:
    shards = [case.local(x, rank).clone() for x in case.qkv()]
    for name, x in zip("qkv", shards, strict=True):
        x.requires_grad_(name in wanted)
    return [module(*shards) for module in modules]


def _backward(outputs: list[Tensor], *, turned: bool) -> None:
    for output in outputs[::-1] if turned else outputs:
        output.sum().backward()


@pytest.mark.parametrize("mode", MODES)
def test_another_order_on_one_rank_is_said_by_the_next_call_and_forgotten(mode: str) -> None:
    case, options = MODES[mode]

    def run(rank: int) -> str:
        modules = _pair(case, **options)
        _backward(_call(modules, case, rank), turned=rank == 1)
        with pytest.raises(ValueError, match="in the same order, on all of them") as caught:
            _call(modules, case, rank)
        _backward(_call(modules, case, rank), turned=False)
        _call(modules, case, rank)
        return str(caught.value)

    first, *others = ranks(case.P).run(run)
    assert {first} == set(others)
    passes = re.findall(r"2, the last of call 0 of module number (\d+) that a style", first)
    assert len(set(passes)) == 2


def test_a_layer_that_one_rank_went_through_again_is_said() -> None:
    """``retain_graph`` and a second backward of another layer: counts alone would be equal."""
    case = Case(P=2)

    def run(rank: int) -> None:
        modules = _pair(case)
        first, second = _call(modules, case, rank)
        first.sum().backward(retain_graph=True)
        second.sum().backward(retain_graph=True)
        (first if rank else second).sum().backward()
        with pytest.raises(ValueError, match=r" 3, the last of call 0 of module .* on rank 1"):
            _call(modules, case, rank)

    ranks(2).run(run)


@pytest.mark.parametrize("turned_on", [(), (0, 1)])
def test_one_order_on_all_ranks_is_right_whatever_it_is(turned_on: tuple[int, ...]) -> None:
    case = Case(P=2)

    def run(rank: int) -> None:
        modules = _pair(case)
        for _ in range(2):
            _backward(_call(modules, case, rank), turned=rank in turned_on)

    ranks(2).run(run)


def test_backward_that_sends_nothing_may_have_an_order_of_its_own() -> None:
    """Colossal sends nothing for q alone, so nothing can be traded."""

    def run(rank: int) -> None:
        modules = _pair(COLOSSAL)
        outputs = _call(modules, COLOSSAL, rank, wanted="q")
        with count_collectives() as seen:
            _backward(outputs, turned=rank == 1)
        assert seen.count() == 0
        _call(modules, COLOSSAL, rank)

    ranks(2).run(run)
