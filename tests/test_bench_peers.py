"""The parts of the peers benchmark that need neither ranks nor peers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = str(Path(__file__).resolve().parent.parent / "benchmarks")


@pytest.fixture(scope="module")
def peers() -> Iterator[dict[str, ModuleType]]:
    import importlib

    sys.path.insert(0, BENCHMARKS)
    try:
        names = ("cases", "formulas", "stats", "verdict")
        yield {name: importlib.import_module(f"peers.{name}") for name in names}
    finally:
        sys.path.remove(BENCHMARKS)


OURS = "ours: Ulysses, local tensors"


def row(case: str = "S8192-H8:8", impl: str = OURS, **changes: Any) -> dict[str, Any]:
    wall = changes.pop("wall", 100.0)
    ratio = {"median": wall / 100, "low": wall / 101, "high": wall / 99}
    ours = impl.startswith("ours")
    right = {
        "case": case,
        "seq": 8192,
        "causal": True,
        "impl": impl,
        "ours": ours,
        "limit": impl.startswith("limit"),
        "mode": "ulysses" if ours else None,
        "status": "ok",
        "reason": "",
        "collectives_forward": 2,
        "collectives_backward": 2,
        "bytes_ratio_forward": 1.0,
        "bytes_ratio_backward": 1.0,
        "ms": {"p50": wall},
        "walls_ms": [wall, wall * 1.01, wall * 0.99],
        "to_oracle": ratio,
        "to_floor": ratio,
        "cpu_max_over_mean": 1.05,
    }
    return {**right, **changes}


def answers(peers: dict[str, ModuleType], *rows: dict[str, Any]) -> list[bool | None]:
    return [verdict.passed for verdict in peers["verdict"].verdicts(rows)]


@pytest.mark.parametrize(
    ("kv_heads", "forward"),
    [(8, 6.0), (2, 4.5), (1, 4.5)],
    ids=["8:8", "8:2", "8:1"],
)
def test_ulysses_sends_what_was_measured_of_other_libraries(
    peers: dict[str, ModuleType], kv_heads: int, forward: float
) -> None:
    """4 ranks, S 4096, fp32: 6 MiB with 8 KV heads; KV heads fewer than ranks go to all of them."""
    case = peers["cases"].Case(4096, 8, kv_heads, True)

    assert peers["formulas"].bytes_each_way("ulysses", case) == forward * 2**20


def test_a_gather_sends_kv_only_and_the_balance_half_of_q_and_o(
    peers: dict[str, ModuleType],
) -> None:
    case = peers["cases"].Case(4096, 8, 2, True)
    send = peers["formulas"].bytes_each_way

    assert send("colossal", case) == 3 * 2**20
    assert send("colossal balanced", case) - send("colossal", case) == case.head_bytes * 8 / 4


def test_the_hybrid_of_all_ranks_or_one_is_ulysses_or_colossal(
    peers: dict[str, ModuleType],
) -> None:
    case, formulas = peers["cases"].Case(2048, 8, 8, False), peers["formulas"]

    assert formulas.hybrid(case, 4) == case.head_bytes * (2 * 8 + 2 * 8) * 3 / 16
    assert formulas.hybrid(case, 1) == case.head_bytes * 2 * 8 * 3 / 4
    assert formulas.hybrid(case, 4) < formulas.hybrid(case, 2) < formulas.hybrid(case, 1)


def test_the_wire_holds_the_bytes_of_the_formula_and_the_own_share(
    peers: dict[str, ModuleType],
) -> None:
    for kv_heads in (8, 2, 1):
        case = peers["cases"].Case(2048, 8, kv_heads, True)
        elements = sum(peers["formulas"].exchange_elements(case))

        assert 4 * elements * 3 / 4 == peers["formulas"].bytes_each_way("ulysses", case)


def test_each_round_has_an_order_of_its_own_and_nobody_a_fixed_neighbour(
    peers: dict[str, ModuleType],
) -> None:
    shuffled = peers["cases"].shuffled

    orders = [shuffled("abcdef", seed) for seed in range(30)]
    assert all(sorted(order) == list("abcdef") for order in orders)
    assert orders == [shuffled("abcdef", seed) for seed in range(30)], "the same on every rank"
    before_f = {order[order.index("f") - 1] for order in orders if order[0] != "f"}
    assert before_f == set("abcde")
    assert shuffled([], 1) == []


def test_the_interval_of_a_median_holds_it_and_is_the_same_each_time(
    peers: dict[str, ModuleType],
) -> None:
    values = [1.0, 1.1, 1.05, 1.2, 3.0, 1.07, 1.02]

    found = peers["stats"].interval(values)

    assert found.low <= found.median == 1.07 <= found.high < 3.0
    assert found == peers["stats"].interval(values)
    assert peers["stats"].interval([2.0]).as_dict() == {"median": 2.0, "low": 2.0, "high": 2.0}


def test_imbalance_is_the_largest_rank_over_the_mean(peers: dict[str, ModuleType]) -> None:
    assert peers["stats"].imbalance([[1.0, 2.0], [1.0, 2.0], [2.0, 4.0], [0.0, 0.0]]) == 2.0


def test_a_run_that_meets_every_target_passes_every_verdict(peers: dict[str, ModuleType]) -> None:
    rows = [
        row(wall=102.0),
        row(impl="ours: Colossal, balanced", mode="colossal balanced", wall=103.0),
        row(impl="verl ulysses", wall=113.0),
    ]

    assert answers(peers, *rows) == [True, True, None, *[True] * 5]
    assert peers["verdict"].failures_of_ours(rows) == []


@pytest.mark.parametrize(
    ("position", "rows"),
    [
        (0, [row(wall=104.0)]),
        (1, [row(wall=106.0)]),
        (3, [row(wall=102.0), row(impl="verl ulysses", wall=101.0)]),
        (4, [row(wall=102.0), row(impl="verl ulysses", wall=101.0)]),
        (5, [row(bytes_ratio_backward=1.33)]),
        (6, [row(collectives_backward=4)]),
        (7, [row(mode="colossal balanced", cpu_max_over_mean=1.2)]),
    ],
    ids=["floor", "oracle", "peers", "fastest", "bytes", "collectives", "balance"],
)
def test_each_target_can_be_missed(
    peers: dict[str, ModuleType], position: int, rows: list[dict[str, Any]]
) -> None:
    assert answers(peers, *rows)[position] is False


def test_a_faster_mode_of_ours_may_answer_a_peer(peers: dict[str, ModuleType]) -> None:
    rows = [
        row(wall=102.0),
        row(impl="ours: Colossal", mode="colossal", wall=98.0),
        row(impl="torch ring template", wall=101.0),
    ]

    assert answers(peers, *rows)[3:5] == [False, True]


def test_targets_without_rows_are_open_and_peers_of_other_cases_do_not_count(
    peers: dict[str, ModuleType],
) -> None:
    assert answers(peers) == [None] * 8
    assert answers(peers, row(), row(case="S2048", impl="verl ulysses", wall=50.0))[3] is None


def test_what_none_can_beat_is_no_peer_and_the_distance_to_it_is_told(
    peers: dict[str, ModuleType],
) -> None:
    found = peers["verdict"].verdicts([row(wall=102.0), row(impl="limit: by hand", wall=100.0)])

    assert [found[2].passed, found[3].passed] == [None, None]
    assert found[2].figure.startswith("1.020 [")


def test_only_our_failures_are_failures(peers: dict[str, ModuleType]) -> None:
    rows = [
        row(impl="ring-flash-attn", status="wrong", reason="dQ off by 1"),
        row(impl="ours: Colossal", status="raises", reason="ValueError: no"),
        row(bytes_ratio_forward=1.5),
    ]

    found = peers["verdict"].failures_of_ours(rows)

    assert found == [
        "S8192-H8:8 ours: Colossal: raises, ValueError: no",
        "S8192-H8:8 ours: Ulysses, local tensors: sends 1.5000 of the formula's bytes",
    ]
