"""export, show, validate, doctor: a plan in other forms, and answers with an exit code."""

from __future__ import annotations

import ast
import csv
import io
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

import hp_cp
import hp_dsa
from hp_tune.clusters.cluster_files import read_cluster
from hp_tune.measured.result import Measured
from hp_tune.models.hf_config import read_model
from hp_tune.plans.export import export_plan
from hp_tune.plans.plan_file import load
from hp_tune.searching.engine import search
from hp_tune.study.journal import locked
from hp_tune.workload import Config, Workload

from ._fake_measurer import FakeMeasurer
from ._program import empty_folder, run

QWEN = ["search", "--model", "Qwen2.5-7B", "--cluster", "atlas-800t-a2", "--cp", "8"]
SEARCH = [*QWEN, "--seq", "64K", "--study", "s.journal"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test in an empty folder."""
    return empty_folder(tmp_path, monkeypatch)


def test_the_snippet_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    """Executed as a module: styles with the plan's arguments, and hp-tune is not asked."""
    run(capsys, *SEARCH)
    assert run(capsys, "export", "--out", "snippet.py")[0] == 0
    text = Path("snippet.py").read_text()
    found = runpy.run_path("snippet.py")

    assert "hp_tune" not in text
    assert found["CP_SIZE"] == 8
    (style,) = found["STYLES"].values()
    assert type(style) is hp_cp.ContextParallel
    assert (style.seq_dim, style.head_dim, style.load_balance) == (1, 2, True)

    class Style:
        applied: Any = None

        def apply(self, *arguments: Any, **handoffs: Any) -> None:
            self.applied = (*arguments, handoffs)

    found["STYLES"]["attention"] = spy = Style()
    found["apply_styles"]({"attention": "m"}, "mesh", attention={"q_proj": "q"})
    assert spy.applied == ("m", "mesh", {"q_proj": "q"})


@pytest.mark.parametrize("name", ['a"""b', "a\\Nb", "a\\", 'a"', 'x""" + str(exec("stop")) + """'])
def test_no_name_of_a_folder_or_a_cluster_is_code_in_a_snippet(name: str) -> None:
    """Quotes would end its docstring, a backslash is read by Python, and what follows is run."""
    model = read_model("Qwen2.5-7B").model_copy(update={"name": name})
    cluster = read_cluster("atlas-800t-a2").model_copy(update={"name": name})
    plan = search(model, cluster, Workload(seq_len=8192, cp_size=8)).plan
    assert plan is not None

    module = ast.parse(export_plan(plan, plan.entries, "python", Path("plan.json")))

    (docstring, *_) = module.body
    assert isinstance(docstring, ast.Expr)
    assert isinstance(docstring.value, ast.Constant)


def test_the_snippet_of_sparse_attention_has_three_styles(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One for each boundary of DSA."""
    run(capsys, "search", "--model", "DeepSeek-V3.2", "--cluster", "atlas-900-a3", "--cp", "8",
        "--seq", "32K")  # fmt: skip
    run(capsys, "export", "--out", "snippet.py")
    styles = runpy.run_path("snippet.py")["STYLES"]

    assert list(styles) == ["indexer", "attention", "indexer_loss"]
    assert isinstance(styles["attention"], hp_dsa.DSASparseAttentionContextParallel)


def test_yaml_json_csv_and_variables_say_what_the_plan_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """YAML and JSON are equal; CSV has a row per configuration, a study's has all of them."""
    run(capsys, *SEARCH)
    plan = load("plan.json")
    (entry,) = plan.entries
    content = yaml.safe_load(run(capsys, "export", "--format", "yaml")[1])

    assert content == json.loads(run(capsys, "export", "--format", "json")[1])
    assert content == json.loads(run(capsys, "export", "--json")[1])
    assert content["plan"] == plan.digest
    assert content["entries"][0]["styles"]["attention"]["arguments"] == entry.style_kwargs()
    rows = list(csv.DictReader(io.StringIO(run(capsys, "export", "--format", "csv")[1])))
    assert len(rows) == 1 + len(entry.alternatives) + len(entry.rejected)
    assert rows[0]["config"] == entry.best.mode
    assert {row["rule"] for row in rows[4:]} == {"V03", "V05", "V09"}
    code, out, _ = run(capsys, "export", "s.journal", "--format", "csv")
    trials = list(csv.DictReader(io.StringIO(out)))
    assert code == 0 and len(trials) == len(rows)
    assert trials[0]["label"] == entry.best.mode
    out = run(capsys, "export", "--format", "env")[1]
    assert f"export HP_TUNE_PLAN={Path('plan.json').resolve()}\n" in out
    assert plan.digest in out


def test_questions_to_a_plan_and_to_a_study(capsys: pytest.CaptureFixture[str]) -> None:
    """Why not that one: the rule with its numbers, or the terms that cost it most."""
    run(capsys, *SEARCH)
    why = ("show", "s.journal", "--why-miss")
    out = run(capsys, *why, "hybrid u=4")[1]
    assert out.startswith("hybrid u=4 is 2 of 4: 3937 ms, x1.379 of colossal u=1 load_balance\n")
    assert "backward attention +815.3 ms" in out.splitlines()[1]
    out = run(capsys, "show", "plan.json", "--why-miss", "ulysses u=8")[1]
    assert out.startswith("ulysses u=8: V03: num_heads (28)") and "num_heads 28" in out
    assert "is the choice" in run(capsys, *why, "colossal u=1 load_balance")[1]
    for path in ("plan.json", "s.journal"):
        front = json.loads(run(capsys, "show", path, "--pareto", "--json")[1])["front"]
        assert [row["config"] for row in front] == ["colossal u=1 load_balance", "hybrid u=4"]
    found = json.loads(run(capsys, "show", "s.journal", "--trial", "0", "--json")[1])
    assert found["number"] == 0 and "label" in found
    assert "formula" not in run(capsys, "show", "s.journal", "--trial", "0")[1]


def test_a_study_of_time_and_memory_is_shown_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Its trials have two values; the first is the time."""
    run(capsys, *SEARCH, "--objective", "pareto")
    for more in ((), ("--json",), ("--pareto",), ("--trial", "0")):
        assert run(capsys, "show", "s.journal", *more)[0] == 0
    told = [
        json.loads(run(capsys, "show", path, "--pareto", "--json")[1])["front"]
        for path in ("plan.json", "s.journal")
    ]
    assert [[one["config"] for one in front] for front in told] == [
        [priced.mode for priced in load("plan.json").entries[0].front]
    ] * 2
    smallest = told[0][-1]["config"]
    assert "kv_chunks" in smallest, "beyond the best and its three alternatives"
    assert f"{smallest}: " in run(capsys, "show", "--why-miss", smallest)[1]
    trials = json.loads(run(capsys, "show", "s.journal", "--json")[1])["trials"]
    assert trials[0]["ms"] == pytest.approx(2854.32, abs=0.1)
    assert trials[-1]["ms"] is None


def test_validate_names_each_file_and_exits_with_its_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Right ones say what they are; a wrong one is a line, and the exit code of its kind."""
    run(capsys, *SEARCH)
    Path("ours.yaml").write_text("extends: atlas-800t-a2\nname: ours\n")
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 8, "vocab_size": 64, "intermediate_size": 128}  # fmt: skip
    Path("config.json").write_text(json.dumps(config))
    code, out, _ = run(capsys, "validate", "plan.json", "s.journal", "ours.yaml", "config.json",
                       "--json")  # fmt: skip
    found = json.loads(out)
    assert (code, found["valid"]) == (0, True)
    assert [f["kind"] for f in found["files"]] == ["plan", "study", "cluster", "model"]
    assert "extends atlas-800t-a2" in found["files"][2]["notes"]

    Path("ours.yaml").write_text("extends: atlas-800t-a2\ndevice: {memory_GBs: 3}\n")
    Path("plan.json").write_text(Path("plan.json").read_text().replace("true", "false", 1))
    Path("odd.json").write_text('{"schema": "other/1"}')
    code, out, err = run(capsys, "validate", "config.json", "ours.yaml", "plan.json", "odd.json")
    assert (code, out.count("wrong")) == (2, 3)
    assert "memory_GBps" in out and "changed after it was written" in out.replace("\n", " ")
    assert "3 of 4 files cannot be used" in err
    assert run(capsys, "validate", "plan.json")[0] == 8
    assert run(capsys, "validate", "none.yaml")[0] == 2
    assert run(capsys, "validate")[0] == 2


def test_recorded_measurements_are_scored(capsys: pytest.CaptureFixture[str]) -> None:
    """Regret of the pick, pairs in order; above the limit is exit 7."""
    case = {
        "name": "node", "model": "Qwen2.5-7B", "cluster": "atlas-800t-a2",
        "workload": {"seq_len": 65536, "cp_size": 8},
        "measured_ms": {"colossal u=1 load_balance": 100.0, "hybrid u=4": 130.0,
                        "hybrid u=2": 120.0, "ring": 1.0},
    }  # fmt: skip
    file = {"schema": "hp-tune/acceptance/1", "max_mean_regret": 0.05, "cases": [case]}
    Path("a.json").write_text(json.dumps(file))
    code, out, _ = run(capsys, "validate", "--against", "a.json", "--json")
    (found,) = json.loads(out)["cases"]
    assert (code, found["regret"], found["unknown"]) == (0, 0.0, ["ring"])
    assert found["order"] == pytest.approx(2 / 3)
    both = json.loads(run(capsys, "validate", "a.json", "--against", "a.json", "--json")[1])
    assert both["valid"] and both["cases"] == [found], "one object"
    case["measured_ms"]["hybrid u=4"] = 80.0  # type: ignore[index]
    Path("a.json").write_text(json.dumps(file))
    code, out, err = run(capsys, "validate", "--against", "a.json")
    assert (code, "mean regret (25.0%) must be at most 5.0%" in err) == (7, True)
    case["measured_ms"] = {"a": 1.0, "b": 2.0}
    Path("a.json").write_text(json.dumps(file))
    assert run(capsys, "validate", "--against", "a.json")[0] == 2
    Path("a.json").write_text(json.dumps({**file, "cases": []}))
    assert run(capsys, "validate", "a.json")[0] == 2


def test_doctor_says_what_is_there_and_fails_for_what_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A held lock with its process; a plan of the environment that cannot be read is exit 5."""
    Path(".hp-tune").mkdir()
    with locked(Path(".hp-tune/x.journal")):
        code, out, _ = run(capsys, "doctor", "--json")
    found = {check["name"]: check for check in json.loads(out)["checks"]}
    assert code == 0 and json.loads(out)["healthy"]
    assert {"python", "hp packages", "torch", "backends", "CUDA devices", "Ascend devices",
            "torchrun", "ip", "tc", "study folder", "study locks"} <= set(found)  # fmt: skip
    assert "held: x.journal.flock by process" in found["study locks"]["found"]
    assert "gloo" in found["backends"]["found"]
    assert found["terminal"]["found"] == (
        "stdout is no terminal: plain text; stderr is no terminal: no bar"
    )
    monkeypatch.setenv("HP_TUNE_PLAN", "none.json")
    code, out, err = run(capsys, "doctor")
    assert (code, "HP_TUNE_PLAN: not as needed" in err) == (5, True)
    assert "wrong" in out


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["export", "none.json"], 8, "cannot be read"),
        (["export", "--out", "none/x.py"], 2, "--out none/x.py cannot be written"),
        (["export", "--seq", "1M"], 8, "must be a length that the plan serves"),
        (["export", "s.journal"], 2, "--format python must have a plan"),
        (["show", "--why-miss", "hybrid u=3"], 2, "did you mean 'hybrid u="),
        (["show", "--trial", "0"], 2, "--trial must have a study"),
        (["show", "s.journal", "--trial", "99"], 2, "there are 0 to"),
        (["show", "--trial", "0", "--pareto"], 2, "one at a time"),
    ],
)
def test_wrong_use_is_one_message(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, text: str
) -> None:
    """With the exit code of its kind, and never an empty result with exit 0."""
    run(capsys, *SEARCH)
    found, out, err = run(capsys, *arguments)
    assert (found, text in err, out) == (code, True, ""), err


def test_show_prints_the_style_of_each_kind_of_layer(capsys: pytest.CaptureFixture[str]) -> None:
    """And of each boundary of sparse attention: what `styles_dict` gives."""
    run(capsys, "search", "--model", "gemma-4-26B-A4B", "--cluster", "hgx-h100", "--cp", "8",
        "--seq", "32K", "--space", "halo=1 u=1 lb=on")  # fmt: skip
    out = run(capsys, "show")[1]

    assert "  attention: ContextParallel {'seq_dim': 1, " in out
    assert "  sliding_attention: ContextParallel {'seq_dim': 1, " in out
    assert "'sliding_window': 1024}" in out


def test_a_failed_trial_says_why_wherever_it_is_shown(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    """The class of its failure and the reason, in the table and when it is asked for."""
    model, cluster = read_model("Qwen2.5-7B"), read_cluster("atlas-800t-a2")
    lost = Config(ulysses_degree=4)
    search(
        model, cluster, Workload(seq_len=65536, cp_size=8), mode="measured", overlap=False,
        study=folder / "m.journal",
        measurer=FakeMeasurer(failures={lost: Measured("oom", "rank 3 ran out of memory")}),
    )  # fmt: skip

    out = run(capsys, "show", "m.journal")[1]
    assert "oom: rank 3 ran out of memory" in " ".join(out.split())
    out = run(capsys, "show", "m.journal", "--why-miss", "hybrid u=4")[1]
    assert out == "hybrid u=4: oom: rank 3 ran out of memory\n"
