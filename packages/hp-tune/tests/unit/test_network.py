"""Collective times follow the topology, not one bandwidth."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from hp_tune.clusters.cluster import Cluster, Curve, Number
from hp_tune.clusters.cluster_files import cluster_presets, read_cluster
from hp_tune.clusters.collective_times import CollectiveTimes
from hp_tune.clusters.network import Group, transfer

GB = 1e9


def group(size: int, stride: int = 1, world: int = 64) -> Group:
    """A group in a job of 64 ranks."""
    return Group(size, stride, world)


def rate(cluster: Cluster, kind: str, of: Group, sent: float = 4 * GB) -> float:
    """GB/s per rank that a large collective achieves."""
    return sent / GB / transfer(cluster, kind, of, sent).seconds


@pytest.mark.parametrize(("size", "measured"), [(2, 19), (4, 48), (8, 130)])
def test_full_mesh_bandwidth_grows_with_the_group(size: int, measured: float) -> None:
    """The published gathers on 2, 4 and 8 cards: a group of g has g - 1 links."""
    cluster = read_cluster("atlas-800t-a2")

    assert rate(cluster, "all_gather", group(size)) == pytest.approx(measured, rel=0.16)
    assert rate(cluster, "all_to_all", group(size)) == pytest.approx(measured, rel=0.16)


def test_swap_on_a_full_mesh_has_one_link() -> None:
    """Mirror ranks exchange over the single link between them."""
    cluster = read_cluster("atlas-800t-a2")

    assert rate(cluster, "p2p", group(8)) == pytest.approx(28 * 0.66, rel=0.01)


def test_switch_bandwidth_does_not_depend_on_the_group() -> None:
    """NVSwitch gives a pair what it gives eight."""
    cluster = read_cluster("hgx-h100")

    assert rate(cluster, "all_to_all", group(2)) == pytest.approx(308, rel=0.02)
    assert rate(cluster, "all_to_all", group(8)) == pytest.approx(308, rel=0.02)


@pytest.mark.parametrize(("mib", "GBps"), [(1, 59), (16, 194), (64, 265), (256, 308), (4096, 308)])
def test_measured_curve_is_met_at_its_points(mib: float, GBps: float) -> None:
    """Small messages never reach the peak; below the first point the time stays."""
    cluster, sent = read_cluster("hgx-h100"), mib * 2**20

    assert rate(cluster, "all_to_all", group(8), sent) == pytest.approx(GBps, rel=0.01)
    tiny = transfer(cluster, "all_to_all", group(8), 2**10).seconds
    assert tiny == pytest.approx(2**20 / 59e9, rel=0.01)


def test_two_tier_all_to_all_waits_for_the_slower_tier() -> None:
    """16 ranks on two nodes: 8 of 15 peers are across, one NIC per rank."""
    cluster, sent = read_cluster("atlas-800t-a2"), 15 * GB
    found = transfer(cluster, "all_to_all", group(16), sent)

    assert found.tier == "RoCE"
    assert found.tier_bytes == pytest.approx(8 * GB)
    assert found.seconds == pytest.approx(8 / (25 * 0.7), rel=0.01)


def test_two_tier_gather_crosses_once_and_spreads_inside() -> None:
    """(N - 1) s / B_nic + (g - 1) N s / B_in for N = 2 nodes of g = 8."""
    cluster, shard = read_cluster("atlas-800t-a2"), GB
    found = transfer(cluster, "all_gather", group(16), 15 * shard)

    assert found.seconds == pytest.approx(1 / 17.5 + 7 * 2 / (7 * 28 * 0.66), rel=0.01)


def test_stride_decides_who_shares_a_node() -> None:
    """With 8 TP ranks between them, CP neighbours never share an 8-card node."""
    cluster = read_cluster("atlas-800t-a2")

    assert transfer(cluster, "all_to_all", group(4, stride=2), GB).tier == "HCCS"
    assert transfer(cluster, "all_to_all", group(4, stride=8), GB).tier == "RoCE"
    assert transfer(cluster, "all_to_all", group(8, stride=4), GB).tier == "RoCE"


def test_shared_bus_is_shared_by_all_ranks_of_the_job() -> None:
    """Two groups of two get no more than one group of four."""
    cluster = read_cluster("cpu-gloo")

    assert rate(cluster, "all_to_all", group(2, world=4)) == pytest.approx(4 * 0.5 / 4, rel=0.01)
    assert rate(cluster, "all_to_all", group(4, world=4)) == pytest.approx(4 * 0.5 / 4, rel=0.01)


def test_group_of_one_takes_no_time() -> None:
    """Nothing to send, nothing to wait for."""
    assert transfer(read_cluster("cpu-gloo"), "all_gather", group(1), 0).seconds == 0


@pytest.mark.parametrize("name", sorted(cluster_presets()))
@pytest.mark.parametrize("kind", ["all_to_all", "all_gather", "reduce_scatter", "p2p"])
@pytest.mark.parametrize("size", [2, 4, 8, 16, 64])
def test_no_transfer_beats_the_peak_of_its_tier(name: str, kind: str, size: int) -> None:
    """Physical plausibility: bytes over time stay below the link's peak, and more takes longer."""
    cluster = read_cluster(name)
    times = []
    for sent in (1e3, 1e6, 1e8, 1e10):
        found = transfer(cluster, kind, group(size), sent)
        times.append(found.seconds)
        assert 0 < found.share_of_peak <= 1
        assert found.tier_bytes / found.seconds <= found.GBps * GB * 1.0001
    assert all(later >= 0.999999 * sooner for sooner, later in pairwise(times))


def with_tier(**fields: Any) -> Cluster:
    """The small cluster with one tier of another kind."""
    cluster = read_cluster("cpu-gloo")
    changes = {"GBps_of_bus": None, "efficiency": Number(value=1), "latency_us": Number(value=1)}
    tier = cluster.tiers[0].model_copy(update={**changes, **fields})
    return cluster.model_copy(update={"tiers": (tier,)})


def test_ring_carries_gathers_on_two_links_and_pays_hops_for_an_all_to_all() -> None:
    """8 ranks: 2 links for a gather; a byte of an all-to-all takes 16/7 hops on average."""
    cluster = with_tier(kind="ring", GBps_per_link=Number(value=10))

    assert rate(cluster, "all_gather", group(8)) == pytest.approx(20, rel=0.01)
    assert rate(cluster, "all_to_all", group(8)) == pytest.approx(20 / (16 / 7), rel=0.01)
    assert rate(cluster, "all_to_all", group(2)) == pytest.approx(10, rel=0.01)
    assert rate(cluster, "all_gather", group(4, stride=2)) == pytest.approx(10, rel=0.01)


def test_efficiency_may_depend_on_the_size() -> None:
    """Fractions between their points, and time that stays below the first one."""
    by_size = Curve(points=((1, 0.1), (100, 1.0)), source="measured", ref="x")
    cluster = with_tier(kind="switch", GBps_per_rank=Number(value=100), efficiency_by_size=by_size)

    assert transfer(cluster, "all_to_all", group(8), 10 * 2**20).GBps == pytest.approx(
        31.6, rel=0.01
    )
    assert rate(cluster, "all_to_all", group(8)) == pytest.approx(100, rel=0.01)
    found = transfer(cluster, "all_to_all", group(8), 2**20)
    assert found.share_of_peak == pytest.approx(0.1)
    assert "tiers.loopback.efficiency_by_size" in found.sources


def test_shared_nics_and_oversubscription_divide_and_are_named() -> None:
    """Both are numbers with a source of their own."""
    shared = with_tier(
        kind="switch", GBps_per_rank=Number(value=100), ranks_per_nic=Number(value=4),
        oversubscription=Number(value=2),
    )  # fmt: skip
    found = transfer(shared, "all_gather", group(8), GB)

    assert pytest.approx(12.5) == found.GBps
    assert {"tiers.loopback.ranks_per_nic", "tiers.loopback.oversubscription"} <= set(found.sources)


def test_ring_exchange_pays_latency_per_step_and_the_slowest_link() -> None:
    """Validation only: P - 1 sends of one shard, over one link of a full mesh."""
    cluster, shard = read_cluster("atlas-800t-a2"), 64e6
    found = transfer(cluster, "ring", group(8), 7 * shard)

    assert found.seconds == pytest.approx(7 * (20e-6 + shard / (28e9 * 0.66)), rel=1e-6)
    wide = transfer(cluster, "ring", group(16), 15 * shard)
    assert wide.tier == "RoCE"
    assert wide.seconds == pytest.approx(15 * (40e-6 + shard / 17.5e9), rel=1e-6)


def test_few_ranks_on_a_bus_get_more_each() -> None:
    """Measured on PCIe: 22, 4.6 and 2 GB/s per rank for 2, 4 and 8 ranks."""
    cluster = read_cluster("l20x8-pcie")

    for size, GBps in ((2, 22.3), (4, 4.6), (8, 2.0)):
        found = rate(cluster, "all_to_all", group(size, world=size))
        assert found == pytest.approx(GBps, rel=0.02)


def test_measured_times_of_a_shape_come_before_the_tiers() -> None:
    """Lines between the points; the same size at another stride is not that shape."""
    times = CollectiveTimes(
        kind="all_gather", size=8, stride=1, world_size=16, ref="by hand",
        points=((1.0, 2.0), (3.0, 6.0), (5.0, 16.0)),
    )  # fmt: skip
    plain = read_cluster("atlas-800t-a2")
    cluster = plain.model_copy(update={"collectives": (times,)})

    def ms(mib: float, of: Group) -> float:
        return transfer(cluster, "all_gather", of, mib * 2**20).seconds * 1e3

    assert [ms(mib, group(8)) for mib in (0.5, 1, 2, 4, 7)] == pytest.approx([2, 2, 4, 11, 26])
    found = transfer(cluster, "all_gather", group(8), 2**20)
    assert (found.sources, found.tier) == (("collectives.all_gather.8x1",), "HCCS")
    assert found.GBps == pytest.approx(2**20 / 2e-3 / 1e9)
    for other in (group(4, stride=2), group(4)):
        assert transfer(cluster, "all_gather", other, GB) == transfer(
            plain, "all_gather", other, GB
        )
    assert transfer(cluster, "all_to_all", group(8), GB) == transfer(
        plain, "all_to_all", group(8), GB
    )
