"""``hp-tune explain``: from a plan or study whose descriptions must be those it was made with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hp_tune.clusters.cluster_files import cluster_presets, read_cluster
from hp_tune.explanation.recorded import result_of_study
from hp_tune.models.hf_config import read_model
from hp_tune.plans.plan import MeasuredTime, PricedConfig, seal
from hp_tune.plans.plan_file import load, write
from hp_tune.searching.engine import search
from hp_tune.workload import Workload

from ._fake_measurer import FakeMeasurer
from ._program import empty_folder, run

QWEN = ["--model", "Qwen2.5-7B", "--cluster", "atlas-800t-a2", "--cp", "8", "--seq", "64K"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test in an empty folder."""
    return empty_folder(tmp_path, monkeypatch)


def test_a_plan_is_explained_as_its_search_would_be(capsys: pytest.CaptureFixture[str]) -> None:
    """The plan and the same options give the same words; a trace is written beside."""
    run(capsys, "search", *QWEN)
    code, out, err = run(capsys, "explain", "--trace", "t.json")

    assert (code, err) == (0, "")
    assert out.startswith("colossal u=1 load_balance is first of 4 for Qwen2.5-7B")
    for words in ("all_gather k", "of peak", "assumed", "network  ....", "hybrid u=4  x1.379",
                  "V03  ulysses u=8: num_heads (28)", "margin   37.9% to hybrid u=4",
                  "flip     no assumed number", "would be the new best"):  # fmt: skip
        assert words in out, words
    assert json.loads(Path("t.json").read_text())["traceEvents"]
    assert run(capsys, "explain", *QWEN)[1] == out
    found = json.loads(run(capsys, "explain", "plan.json", "--rival", "2", "--json")[1])
    assert [rival["label"] for rival in found["rivals"]] == ["hybrid u=4"]
    assert found["winner"]["label"] == "colossal u=1 load_balance"
    assert found["waterfall"] and found["timelines"] and found["opportunities"]
    assert "backward  attention" in run(capsys, "explain", "--rival", "hybrid u=4")[1]


def test_other_descriptions_than_the_plans_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By digest: another cluster, an edited one, another model; and numbers that come out else."""
    own = Path("own.yaml")
    own.write_text(cluster_presets()["atlas-800t-a2"].read_text())
    run(capsys, "search", *QWEN, "--cluster", "own.yaml")
    assert run(capsys, "explain")[0] == 0, "a copy of the preset is the preset"
    own.write_text(own.read_text().replace("name: atlas-800t-a2", "name: our-cluster", 1))
    run(capsys, "search", *QWEN, "--cluster", "own.yaml")
    code, _, err = run(capsys, "explain")
    assert (code, "cluster 'our-cluster', which is no preset" in err) == (2, True)
    assert run(capsys, "explain", "--cluster", "own.yaml")[0] == 0
    own.write_text(own.read_text().replace("value: 0.66", "value: 0.67", 1))
    code, _, err = run(capsys, "explain", "--cluster", "own.yaml")
    assert (code, "of digest" in err and "--cluster own.yaml has" in err) == (8, True)
    code, _, err = run(capsys, "explain", "--cluster", "own.yaml", "--model", "Qwen3-8B")
    assert (code, "a model 'Qwen2.5-7B' of digest" in err) == (8, True)

    run(capsys, "search", *QWEN)
    plan = load("plan.json")
    (entry,) = plan.entries
    faster = entry.best.model_copy(update={"forward_ms": entry.best.forward_ms / 2})
    wrong = plan.model_copy(update={"entries": (entry.model_copy(update={"best": faster}),)})
    write(seal(wrong), Path("plan.json"))
    code, _, err = run(capsys, "explain")
    assert (code, "must come to" in err) == (8, True)
    write(seal(plan.model_copy(update={"cost_model": 1})), Path("plan.json"))
    code, _, err = run(capsys, "explain")
    assert (code, "cost_model of the plan (1)" in err) == (8, True)


def test_a_measured_plan_is_explained_with_how_it_ran(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The prediction is explained; that another one ran fastest is said, with both times."""
    run(capsys, "search", *QWEN)
    plan = load("plan.json")
    (entry,) = plan.entries

    def ran(priced: PricedConfig, ms: float) -> PricedConfig:
        time = MeasuredTime(median_ms=ms, interval_ms=(ms - 1, ms + 1), forward_ms=ms / 3,
                            backward_ms=ms / 1.5, samples_ms=(ms,), in_finals=True)  # fmt: skip
        return priced.model_copy(update={"measured": time, "source": "measured"})

    best, second = ran(entry.alternatives[0], 3000.0), ran(entry.best, 3100.0)
    changed = entry.model_copy(
        update={"best": best, "alternatives": (second, *entry.alternatives[1:])}
    )
    write(seal(plan.model_copy(update={"entries": (changed,)})), Path("plan.json"))
    code, out, _ = run(capsys, "explain")

    assert code == 0
    assert out.startswith("colossal u=1 load_balance is first of 4")
    assert "note: hybrid u=4 ran fastest, in 3000 ms; colossal u=1 load_balance is predict" in out
    (row,) = [line.split() for line in out.splitlines() if line.startswith("hybrid u=4  ")]
    assert row == ["hybrid", "u=4", "3000", "2999", "3001", "3937", "x0.762"]
    found = json.loads(run(capsys, "explain", "--json")[1])
    assert found["winner"]["measured_ms"] == 3100.0
    assert [rival["measured_ms"] for rival in found["rivals"]] == [3000.0, None, None]
    assert run(capsys, "report", "--lengths", "64K")[0] == 0
    assert "<h3>Measured</h3>" in Path("report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["explain"], 2, "there is no plan plan.json"),
        (["explain", "none.json"], 2, "there is no plan none.json"),
        (["explain", "--cp", "8"], 2, "--model, --cluster, --seq must be given"),
        (["explain", *QWEN, "--rival", "ulysses u=8"], 2, "V03 rejects it"),
        (["explain", *QWEN, "--seq", "65537"], 3, "configurations are rejected"),
        (["explain", *QWEN, "--trace", "none/t.json"], 2, "--trace none/t.json cannot be written"),
    ],
)
def test_wrong_use_is_one_message_and_its_exit_code(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, text: str
) -> None:
    """As everywhere; with --json an object on stderr."""
    found, _, err = run(capsys, *arguments)
    assert (found, text in err) == (code, True), err
    found, _, err = run(capsys, *arguments, "--json")
    assert (found, json.loads(err)["code"]) == (code, code)


def test_options_of_a_search_do_not_go_with_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """The plan says them; a length chooses among its entries."""
    run(capsys, "search", *QWEN)
    code, _, err = run(capsys, "explain", "plan.json", "--cp", "4")
    assert (code, "--cp must be left out beside a plan" in err) == (2, True)
    assert run(capsys, "explain", "plan.json", "--seq", "32K")[0] == 0
    code, _, err = run(capsys, "explain", "plan.json", "--seq", "1M")
    assert (code, "seq_len (1048576) must be a length that the plan serves" in err) == (8, True)


def test_a_study_is_explained_as_its_search_would_be(capsys: pytest.CaptureFixture[str]) -> None:
    """Its points alone, from presets or the descriptions that are named; others are refused."""
    run(capsys, "search", *QWEN, "--study", "s.journal", "--variants")
    every = run(capsys, "explain", "s.journal")[1]
    assert every == run(capsys, "explain", *QWEN, "--variants")[1]
    run(capsys, "search", *QWEN, "--study", "part.journal", "--space", "u=1,4 lb=off")
    code, out, err = run(capsys, "explain", "part.journal")
    assert (code, err) == (0, "")
    assert out == run(capsys, "explain", *QWEN, "--space", "u=1,4 lb=off")[1]
    assert run(capsys, "report", "part.journal", "--lengths", "64K")[0] == 0

    own = Path("own.yaml")
    own.write_text(cluster_presets()["atlas-800t-a2"].read_text().replace(
        "name: atlas-800t-a2", "name: our-cluster", 1))  # fmt: skip
    run(capsys, "search", *QWEN, "--cluster", "own.yaml", "--study", "own.journal")
    for arguments, code, text in (
        (["own.journal"], 2, "the study was made with a cluster 'our-cluster', which is no preset"),
        (["own.journal", "--cluster", "own.yaml"], 0, ""),
        (
            ["s.journal", "--cluster", "own.yaml"],
            8,
            "the study was made with a cluster 'atlas-800t",
        ),
        (
            ["s.journal", "--model", "Qwen3-8B"],
            8,
            "the study was made with a model 'Qwen2.5-7B' of",
        ),
        (["s.journal", "--cp", "4"], 2, "--cp must be left out beside a study"),
        (["s.journal", "--seq", "64K"], 2, "--seq must be left out beside a study"),
    ):
        found, _, err = run(capsys, "explain", *arguments)
        assert (found, text in err) == (code, True), err


def test_a_study_of_launches_is_not_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """It has no workload; the message says which file has."""
    run(capsys, "search", *QWEN, "--study", "s.journal", "--kernels", "ascend910b3",
        "--space", "u=4 lb=off")  # fmt: skip
    code, _, err = run(capsys, "explain", "s.kernels.journal")
    assert (code, "a study of configurations must have points of a workload" in err) == (8, True)


def test_a_measured_study_is_explained_with_how_it_ran(tmp_path: Path) -> None:
    """Medians of the finals where a point was in them, of its trial elsewhere."""
    model, cluster = read_model("Qwen2.5-7B"), read_cluster("atlas-800t-a2")
    searched = search(
        model, cluster, Workload(seq_len=65536, cp_size=8), mode="measured", overlap=False,
        measurer=FakeMeasurer(), study=tmp_path / "s.journal",
    )  # fmt: skip
    found = result_of_study(tmp_path / "s.journal")

    ran = {one.config: (one.ms, one.in_finals) for one in searched.ranking}
    assert {one.config: (one.ms, one.in_finals) for one in found.ranking} == ran
    assert {True, False} == {one.in_finals for one in found.ranking}
