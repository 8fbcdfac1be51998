"""The schedule of two resources: what runs when, and what the step waits for."""

from __future__ import annotations

import pytest

from hp_tune.cost.schedule import Slot, Task, schedule


def length(slots: list[Slot]) -> float:
    """End of the last task."""
    return max(slot.end for slot in slots)


def test_a_chain_is_a_sum() -> None:
    """Nothing overlaps what waits for everything before it."""
    slots = schedule(
        [
            Task("a", "compute", 1.0),
            Task("b", "network", 2.0, ("a",)),
            Task("c", "compute", 3.0, ("b",)),
        ],
        slowdown=0.5,
    )

    assert [(s.start, s.end, s.exposed) for s in slots] == [(0, 1, 1), (1, 3, 2), (3, 6, 3)]


@pytest.mark.parametrize("slowdown", [0.0, 0.25])
def test_exchanges_behind_projections_follow_the_recurrence(slowdown: float) -> None:
    """C_i = C_{i-1} + t_i, K_i = max(C_i, K_{i-1}) + m_i; exposed is what is left of K_3."""
    gemms, sends = (2.0, 1.0, 1.0), (1.5, 1.0, 2.0)
    tasks: list[Task] = []
    for i, (t, m) in enumerate(zip(gemms, sends, strict=True)):
        tasks += [Task(f"p{i}", "compute", t), Task(f"m{i}", "network", m, (f"p{i}",))]
    slots = schedule(tasks, slowdown)

    if slowdown == 0.0:
        compute = network = 0.0
        for t, m in zip(gemms, sends, strict=True):
            compute += t
            network = max(compute, network) + m
        assert length(slots) == pytest.approx(max(compute, network))
    exposed = {slot.key: slot.exposed for slot in slots}
    assert sum(exposed.values()) == pytest.approx(length(slots))
    for i, t in enumerate(gemms):  # a kernel adds what it takes alone
        assert exposed[f"p{i}"] == pytest.approx(t)


def test_the_price_of_overlap_is_charged_to_the_collective() -> None:
    """A kernel of 1 s beside a send of 4 s at 50 % slowdown ends after 1.5 s."""
    kernel, send = schedule([Task("k", "compute", 1.0), Task("s", "network", 4.0)], slowdown=0.5)

    assert (kernel.end, send.end) == (1.5, 4.0)
    assert [kernel.exposed, send.exposed] == pytest.approx([1.0, 3.0])


def test_each_resource_runs_in_the_given_order() -> None:
    """A later task does not pass an earlier one that still waits."""
    tasks = [
        Task("long", "compute", 5.0),
        Task("first", "network", 1.0, ("long",)),
        Task("second", "network", 1.0),
    ]
    starts = {slot.key: slot.start for slot in schedule(tasks)}

    assert starts == {"long": 0.0, "first": 5.0, "second": 6.0}


def test_a_task_that_needs_a_later_one_is_our_own_mistake() -> None:
    """Found at once, not by hanging."""
    with pytest.raises(AssertionError, match="depends on a later one"):
        schedule([Task("a", "compute", 1.0, ("b",)), Task("b", "compute", 1.0)])
