"""``hp-tune profile`` on two gloo ranks of this machine, tiny."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hp_tune.cli import main
from hp_tune.clusters.cluster_files import read_cluster
from hp_tune.commands.progress import Bar
from hp_tune.errors import AllFailedError
from hp_tune.profile.running import Effort, profile
from hp_tune.torchrun import Launcher


def test_two_ranks_measure_and_search_reads_what_they_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the command line to a plan: the file has every shape, and no number is made up.

    Meanwhile the ranks say how far they are.
    """
    monkeypatch.chdir(tmp_path)
    steps: list[tuple[str, int, int]] = []
    monkeypatch.setattr(Bar, "step", lambda _self, *step: steps.append(step))

    def exit_code(command: str) -> object:
        with pytest.raises(SystemExit) as ended:
            main(command.split())
        return ended.value.code

    assert exit_code("profile --name here --quick --json") == 0
    printed = json.loads(capsys.readouterr().out)
    cluster = read_cluster("here.yaml")

    stages = ("collectives", "products, copies, attention", "host", "overlap")
    assert steps == sorted(steps, key=lambda step: (stages.index(step[0]), step[1]))
    assert {total for _, _, total in steps} == {9}, "three stages, two rounds after one"
    assert steps[-1][1] > 0

    assert printed["path"] == "here.yaml"
    assert {(t.kind, t.size, t.stride) for t in cluster.collectives} == {
        (kind, 2, 1) for kind in ("all_to_all", "all_gather", "reduce_scatter", "p2p")
    }
    assert cluster.shared_cores is not None
    for times in cluster.collectives:
        assert [round(size * 2**20) for size, _ in times.points] == [2**12, 2**14, 2**16, 2**18]
    # products of 128 rows: from a hundredth of a GFLOPS to what no core has
    assert 1e-5 < cluster.device.peak_TFLOPS["fp32"].value < 2
    what = [row["what"] for row in printed["found"]["compute"]["rows"]]
    assert (what.count("gemm"), what.count("attention backward")) == (3, 5)
    modes = {row["name"] for row in printed["found"]["host"]}
    assert modes >= {
        "ulysses u=2",
        "colossal u=1",
        "colossal u=1 load_balance",
        "ulysses u=2 async",
    }
    asked = "search --model Llama-3.1-8B --cluster here.yaml --cp 2 --seq 256 --dtype fp32"
    assert exit_code(asked) == 0
    printed_plan = capsys.readouterr().out
    assert "assumed" in printed_plan and "measured" in printed_plan


def test_a_run_that_does_not_end_is_ended_and_says_so(tmp_path: Path) -> None:
    """The time is up before a rank has imported torch; nothing is written."""
    with pytest.raises(AllFailedError, match=r"after 0\.2 s"):
        profile(
            Launcher("cpu-gloo", 2, threads=1), tmp_path / "x.yaml", name="x",
            effort=Effort(rounds=1), timeout=0.2,
        )  # fmt: skip
    assert not list(tmp_path.iterdir())
