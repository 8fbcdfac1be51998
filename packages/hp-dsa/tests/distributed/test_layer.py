"""A layer under the three styles equals the unsharded layer: outputs and every gradient."""

from __future__ import annotations

import pytest

from hp_mesh.testing import ranks

from ._layer import Case, compare

CASES = [
    *(Case(P=P) for P in (1, 2, 3, 4)),
    *(Case(P=P, layout="TND", ends=(12,)) for P in (1, 2, 3)),
    Case(P=3, layout="TND", ends=(5, 6, 12)),  # straddles, lies inside one rank
    Case(P=4, layout="TND", ends=(1, 1, 7, 12)),  # an empty one, a padded tail of its own
    Case(P=2, ends=(12, 7)),  # valid lengths of a batch
    *(Case(P=P, load_balance=True) for P in (1, 2, 3)),
    Case(P=2, layout="TND", ends=(5, 6, 12), load_balance=True),
    Case(P=3, layout="TND", ends=(7, 12), load_balance=True),
    Case(P=2, ends=(9, 12), load_balance=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("cached", [False, True], ids=["alone", "cached"])
def test_a_layer_on_shards_equals_the_whole(case: Case, cached: bool) -> None:
    ranks(case.P).run(compare, case.but(cached=cached))
