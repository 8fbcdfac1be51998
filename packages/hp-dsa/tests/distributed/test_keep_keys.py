"""``keep_keys=False`` keeps shards, gathers again in backward, and changes no number."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from hp_dsa.gather import Gatherer
from hp_mesh._torch import WeakStorage
from hp_mesh.testing import eventually, ranks

from ._layer import Case, Layer, compare, scalar, styles, upstreams

CASES = [
    Case(P=1),
    Case(P=3),
    Case(P=2, layout="TND", ends=(5, 12)),
    Case(P=2, load_balance=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("cached", [False, True], ids=["alone", "cached"])
def test_gathering_again_changes_no_number(case: Case, cached: bool) -> None:
    case = case.but(cached=cached)
    ranks(case.P).run(compare, case, styles(case, keep_keys=False), 2)


def _watch(gathered: list[WeakStorage]) -> Any:
    original = Gatherer.gather

    def gather(self: Gatherer, shards: list[Tensor]) -> list[Tensor]:
        wholes = original(self, shards)
        gathered.extend(WeakStorage(whole) for whole in wholes)
        return wholes

    return gather


def _alive(gathered: list[WeakStorage]) -> int:
    return sum(not storage.expired() for storage in gathered)


def _alive_after_forward(rank: int, case: Case, keep_keys: bool) -> int:
    layer, gathered = Layer(case), list[WeakStorage]()
    styles(case, keep_keys=keep_keys)(layer, case.mesh())
    leaves = {n: case.local(x, rank).requires_grad_() for n, x in case.inputs().items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gatherer, "gather", _watch(gathered))
        outputs = layer(*leaves.values())
        if not keep_keys:  # gloo's threads may hold them for a moment
            eventually(lambda: _alive(gathered) == 0)
        alive = _alive(gathered)
        assert len(gathered) == 2  # index key; latent and rope
        scalar(outputs, {n: case.local(x, rank) for n, x in upstreams(case).items()}).backward()
    assert eventually(lambda: _alive(gathered) == 0)
    return alive


@pytest.mark.parametrize("case", [Case(P=2, cached=True), Case(P=2, B=1, cached=True)], ids=str)
def test_gathered_keys_are_freed_when_the_layer_returns(case: Case) -> None:
    """Processes: a patch of the gatherer must be one rank's own."""
    pool = ranks(case.P, backend="processes")
    assert pool.run(_alive_after_forward, case, True) == [2, 2]
    assert pool.run(_alive_after_forward, case, False) == [0, 0]
