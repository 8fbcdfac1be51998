"""``hp-tune profile``: which groups are measured, and what description comes of it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hp_cp.plan import make_plan
from hp_mesh.checks import divisors
from hp_tune.clusters.cluster import Cluster
from hp_tune.clusters.cluster_files import read_cluster
from hp_tune.clusters.network import Group, transfer
from hp_tune.cost.predict import predict
from hp_tune.errors import UsageError
from hp_tune.models.hf_config import read_model
from hp_tune.profile.fitting import fit
from hp_tune.profile.overlay import describe
from hp_tune.profile.running import profile
from hp_tune.profile.shapes import Shape, cp_shapes, groups_of, message_sizes
from hp_tune.profile.smooth import ascending
from hp_tune.profile.writing import write_cluster
from hp_tune.searching.space import enumerate_space
from hp_tune.torchrun import Launcher
from hp_tune.workload import Config, Workload

from ._profiled import (
    BACKWARD,
    EFFICIENCY,
    EXCHANGE_MS,
    GBPS,
    LAYER_MS,
    PEAK,
    SATURATION,
    START_MS,
    TENSOR_MS,
    TILE,
    answer,
)

MIB = 2**20


@pytest.mark.parametrize(("world", "nproc"), [(4, 2), (6, 2), (8, 4), (4, 4), (2, 1)])
def test_every_group_of_every_valid_configuration_is_measured(world: int, nproc: int) -> None:
    """Each collective that a plan describes has its shape, whose groups are the plan's."""
    shapes = cp_shapes(world, nproc)
    for u in divisors(world):
        for balance in (False, True) if u < world else (False,):
            plan = make_plan(world, u, balance and u == 1, balance_hybrid=balance and u > 1)
            described = plan.describe(num_heads=24, num_kv_heads=24, seq_len=480, head_size=8)
            for row in described.collectives:
                first = described.groups[row.axis]
                shape = Shape(row.kind, len(first), first[1] - first[0])  # type: ignore[arg-type]
                assert shape in shapes, row
                assert list(first) == groups_of(shape, world)[0]


@pytest.mark.parametrize(("size", "stride", "world"), [(2, 1, 8), (2, 4, 8), (4, 2, 8), (3, 2, 12)])
def test_groups_of_a_shape_hold_each_rank_once(size: int, stride: int, world: int) -> None:
    """All groups together are all ranks, members ``stride`` apart."""
    groups = groups_of(Shape("all_to_all", size, stride), world)

    assert sorted(rank for group in groups for rank in group) == list(range(world))
    for group in groups:
        assert [b - a for a, b in pairwise(group)] == [stride] * (size - 1)


def test_sizes_end_with_the_largest() -> None:
    """Four times each, and the last as asked."""
    assert message_sizes(4096, 100_000) == [4096, 16384, 65536, 100_000]
    assert message_sizes(4096, 4096) == [4096]


@settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.floats(0.01, 1e4), min_size=1, max_size=12))
def test_smoothed_times_ascend_and_keep_what_already_does(times: list[float]) -> None:
    """Ascending values come out as they are; others between the values that they replace."""
    found = ascending(times)

    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(found))
    assert min(times) * (1 - 1e-9) <= found[0] and found[-1] <= max(times) * (1 + 1e-9)
    assert ascending(sorted(times)) == pytest.approx(sorted(times))


def test_neighbours_in_the_wrong_order_meet_in_the_middle() -> None:
    """The geometric mean, for times are compared as ratios."""
    assert ascending([1.0, 8.0, 2.0, 10.0]) == pytest.approx([1.0, 4.0, 4.0, 10.0])


@pytest.fixture
def found(tmp_path: Path) -> Cluster:
    """The description of four ranks on two hosts that share two cores, read back."""
    content = describe(answer(), name="two", base=None, known=None)
    return write_cluster(content, tmp_path / "two.yaml", heading="by a test")


def test_a_whole_description_gives_the_numbers_back(found: Cluster, tmp_path: Path) -> None:
    """Rates are those of a rank alone on a core; every number is measured and has a reference."""
    device = found.device

    assert (tmp_path / "two.yaml").read_text().startswith("# by a test\nname: two\n")
    assert (found.shared_cores, found.shared_by) == (2, None)
    assert device.peak_TFLOPS["fp32"].value == pytest.approx(PEAK / 1e12)
    assert device.gemm_efficiency.value == pytest.approx(0.8)
    assert device.attention_efficiency.value == pytest.approx(EFFICIENCY, rel=0.01)
    assert device.attention_saturation.value == pytest.approx(SATURATION, rel=0.01)
    assert device.attention_backward is not None
    assert device.attention_backward.value == pytest.approx(BACKWARD)
    assert device.attention_tile is not None
    assert device.attention_tile.value == TILE
    assert device.memory_GBps.value == pytest.approx(8)
    assert device.memory_efficiency.value == pytest.approx(0.25)
    assert device.launch_us.value == pytest.approx(10)
    assert device.overlap_slowdown.value == pytest.approx(0.3)
    host = (device.host_layer_us, device.host_exchange_us, device.host_tensor_us)
    assert [number.value / 1e3 for number in host if number] == pytest.approx(
        [LAYER_MS, EXCHANGE_MS, TENSOR_MS]
    )
    assert device.gemm_efficiency.source == "measured"
    assert "2 x 2 ranks" in device.gemm_efficiency.ref
    assert [(tier.name, tier.size) for tier in found.tiers] == [("host", 2), ("network", None)]


@pytest.mark.parametrize("kind", ["all_to_all", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize(("size", "stride"), [(4, 1), (2, 2), (2, 1)])
def test_measured_shapes_are_predicted_as_they_were_measured(
    found: Cluster, kind: str, size: int, stride: int
) -> None:
    """Start-up and bandwidth, between the sizes and above them."""
    for sent in (4096, 3 * MIB, 40 * MIB):
        got = transfer(found, kind, Group(size, stride, 4), sent).seconds * 1e3
        assert got == pytest.approx(START_MS + sent / GBPS / 1e6, rel=0.01)


def test_predictions_on_the_description_rest_on_measured_numbers(found: Cluster) -> None:
    """All terms of a search on it, collectives included; kernels beside these lose their cores."""
    model, job = read_model("Llama-3.1-8B"), Workload(seq_len=4096, cp_size=4, dtype="fp32")
    for config in enumerate_space(4, overlap=True)[0]:
        prediction = predict(model, found, job, config)
        assert {term.source for term in prediction.terms} == {"measured"}
    busy = transfer(found, "all_to_all", Group(4, 1, 4), MIB)
    assert (busy.cpu, busy.sources) == (0.25, ("collectives.all_to_all.4x1",))


def test_hosts_of_their_own_share_their_own_cores(tmp_path: Path) -> None:
    """Ranks on two machines: each host's share its cores; rates are those of one core anyway."""
    content = describe(answer(places="aabb", cores=1), name="two", base=None, known=None)
    cluster = write_cluster(content, tmp_path / "c.yaml", heading="x")

    assert (cluster.shared_cores, cluster.shared_by) == (1, 2)
    assert cluster.device.peak_TFLOPS["fp32"].value == pytest.approx(PEAK / 1e12)


def test_an_overlay_keeps_the_vendors_peaks_and_names(tmp_path: Path) -> None:
    """What was measured is a part of the peak; tiers are the base's, with curves."""
    base = read_cluster("hgx-h100")
    slow = answer(world=16, nproc=8, cores=None, places="a" * 8 + "b" * 8, dtype="bf16")
    for row in slow["compute"]["rows"]:
        row["ms"] /= 4000  # as an accelerator
    content = describe(slow, name="ours", base="hgx-h100", known=base)
    cluster = write_cluster(content, tmp_path / "ours.yaml", heading="x")

    assert (cluster.name, cluster.shared_cores) == ("ours", None)
    assert cluster.device.peak_TFLOPS == base.device.peak_TFLOPS
    assert cluster.device.memory_GBps == base.device.memory_GBps
    assert cluster.device.gemm_efficiency.value == pytest.approx(0.8 * 400 / 989, rel=0.01)
    assert [tier.name for tier in cluster.tiers] == [tier.name for tier in base.tiers]
    assert cluster.tiers[0].bandwidth == base.tiers[0].bandwidth
    assert cluster.tiers[0].all_to_all is not None
    assert cluster.tiers[0].all_to_all.source == "measured"
    again = tmp_path / "again.yaml"
    again.write_text("extends: ours.yaml\nname: again\n")
    assert read_cluster(again).device == cluster.device, "a file can be extended, too"
    again.write_text("extends: again.yaml\nname: again\n")
    with pytest.raises(UsageError, match="must not come back to the file itself"):
        read_cluster(again)


def test_the_host_is_paid_for_by_collectives_and_tensors_at_boundaries(found: Cluster) -> None:
    """Four ranks on two cores: twice the processor time; nothing on a device that has a host."""
    model, job = read_model("Llama-3.1-8B"), Workload(seq_len=4096, cp_size=4, dtype="fp32")
    layers = len(model.layers)

    def ms(cluster: Cluster, **config: Any) -> list[float]:
        terms = predict(model, cluster, job, Config(**config)).terms
        return [term.exposed * 1e3 / layers for term in terms if term.name.startswith("host")]

    once = LAYER_MS / 2 + 2 * EXCHANGE_MS + 4 * TENSOR_MS
    assert ms(found, ulysses_degree=4) == pytest.approx([2 * once, 2 * once])
    ahead = LAYER_MS / 2 + 4 * EXCHANGE_MS + 7 * TENSOR_MS
    assert ms(found, ulysses_degree=4, overlap=True) == pytest.approx([2 * ahead, 2 * ahead])
    assert ms(read_cluster("cpu-gloo"), ulysses_degree=4) == []


def test_fitted_factors_are_never_negative() -> None:
    """Exact where that is possible; a column that would need a negative factor is left out."""
    rows = [(1.0, 4.0, 8.0), (1.0, 8.0, 8.0), (1.0, 8.0, 14.0), (1.0, 4.0, 16.0)]
    exact = [2 + 3 * b + 0.5 * c for _, b, c in rows]

    assert fit(rows, exact) == pytest.approx([2, 3, 0.5])
    found = fit(rows, [10 - 0.1 * b + 0.5 * c for _, b, c in rows])
    assert min(found) == 0 and found[1] == 0
    assert fit(rows, [0.0] * 4) == [0, 0, 0]


def test_what_is_not_plausible_is_not_written(tmp_path: Path) -> None:
    """A peak that is 50 times the device's; the file that was there stays."""
    out = tmp_path / "ours.yaml"
    out.write_text("before")
    fast = answer(device="NVIDIA H100", dtype="bf16")
    content = describe(fast, name="ours", base=None, known=None)

    with pytest.raises(UsageError, match=r"not plausible: .*ours.yaml.*TFLOPS.bf16 .0.1. must be"):
        write_cluster(content, out, heading="x")
    assert out.read_text() == "before"
    assert list(tmp_path.iterdir()) == [out], "nothing else is left"


def test_one_rank_has_no_network(tmp_path: Path) -> None:
    """Refused before anything is started, with the way out."""
    with pytest.raises(UsageError, match=r"nproc_per_node \(1\) must be at least 2"):
        profile(Launcher("cpu-gloo", 1), tmp_path / "x.yaml", name="x")
