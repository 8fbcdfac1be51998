"""What a rank fetches from the ranks before it passes links, not a whole group."""

from __future__ import annotations

from typing import Any

import pytest

from hp_tune.clusters.cluster import Cluster
from hp_tune.clusters.cluster_files import read_cluster
from hp_tune.clusters.collective_times import CollectiveTimes
from hp_tune.clusters.neighbours import fetch
from hp_tune.clusters.network import Group

MB = 1e6


def cluster(*tiers: dict[str, Any], **fields: Any) -> Cluster:
    """A cluster of given tiers, each with a fourth of its bandwidth and 2 us."""
    described = [
        {
            "name": f"t{i}",
            "efficiency": {"value": 0.25, "source": "assumed", "ref": "test"},
            "latency_us": {"value": 2.0, "source": "assumed", "ref": "test"},
            **tier,
        }
        for i, tier in enumerate(tiers)
    ]
    base = read_cluster("hgx-h100").model_dump(mode="json")
    return Cluster.model_validate({**base, "tiers": described, **fields})


def GBps(value: float) -> dict[str, Any]:
    """A bandwidth that somebody made up."""
    return {"value": value, "source": "assumed", "ref": "test"}


SWITCH = {"kind": "switch", "GBps_per_rank": GBps(40.0)}
MESH = {"kind": "full_mesh", "GBps_per_link": GBps(40.0)}
RING = {"kind": "ring", "GBps_per_link": GBps(40.0)}
BUS = {"kind": "shared_bus", "GBps_of_bus": GBps(40.0)}


@pytest.mark.parametrize(
    ("tier", "passed"),
    [
        (SWITCH, 3 + 2 + 1),  # one port
        (MESH, 3),  # a link per peer: the largest message
        (RING, 3 * 1 + 2 * 2 + 1 * 3),  # each link on the way
        (BUS, (3 + 2 + 1) * 4),  # four ranks of the job at the same time
    ],
    ids=["switch", "full_mesh", "ring", "shared_bus"],
)
def test_messages_pass_what_the_topology_has(tier: dict[str, Any], passed: float) -> None:
    """3, 2 and 1 MB from the three ranks before; the bandwidth is 10 GB/s, the start 2 us."""
    found = fetch(cluster(tier), Group(4, 1, 4), [3 * MB, 2 * MB, 1 * MB])

    assert found.seconds == pytest.approx(2e-6 + passed * MB / 10e9)


def test_the_first_rank_of_a_node_has_all_of_its_rows_from_another() -> None:
    """The slower of the two tiers counts, not their sum; a group inside a node meets one."""
    slow = {"kind": "switch", "GBps_per_rank": GBps(4.0)}
    two = cluster({**SWITCH, "size": 4}, slow)

    assert fetch(two, Group(8, 1, 8), [5 * MB]).seconds == pytest.approx(2e-6 + 5e6 / 1e9)
    assert fetch(two, Group(4, 1, 8), [5 * MB]).seconds == pytest.approx(2e-6 + 5e6 / 10e9)
    # ranks four apart have no neighbour in their node
    assert fetch(two, Group(2, 4, 8), [5 * MB]).tier == "t1"
    fast = cluster({**slow, "size": 4}, SWITCH)
    assert fetch(fast, Group(8, 1, 8), [5 * MB]).tier == "t0"


def test_a_measured_swap_comes_first_and_nothing_takes_no_time() -> None:
    """Of a group of this shape only."""
    times = CollectiveTimes(
        kind="p2p", size=4, stride=1, world_size=4, points=((1.0, 3.0), (2.0, 5.0)), ref="test"
    )
    measured = cluster(SWITCH, collectives=[times.model_dump(mode="json")])

    found = fetch(measured, Group(4, 1, 4), [2**20, 2**19])
    assert found.seconds == pytest.approx(4e-3)
    assert found.sources == ("collectives.p2p.4x1",)
    assert fetch(measured, Group(2, 1, 4), [2**20]).sources == (
        "tiers.t0.GBps_per_rank", "tiers.t0.efficiency", "tiers.t0.latency_us",
    )  # fmt: skip
    assert fetch(measured, Group(4, 1, 4), []).seconds == 0.0
    assert fetch(measured, Group(1, 1, 4), [2**20]).seconds == 0.0
