"""``hp-tune import``: logs of nccl-tests and hccl_test become cluster files.

The logs beside this file follow ``time = start + bytes that leave a rank / bandwidth``:

==========================  =====================  =====  ========  ==========
log                         collective             ranks  start us  GB/s
==========================  =====================  =====  ========  ==========
alltoall_8.txt              all-to-all             8      20        300
all_gather_8.txt            all-gather             8      18        330
reduce_scatter_perf_16.txt  reduce-scatter         2 x 8  40        150
hccl_alltoall.txt           all-to-all             8      30        110
all_gather_old.txt          all-gather             8      25        120
reduce_scatter_test.txt     reduce-scatter         2 x 8  60        20
==========================  =====================  =====  ========  ==========
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hp_tune.cli import main
from hp_tune.clusters.cluster_files import read_cluster
from hp_tune.clusters.network import Group, transfer
from hp_tune.errors import UsageError
from hp_tune.importing.overlay import read_log, times_of_log

LOGS = Path(__file__).parent / "logs"
MIB = 2**20


@pytest.mark.parametrize(
    ("name", "given", "tool", "kind", "ranks", "nodes", "start_us", "GBps"),
    [
        ("alltoall_8.txt", {}, "nccl-tests", "all_to_all", 8, 1, 20, 300),
        ("alltoall_8.txt", {"in_place": True}, "nccl-tests", "all_to_all", 8, 1, 20.6, 300 / 1.03),
        ("all_gather_8.txt", {}, "nccl-tests", "all_gather", 8, 1, 18, 330),
        ("reduce_scatter_perf_16.txt", {}, "nccl-tests", "reduce_scatter", 16, 2, 40, 150),
        ("hccl_alltoall.txt", {}, "hccl_test", "all_to_all", 8, 1, 30, 110),
        ("all_gather_old.txt", {"num_ranks": 8}, "hccl_test", "all_gather", 8, 1, 25, 120),
        ("reduce_scatter_test.txt", {}, "hccl_test", "reduce_scatter", 16, 2, 60, 20),
    ],
)
def test_a_log_says_what_was_measured(
    name: str, given: dict[str, Any], tool: str, kind: str, ranks: int, nodes: int,
    start_us: float, GBps: float,
) -> None:  # fmt: skip
    """Kind, ranks, nodes, and times by what leaves a rank, whatever the log's size means."""
    log = read_log(LOGS / name, **given)
    times = times_of_log(log, 1)

    assert (log.tool, log.kind, log.num_ranks, log.num_nodes) == (tool, kind, ranks, nodes)
    assert len(times.points) == 6
    for mib, ms in times.points:
        assert ms == pytest.approx((start_us + mib * MIB / GBps / 1e3) / 1e3, rel=0.005)
    sent = [round(mib * MIB) for mib, _ in times.points]
    whole = [65536 * 4**power for power in range(6)]
    assert sent == pytest.approx([size * (ranks - 1) / ranks for size in whole], rel=1e-4)


def test_a_swap_sends_its_whole_size() -> None:
    """sendrecv_perf keeps nothing back; N/A for wrong elements is no error."""
    log = read_log(LOGS / "sendrecv_2_nodes.txt")

    assert (log.kind, log.num_ranks, log.num_nodes) == ("p2p", 2, 2)
    assert log.device == "NVIDIA H100 80GB HBM3"
    assert times_of_log(log, 8).points[0][0] == 65536 / MIB


def run(*words: str) -> object:
    """Return the exit code of ``hp-tune import``."""
    with pytest.raises(SystemExit) as ended:
        main(["import", *words])
    return ended.value.code


def test_several_logs_become_one_description(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The base with measured curves and shapes; groups of other sizes go by the tier's curve."""
    out = tmp_path / "ours.yaml"
    names = ("alltoall_8.txt", "all_gather_8.txt", "reduce_scatter_perf_16.txt")
    logs = [str(LOGS / name) for name in names]

    assert run(*logs, "--cluster", "hgx-h100", "--out", str(out), "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert [log["kind"] for log in printed["found"]["logs"]] == [
        "all_to_all", "all_gather", "reduce_scatter",
    ]  # fmt: skip
    base, cluster = read_cluster("hgx-h100"), read_cluster(out)
    assert cluster.name == "hgx-h100-imported"
    assert cluster.device == base.device
    assert cluster.tiers[1] == base.tiers[1]
    assert cluster.tiers[0].latency_us.source == "measured"
    known = transfer(cluster, "all_to_all", Group(8, 1, 8), 56 * MIB)
    assert known.seconds == pytest.approx(20e-6 + 56 * MIB / 300e9, rel=0.01)
    assert known.sources == ("collectives.all_to_all.8x1",)
    across = transfer(cluster, "reduce_scatter", Group(16, 1, 16), 60 * MIB)
    assert across.seconds == pytest.approx(40e-6 + 60 * MIB / 150e9, rel=0.01)
    smaller = transfer(cluster, "all_to_all", Group(4, 1, 4), 50 * MIB)
    assert smaller.sources[0] == f"tiers.{base.tiers[0].name}.all_to_all"
    # above the last point the curve's last bandwidth stays, start included
    assert smaller.seconds == pytest.approx(50 * MIB / 300e9, rel=0.15)


def test_logs_of_another_make_and_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """hccl_test on the Atlas preset, ranks given where the log has none."""
    monkeypatch.chdir(tmp_path)
    logs = [str(LOGS / name) for name in ("hccl_alltoall.txt", "all_gather_old.txt")]

    assert run(*logs, "--cluster", "atlas-800t-a2", "--ranks", "8", "--name", "pod") == 0
    text = capsys.readouterr().out
    assert "all_to_all" in text and "wrote pod.yaml" in text
    cluster = read_cluster("pod.yaml")
    found = transfer(cluster, "all_gather", Group(8, 1, 8), 56 * MIB)
    assert found.seconds == pytest.approx(25e-6 + 56 * MIB / 120e9, rel=0.01)


def edited(tmp_path: Path, name: str, old: str, new: str) -> Path:
    """A copy of a log with the first ``old`` replaced."""
    text = (LOGS / name).read_text()
    assert old in text
    path = tmp_path / name
    path.write_text(text.replace(old, new, 1))
    return path


@pytest.mark.parametrize(
    ("name", "old", "new", "text"),
    [
        ("alltoall_8.txt", " 23.06", "", r"alltoall_8.txt:20: a row must have 13 columns and has"),
        ("alltoall_8.txt", "    0    ", "    3    ", r":\d+: 3 elements are wrong"),
        ("alltoall_8.txt", " 20.19", " 0.02019", r":\d+: algbw \(3.25\) must be size / time"),
        ("alltoall_8.txt", "alltoall_perf", "all_reduce_perf", r":2: all_reduce is no collective"),
        ("alltoall_8.txt", "#       size         count", "# nothing", r":\d+: there is no table"),
        ("hccl_alltoall.txt", "success", "failed", r"hccl_alltoall.txt:4: check_result is failed"),
        ("hccl_alltoall.txt", "alltoall_test", "all_reduce_test", r":1: all_reduce is no"),
        ("hccl_alltoall.txt", "success", "", r":4: a row must have 4 columns and has 3"),
        ("hccl_alltoall.txt", "38.34", "0.038", r"alg_bandwidth .* must be data_size / aveg_time"),
    ],
)
def test_a_broken_log_is_refused_where_it_breaks(
    tmp_path: Path, name: str, old: str, new: str, text: str
) -> None:
    """file:line, what is wrong, and never a number from it."""
    with pytest.raises(UsageError, match=text):
        read_log(edited(tmp_path, name, old, new))


def test_what_a_log_does_not_say_must_be_given(tmp_path: Path) -> None:
    """Ranks of hccl_test, the kind of a log without a program; logs that contradict the base."""
    old = LOGS / "all_gather_old.txt"
    with pytest.raises(UsageError, match=r"all_gather_old.txt:.*ranks"):
        read_log(old)
    nameless = tmp_path / "run7.txt"
    nameless.write_text(old.read_text())
    with pytest.raises(UsageError, match=r"run7.txt:1: .*which collective; *|--kind"):
        read_log(nameless, num_ranks=8)
    assert read_log(nameless, num_ranks=8, kind="all_gather").kind == "all_gather"
    with pytest.raises(UsageError, match=r"ranks \(8\) must be .* divisible by nodes \(3\)"):
        read_log(old, num_ranks=8, num_nodes=3)


def test_two_logs_of_one_thing_and_a_node_too_small_exit_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written; the message says which file."""
    log, out = str(LOGS / "alltoall_8.txt"), str(tmp_path / "x.yaml")

    assert run(log, log, "--cluster", "hgx-h100", "--out", out) == 2
    assert "was imported already" in capsys.readouterr().err
    wide = edited(tmp_path, "reduce_scatter_perf_16.txt", "x", "x")
    wide.write_text(wide.read_text().replace("gpu-b", "gpu-a"))
    assert run(str(wide), "--cluster", "hgx-h100", "--out", out) == 2
    assert "16 ranks on one node must be at most 8" in capsys.readouterr().err
    assert run(str(tmp_path / "none.txt"), "--cluster", "hgx-h100", "--out", out) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert not Path(out).exists()
