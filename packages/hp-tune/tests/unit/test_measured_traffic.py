"""What a trial holds its traffic to: the plan's description of the very style that runs."""

from __future__ import annotations

from typing import Any

import pytest

from hp_cp.plan import make_plan
from hp_tune.measured.layers import expected_traffic
from hp_tune.measured.request import JobRequest, LayerShape, NamedStyle, StyleCall

SHAPE = LayerShape("full", 3, num_heads=8, num_kv_heads=4, head_size=6, v_head_size=5)
SIZES: dict[str, Any] = {"seq_len": 48, "batch": 2, "element_size": 8, "rank": 1}


def request(*, recompute: bool) -> JobRequest:
    """Return a request on 4 ranks."""
    return JobRequest(20, (SHAPE,), (), 48, 4, 1, 2, "fp64", "BSHD", True, recompute)


@pytest.mark.parametrize(
    "options",
    [{}, {"keep_kv": False}, {"kv_chunks": 2}, {"balance_hybrid": True}],
    ids=str,
)
def test_every_option_of_a_style_is_described(options: dict[str, Any]) -> None:
    """One that were left out would make a trial of it inactive."""
    degree = 2
    style = StyleCall("x", NamedStyle("", {"ulysses_degree": degree, **options}), {})
    balance = {key: options[key] for key in ("balance_hybrid",) if key in options}
    others = {key: value for key, value in options.items() if key not in balance}
    described = make_plan(4, degree, **balance).describe(
        num_heads=8, num_kv_heads=4, head_size=6, v_head_size=5, **SIZES, **others
    )
    found = expected_traffic(SHAPE, request(recompute=False), style, **SIZES)
    assert found == described.totals()
    assert {"all_to_all", "all_gather", "reduce_scatter"} <= set(found)


def test_recomputation_sends_forward_twice_and_gathers_nothing_again() -> None:
    """Backward runs forward once more; ``keep_kv=False`` has nothing left to do."""
    described = make_plan(4, 1).describe(
        num_heads=8, num_kv_heads=4, head_size=6, v_head_size=5, **SIZES
    )
    for keep in (True, False):
        kwargs = {"ulysses_degree": 1, "keep_kv": keep}
        style = StyleCall("x", NamedStyle("", kwargs), {})
        found = expected_traffic(SHAPE, request(recompute=True), style, **SIZES)
        calls, sent = described.totals()["all_gather"]
        assert found["all_gather"] == (2 * calls, 2 * sent)
        assert found["reduce_scatter"] == described.totals()["reduce_scatter"]
