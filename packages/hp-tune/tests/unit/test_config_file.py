"""``hp-tune search --config``: what comes before what; mistakes with the place where they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hp_tune.commands.config import NOT_IN_FILES, options_of, read_config
from hp_tune.commands.search import search
from hp_tune.errors import UsageError

from ._program import empty_folder, run

YAML = """\
version: 1
model: Qwen2.5-7B
cluster: atlas-800t-a2
workload:
  seq: [32768, 65536]
  batch: 1
  layout: BSND
  causal: true
parallel: {cp: 8}
search:
  space: u=1,4 lb=on,off
  require: memory_gib <= 52
measure:
  host: [ssh node0, ssh node1]
output:
  out: plan.json
"""
TWICE = "c.yaml:7:3: key 'batch' appears twice"
TOML = """\
version = 1
model = "Qwen2.5-7B"
cluster = "atlas-800t-a2"
parallel.cp = 8

[workload]
seq = [32768, 65536]
batch = 1
layout = "BSND"
causal = true

[search]
space = "u=1,4 lb=on,off"
require = "memory_gib <= 52"

[measure]
host = ["ssh node0", "ssh node1"]

[output]
out = "plan.json"
"""
JSON = json.dumps(
    {
        "version": 1,
        "model": "Qwen2.5-7B",
        "cluster": "atlas-800t-a2",
        "workload": {"seq": [32768, 65536], "batch": 1, "layout": "BSND", "causal": True},
        "parallel": {"cp": 8},
        "search": {"space": "u=1,4 lb=on,off", "require": "memory_gib <= 52"},
        "measure": {"host": ["ssh node0", "ssh node1"]},
        "output": {"out": "plan.json"},
    },
    indent="\t",
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test in an empty folder."""
    return empty_folder(tmp_path, monkeypatch)


def searches(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Run a search that must succeed; return its JSON."""
    code, out, err = run(capsys, "search", "--json", *arguments)
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def test_yaml_json_and_toml_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """One search in three spellings, and as it is typed."""
    plans = []
    for name, text in (("c.yaml", YAML), ("c.json", JSON), ("c.toml", TOML)):
        Path(name).write_text(text)
        searches(capsys, "--config", name)
        plans.append(Path("plan.json").read_bytes())
    searches(
        capsys, "--model", "Qwen2.5-7B", "--cluster", "atlas-800t-a2", "--seq", "32K,64K",
        "--cp", "8", "--space", "u=1,4", "--space", "lb=on,off", "--require", "memory_gib <= 52",
        "--layout", "BSND", "--causal", "--batch", "1",
    )  # fmt: skip

    assert plans == [Path("plan.json").read_bytes()] * 3
    assert read_config(Path("c.yaml"), search)["hosts"] == ["ssh node0", "ssh node1"]


def test_the_command_line_comes_before_the_environment_and_that_before_the_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One option that all of them say; ``told_by`` names the one that counted for each."""
    Path("c.yaml").write_text(YAML.replace("[32768, 65536]", "64K").replace("1,4", "1,2,4,8"))
    config = ("--config", "c.yaml")

    from_file = searches(capsys, *config)
    assert from_file["workload"]["cp_size"] == 8
    assert from_file["told_by"]["cp"] == "file"
    assert "tp" not in from_file["told_by"]
    monkeypatch.setenv("HP_TUNE_CP", "4")
    monkeypatch.setenv("HP_TUNE_SPACE", "u=1,2 lb=off")
    from_environment = searches(capsys, *config)
    assert from_environment["workload"]["cp_size"] == 4
    assert {one["config"]["load_balance"] for one in from_environment["ranking"]} == {False}
    typed = searches(capsys, *config, "--cp", "2", "--no-causal")
    assert typed["workload"]["cp_size"] == 2
    assert not typed["workload"]["causal"]
    assert typed["told_by"] == {
        "config": "command line", "model": "file", "cluster": "file", "cp": "command line",
        "seq": "file", "batch": "file", "layout": "file", "causal": "command line",
        "space": "environment", "require": "file", "host": "file", "out": "file",
        "json": "command line",
    }  # fmt: skip
    monkeypatch.setenv("HP_TUNE_CONFIG", "c.yaml")
    assert searches(capsys)["workload"]["cp_size"] == 4


def test_a_wrong_value_in_the_environment_is_said_to_be_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody typed the option."""
    Path("c.yaml").write_text(YAML)
    monkeypatch.setenv("HP_TUNE_MAX_TRIALS", "few")
    wrong = "'few' must be a whole number of at least 1, such as 131072 or 128K"
    where = "that is the environment variable HP_TUNE_MAX_TRIALS"
    code, _, err = run(capsys, "search", "--config", "c.yaml")
    assert (code, f"Invalid value for '--max-trials': {wrong}\n  {where}\n" in err) == (2, True), (
        err
    )
    code, _, err = run(capsys, "search", "--config", "c.yaml", "--json")
    assert json.loads(err)["hint"] == where
    code, _, err = run(capsys, "search", "--config", "c.yaml", "--max-trials", "few")
    assert (code, wrong in err, where in err) == (2, True, False)


def test_a_variable_of_no_option_is_told_with_the_nearest_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, on stderr, and the search is done; what a training script reads is none of them."""
    Path("c.yaml").write_text(YAML)
    monkeypatch.setenv("HP_TUNE_MAX_TRAILS", "3")
    monkeypatch.setenv("HP_TUNE_PLAN", "plan.json")
    monkeypatch.setenv("HP_TUNE_PLAN_DIGEST", "abc")
    monkeypatch.setenv("HP_TUNE_ZZZ", "1")
    code, out, err = run(capsys, "search", "--config", "c.yaml", "--json")

    assert (code, json.loads(out)["plan"]) == (0, "plan.json")
    assert err.splitlines() == [
        "hp-tune: HP_TUNE_MAX_TRAILS is set, and no option has this variable; did you mean "
        "HP_TUNE_MAX_TRIALS?",
        "hp-tune: HP_TUNE_ZZZ is set, and no option has this variable",
    ]
    assert run(capsys, "search", "--config", "c.yaml", "--quiet")[2] == ""


def test_hosts_in_a_variable_are_split_at_semicolons(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of a host has spaces in it."""
    monkeypatch.setenv("HP_TUNE_HOST", "ssh node0;ip netns exec hp1")
    words = ["--model", "m", "--cluster", "c", "--cp", "2"]

    found = search.make_context("search", words).params
    assert found["hosts"] == ("ssh node0", "ip netns exec hp1")


def test_every_option_of_search_is_in_one_section_or_said_not_to_be() -> None:
    """A file that says them all, by the names of the command line, is read."""
    sections = options_of(search)
    named = [name for options in sections.values() for name in options]
    every = {option.opts[0].removeprefix("--") for option in search.params}

    assert sorted(named) == sorted(every - set(NOT_IN_FILES))
    assert set(sections[""]) == {"model", "cluster"}
    for option in search.params:
        name = option.opts[0].removeprefix("--")
        variable = None if name == "json" else f"HP_TUNE_{name.upper().replace('-', '_')}"
        assert option.envvar == variable


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("version: 1", "version: 2", "c.yaml:1:1: version (2) must be 1"),
        ("version: 1\n", "", "c.yaml: version (None) must be 1; write version: 1"),
        ("  batch:", "  bach:", "c.yaml:6:3: unknown key 'workload.bach'; did you mean 'batch'?"),
        ("search:", "serch:", "c.yaml:10:1: unknown key 'serch'; did you mean 'search'?"),
        ("  batch: 1", "  seed: 1",
         "c.yaml:6:3: unknown key 'workload.seed'; did you mean 'search.seed'?"),
        ("model:", "budget:", "c.yaml:2:1: unknown key 'budget'; did you mean 'search.budget'?"),
        ("  layout:", "  dense_mask:", "c.yaml:7:3: unknown key 'workload.dense_mask'; did you "
         "mean 'dense-mask'?"),
        ("output:\n  out: plan.json", "output: {zzz: 1}",
         "c.yaml:15:10: unknown key 'output.zzz'; known keys: storage, study, out"),
        ("  batch: 1", "  batch: 1\n  batch: 2", TWICE),
        ("  batch: 1", "  batch: 1.5", "c.yaml:6:3: workload.batch: '1.5' must be a whole"),
        ("  batch: 1", "  batch: true", "workload.batch (True) must be a word, a number or a"),
        ("  batch: 1", "  batch:", "workload.batch (None) must be a word, a number or a list of"),
        ("  causal: true", "  causal: 1", "workload.causal (1) must be true or false"),
        ("[32768, 65536]", "[32768, x]", "c.yaml:5:3: workload.seq: 'x' must be a whole number"),
        ("{cp: 8}", "8", "c.yaml:9:1: parallel (8) must hold options; such as parallel: {cp: ..."),
        ("{cp: 8}", "{cp: 0}", "c.yaml:9:12: parallel.cp: '0' must be a whole number"),
        ("  require:", "  mode: guess\n  require:", "search.mode: 'guess' is not one of"),
        ("model: Qwen2.5-7B", "model: [", "not YAML"),
    ],
)  # fmt: skip
def test_mistakes_are_said_with_their_place(
    capsys: pytest.CaptureFixture[str], old: str, new: str, text: str
) -> None:
    """Exit 2, line and column, the nearest key; ``validate`` says the same."""
    assert old in YAML
    Path("c.yaml").write_text(YAML.replace(old, new, 1))

    code, out, err = run(capsys, "search", "--config", "c.yaml", "--json")
    said = json.loads(err)
    assert (code, out) == (2, "")
    assert text in f"{said['message']}; {said['hint']}"
    code, out, _ = run(capsys, "validate", "c.yaml", "--json")
    assert code == 2
    (verdict,) = json.loads(out)["files"]
    assert verdict["error"]["message"] == said["message"]
    assert verdict["kind"] == ("cluster" if text in ("not YAML", TWICE) else "config")


def test_places_in_json_and_toml() -> None:
    """Line and column there too; TOML's own reader tells its own mistakes."""
    for name, text, wrong in (
        ("c.json", JSON.replace('"batch"', '"bach"'), "c.json:10:3: unknown key 'workload.bach'"),
        ("c.json", JSON.replace(': "BSND"', ': "BSND",'), r"c.json:\d+:\d+: not JSON"),
        ("c.json", JSON.replace('"batch"', '"layout"'), r"c.json:11:3: key 'layout' appears twice"),
        ("c.toml", TOML.replace("batch", "bach"), "c.toml:8:1: unknown key 'workload.bach'"),
        ("c.toml", TOML.replace("l.cp", "l.pc"), "c.toml:4:1: unknown key 'parallel.pc'"),
        (
            "c.toml",
            TOML.replace("parallel.cp = 8", "parallel = { pc = 8 }"),
            "c.toml:4:14: unknown key 'parallel.pc'",
        ),
        ("c.toml", TOML.replace("[search]", "[serch]"), "c.toml:12:2: unknown key 'serch'"),
        ("c.toml", TOML.replace("batch = 1", "batch = "), "c.toml:8:9: not TOML: Invalid value"),
        ("c.toml", TOML.replace("batch", "seq"), r"c.toml:8:\d+: not TOML: Cannot overwrite"),
    ):
        Path(name).write_text(text)
        with pytest.raises(UsageError, match=wrong):
            read_config(Path(name), search)
    with pytest.raises(UsageError, match=r"none.yaml: cannot be read"):
        read_config(Path("none.yaml"), search)


def test_paths_start_from_the_folder_of_the_file(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Descriptions, lengths, study and plan; a preset stays one, and the command line its own."""
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 128,
    }  # fmt: skip
    (folder / "job" / "tiny").mkdir(parents=True)
    (folder / "job" / "tiny" / "config.json").write_text(json.dumps(config))
    (folder / "job" / "h.txt").write_text("256 3\n")
    (folder / "job" / "c.yaml").write_text(
        "version: 1\nmodel: tiny\ncluster: cpu-gloo\n"
        "workload: {seq-hist: h.txt, dtype: fp32}\nparallel: {cp: 2}\n"
        "output: {out: p.json, study: s.journal}\n"
    )
    (folder / "here").mkdir()
    monkeypatch.chdir(folder / "here")
    found = searches(capsys, "--config", "../job/c.yaml")

    assert found["model"]["name"] == "tiny"
    assert (folder / "job" / "p.json").is_file()
    assert (folder / "job" / "s.journal").is_file()
    searches(capsys, "--config", "../job/c.yaml", "--out", "q.json", "--study", "q.journal")
    assert (folder / "here" / "q.json").is_file()
    (folder / "job" / "c.yaml").write_text(
        (folder / "job" / "c.yaml").read_text().replace("tiny", "tny")
    )
    code, _, err = run(capsys, "search", "--config", "../job/c.yaml")
    assert (code, "--model (../job/tny) must be a config.json" in err) == (2, True)


def test_validate_checks_a_file_as_a_search_would_read_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What it asks for in one line, what is left to the command line; and files that it names."""
    for name, text in (("c.yaml", YAML), ("c.json", JSON), ("c.toml", TOML)):
        Path(name).write_text(text)
    code, out, _ = run(capsys, "validate", "c.yaml", "c.json", "c.toml", "--json")
    verdicts = json.loads(out)["files"]
    assert code == 0
    assert [verdict["kind"] for verdict in verdicts] == ["config"] * 3
    assert {verdict["says"] for verdict in verdicts} == {
        "analytic search of Qwen2.5-7B on atlas-800t-a2 with cp 8 at 32768, 65536"
    }
    Path("part.yaml").write_text("version: 1\nsearch: {mode: hybrid}\n")
    code, out, _ = run(capsys, "validate", "part.yaml", "--json")
    (verdict,) = json.loads(out)["files"]
    assert verdict["says"] == "hybrid search"
    assert verdict["notes"] == ["--model, --cluster, --cp, --seq must be given beside it"]
    for old, new, text in (
        ("Qwen2.5-7B", "Qwen2.5-7", "did you mean Qwen2.5-7B"),
        ("u=1,4", "u=3", "u (3) must be among 1, 2, 4, 8"),
        ("memory_gib", "memory_gb", "did you mean 'memory_gib'?"),
        ("layout: BSND", "dtype: fp64", "--dtype (fp64) must be one that"),
        ("batch: 1", "seq-hist: h.txt", "one of --seq and --seq-hist must be given"),
        ("batch: 1", "documents: none.txt", "none.txt: cannot be read"),
    ):
        Path("c.yaml").write_text(YAML.replace(old, new))
        code, out, _ = run(capsys, "validate", "c.yaml", "--json")
        error = json.loads(out)["files"][0]["error"]
        assert (code, text in f"{error['message']}; {error['hint']}") == (2, True), error


def test_validate_of_a_config_imports_no_torch() -> None:
    """As an analytic search."""
    Path("c.yaml").write_text(YAML)
    code = (
        "import sys\nfrom hp_tune.cli import main\n"
        "try: main(['validate', 'c.yaml'])\nexcept SystemExit as stopped: assert not stopped.code\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600, capture_output=True)


def test_explain_takes_the_file_too(capsys: pytest.CaptureFixture[str]) -> None:
    """As the options of a search; its own ``--out`` and the variables are not those of search."""
    Path("c.yaml").write_text(YAML.replace("[32768, 65536]", "64K"))
    code, out, _ = run(capsys, "explain", "--config", "c.yaml")
    assert code == 0
    assert out.startswith("colossal u=1 load_balance is first of 3 for Qwen2.5-7B")
    code, _, err = run(capsys, "explain", "plan.json", "--config", "c.yaml")
    assert (code, "there is no plan plan.json" in err) == (2, True)
    searches(capsys, "--config", "c.yaml")
    code, _, err = run(capsys, "explain", "plan.json", "--config", "c.yaml")
    assert (code, "--config must be left out beside a plan" in err) == (2, True)
    Path("plan.json").unlink()
    assert run(capsys, "report", "--config", "c.yaml", "--lengths", "64K")[0] == 0
    assert Path("report.html").is_file()
    assert not Path("plan.json").exists()
