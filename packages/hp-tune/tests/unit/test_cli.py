"""The program: what it prints, what it exits with, what it never imports."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hp_tune.study.journal import locked
from hp_tune.study.studies import read_study

from ._program import empty_folder, run

QWEN = ["search", "--model", "Qwen2.5-7B", "--cluster", "atlas-800t-a2", "--cp", "8"]
SEARCH = [*QWEN, "--seq", "64K"]
WORKERS = 6


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test in an empty folder."""
    return empty_folder(tmp_path, monkeypatch)


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start ``python -m hp_tune`` beside us."""
    return subprocess.Popen(
        [sys.executable, "-m", "hp_tune", *arguments],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip


def test_search_prints_ranking_rejections_and_margin(capsys: pytest.CaptureFixture[str]) -> None:
    """The answer first, every rejected point with its rule, then how sure it is and where it is."""
    code, out, err = run(capsys, *SEARCH)

    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "model    Qwen2.5-7B: qwen2, 28 layers, H=28 Hkv=4 d=128"
    (first,) = [line for line in lines if line.startswith("   1  ")]
    assert "colossal u=1 load_balance" in first
    assert any(
        line.startswith("  V03  ulysses u=8: num_heads (28) must be divisible") for line in lines
    )
    assert any("use ulysses_degree=4 or 2, or 1 for Colossal" in line for line in lines)
    assert any(line.startswith("margin   rank 1 wins by 3") for line in lines)
    assert Path("plan.json").is_file()
    (study,) = Path(".hp-tune").glob("*.journal")
    assert len(read_study(study)[2]) >= 8


def test_json_is_one_object_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    """For programs: ranking, rejections with numbers, margin, digest."""
    code, out, _ = run(capsys, *SEARCH, "--json", "--out", "p.json", "--study", "s.journal")
    found = json.loads(out)

    assert code == 0
    assert found["ranking"][0]["config"] == {
        "ulysses_degree": 1,
        "load_balance": True,
        "overlap": False,
        "head_groups": 1,
        "keep_kv": True,
        "kv_chunks": 1,
        "balance_hybrid": False,
        "halo": 0,
        "gather": "kv",
    }
    assert {r["rule"] for r in found["rejected"]} == {"V03", "V05", "V09"}
    assert all(r["hint"] and r["numbers"] for r in found["rejected"])
    assert found["digest"] == json.loads(Path("p.json").read_text())["digest"]
    assert (found["plan"], found["study"]) == ("p.json", "s.journal")


def test_model_may_be_a_file_or_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    """A small local config on CPU ranks, as the demo has it."""
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 128,
        "vocab_size": 256,
    }  # fmt: skip
    Path("tiny").mkdir()
    Path("tiny/config.json").write_text(json.dumps(config))
    for model in ("tiny", "tiny/config.json"):
        code, out, _ = run(
            capsys, "search", "--model", model, "--cluster", "cpu-gloo", "--cp", "4",
            "--seq", "256", "--dtype", "fp64", "--layout", "bnsd",
        )  # fmt: skip
        assert code == 0
        assert out.startswith("model    tiny: llama, 2 layers, H=8 Hkv=2 d=8\n")
    assert json.loads(Path("plan.json").read_text())["entries"][0]["layout"] == "BNSD"


def test_same_command_gives_the_same_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Byte for byte, with and without a study that is there already."""
    run(capsys, *SEARCH)
    first = Path("plan.json").read_bytes()
    run(capsys, *SEARCH, "--out", "again.json")

    assert Path("again.json").read_bytes() == first


def test_nothing_valid_is_exit_three_with_the_whole_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An odd length: every point with its rule and the next good length; no plan is written."""
    code, out, err = run(capsys, *QWEN, "--seq", "65537")

    assert code == 3
    assert out.count("  V01  ") >= 4
    assert "pad the sequence to 65544 with pad_sequence" in out
    assert err.startswith("hp-tune: all ")
    assert not Path("plan.json").exists()
    code, out, err = run(capsys, *QWEN, "--seq", "65537", "--json")
    assert code == 3
    assert json.loads(out)["ranking"] == []
    assert json.loads(err)["id"] == "no-configuration"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([*SEARCH, "--model", "Qwen2.5-7"], 2, "did you mean Qwen2.5-7B"),
        ([*SEARCH, "--cluster", "atlas-800"], 2, "did you mean atlas-800t-a2"),
        ([*SEARCH, "--cp", "0"], 2, "'0' must be a whole number of at least 1"),
        ([*SEARCH, "--cp", "-4"], 2, "'-4' must be a whole number"),
        ([*SEARCH, "--seq", "12.5"], 2, "'12.5' must be a whole number"),
        ([*SEARCH, "--sq", "1"], 2, "No such option"),
        ([*SEARCH, "--dtype", "fp64"], 2, "--dtype (fp64) must be"),
        ([*SEARCH, "--layout", "BDSH"], 2, "--layout: layout"),
        ([*SEARCH, "--layout", "BSH"], 2, "must have a dim of heads"),
        ([*SEARCH, "--out", "none/plan.json"], 2, "cannot be written"),
        (["search"], 2, "Missing option '--model'"),
        (["serch"], 2, "No such command 'serch'; did you mean 'search'?"),
        (["sarch", "--model", "x"], 2, "did you mean 'search'?"),
        (["tune"], 2, "No such command 'tune'; commands: search, explain, report, show"),
        ([*SEARCH, "--modle", "x"], 2, "--model"),
        (["presets", "nothing"], 2, "there is no preset 'nothing'"),
        (["presets", "qwen2.5-7"], 2, "did you mean Qwen2.5-7B? presets: "),
        (["kernels"], 2, "--device must say where launches are tried"),
        (["show", "none.json"], 2, "there is no plan or study none.json"),
    ],
)
def test_wrong_use_is_one_message_and_exit_two(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, text: str
) -> None:
    """No traceback; with --json an object on stderr."""
    found, _, err = run(capsys, *arguments)

    assert found == code
    assert text in err
    assert "Traceback" not in err
    found, _, err = run(capsys, *arguments, "--json")
    assert found == code
    assert json.loads(err)["code"] == code


def test_a_study_of_another_search_is_exit_eight(capsys: pytest.CaptureFixture[str]) -> None:
    """The field that differs is named; the file stays."""
    run(capsys, *SEARCH, "--study", "s.journal")
    code, _, err = run(capsys, *SEARCH, "--study", "s.journal", "--batch", "2")

    assert code == 8
    assert "made from other inputs: workload.batch" in err


def test_presets_shows_files_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Search says where the numbers of its cluster are shown; it named a preset that was none."""
    cluster, config = tmp_path / "ours.yaml", tmp_path / "config.json"
    cluster.write_text("extends: atlas-800t-a2\nname: ours\ndevice: {launch_us: 7}\n")
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    config.write_text(json.dumps({"model_type": "x", **sizes}))

    code, out, _ = run(capsys, "presets", str(cluster))
    assert code == 0
    assert re.search(r"device.launch_us +7 +assumed", out)
    for path in (config, tmp_path):
        assert "2 x full: 4 heads" in run(capsys, "presets", str(path))[1]
    _, out, _ = run(
        capsys, "search", "--model", str(config), "--cluster", str(cluster), "--cp", "4",
        "--seq", "1K", "--out", str(tmp_path / "p.json"), "--study", str(tmp_path / "s.journal"),
    )  # fmt: skip
    assert "(hp-tune presets FILE)" in out


def test_presets_and_show_print_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Lists, one cluster with sources, one model, a plan, a study; each as JSON too."""
    code, out, _ = run(capsys, "presets")
    assert code == 0
    for name in ("Llama-3.1-8B", "Qwen3-8B", "hgx-h100", "cpu-gloo"):
        assert name in out
    _, out, _ = run(capsys, "presets", "hgx-h100")
    assert "measured" in out
    assert "nccl-tests" in out
    assert "32 x full: 32 heads, 8 KV heads" in run(capsys, "presets", "llama-3.1-8b")[1]
    run(capsys, *SEARCH, "--study", "s.journal")
    assert "ulysses_degree" in run(capsys, "show")[1]
    assert "V03: num_heads (28)" in run(capsys, "show", "s.journal")[1]
    for arguments in (["presets"], ["presets", "hgx-h100"], ["presets", "Qwen3-8B"],
                      ["show"], ["show", "s.journal"]):  # fmt: skip
        assert json.loads(run(capsys, *arguments, "--json")[1])
    Path("plan.json").write_text("{}")
    assert run(capsys, "show")[0] == 8


@pytest.mark.parametrize("arguments", [["--help"], ["search", "--help"], SEARCH])
def test_torch_is_never_imported(arguments: list[str]) -> None:
    """B25: help and an analytic search work where torch cannot be imported, and do not try."""
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'triton', 'torch_npu', 'transformers'):\n"
        "            raise AssertionError('imported ' + name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from hp_tune.cli import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit as stopped: code = stopped.code\n"
        "assert 'torch' not in sys.modules\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_import_takes_neither_optuna_nor_pydantic() -> None:
    """A training script that imports hp_tune pays for what it uses."""
    code = (
        "import sys, hp_tune\n"
        "for name in ('torch', 'optuna', 'pydantic', 'click', 'rich'):\n"
        "    assert name not in sys.modules, name\n"
        "hp_tune.load\n"
        "assert 'optuna' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_search_answers_in_about_the_time_that_optuna_takes_to_import() -> None:
    """CPU time, the best of some, interleaved with `import optuna`: at most twice as much."""

    def seconds(*command: str) -> float:
        before = os.times()
        subprocess.run([sys.executable, *command], check=True, capture_output=True, timeout=600)
        after = os.times()
        user = after.children_user - before.children_user
        return user + after.children_system - before.children_system

    pairs: list[tuple[float, float]] = []
    for _ in range(9):  # neighbours on the machine make single ones slow
        pairs.append((seconds("-m", "hp_tune", *SEARCH), seconds("-c", "import optuna")))
        search, optuna = (min(times) for times in zip(*pairs, strict=True))
        if len(pairs) >= 3 and search <= 2 * optuna:
            break
    assert search <= 2 * optuna


def test_many_workers_on_one_new_study(folder: Path) -> None:
    """B22: all exit 0 without a traceback, and every point is there exactly once."""
    command = [*SEARCH, "--study", "s.journal"]
    workers = [start(*command, "--out", f"{i}.json", cwd=folder) for i in range(WORKERS)]
    results = [worker.communicate(timeout=600) for worker in workers]

    assert [worker.returncode for worker in workers] == [0] * WORKERS, results
    assert all("Traceback" not in err for _, err in results)
    points = Counter(t.user_attrs["point"] for t in read_study(folder / "s.journal")[2])
    assert set(points.values()) == {1}
    assert len(points) >= 8
    added = [int(out.split(" added")[0].split()[-1]) for out, _ in results]
    assert sum(added) == len(points)
    assert len({(folder / f"{i}.json").read_bytes() for i in range(WORKERS)}) == 1


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"]
)
def test_a_signal_ends_the_search_without_a_traceback(
    folder: Path, number: signal.Signals, code: int
) -> None:
    """B23: while it waits for the study; the resume command is printed, and it works."""
    command = [*SEARCH, "--study", "s.journal"]
    with locked(folder / "s.journal"):
        worker = start(*command, cwd=folder)
        assert worker.stderr is not None
        assert "waiting for process" in worker.stderr.readline()
        worker.send_signal(number)
        _, err = worker.communicate(timeout=600)
    assert worker.returncode == code
    assert "Traceback" not in err
    assert f"resume with: hp-tune {' '.join(command)}" in err
    again = start(*command, cwd=folder)
    again.communicate(timeout=600)
    assert again.returncode == 0


def test_a_killed_search_resumes_with_nothing_lost_or_repeated(folder: Path) -> None:
    """SIGKILL at several moments; the same command then has every point exactly once."""
    command = [*SEARCH, "--study", "s.journal"]
    for delay in (0.4, 0.6, 0.8):
        worker = start(*command, cwd=folder)
        time.sleep(delay)
        worker.kill()
        worker.communicate(timeout=600)
    last = start(*command, cwd=folder)
    out, err = last.communicate(timeout=600)

    assert last.returncode == 0, err
    points = Counter(t.user_attrs["point"] for t in read_study(folder / "s.journal")[2])
    assert set(points.values()) == {1}
    assert f"space    {len(points)} points" in out


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the package, or that it is a checkout."""
    code, out, err = run(capsys, "--version")
    assert (code, err) == (0, "")
    assert out.startswith("hp-tune ")
