"""Output that nobody reads, closed streams, a bare environment: the exit code is the right one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

QWEN = ["search", "--model", "Qwen2.5-7B", "--cluster", "atlas-800t-a2", "--cp", "8"]
SEARCH = [*QWEN, "--seq", "64K"]
PROGRAM = [sys.executable, "-m", "hp_tune"]


@pytest.fixture(autouse=True)
def _buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that hold what could not be written until the end, as they do by default."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)


@pytest.fixture
def unread() -> Iterator[int]:
    """The writing end of a pipe whose reader has gone."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["presets"], 0),
        ([*SEARCH, "--json"], 0),
        (["explain", *SEARCH[1:], "--json"], 0),
        ([*QWEN, "--seq", "65537", "--json"], 3),
        ([*QWEN, "--seq", "65537"], 3),
        (["show", "none.json"], 2),
        (["--help"], 0),
    ],
    ids=lambda value: value if isinstance(value, int) else "-".join(value[:1] + value[-1:]),
)
def test_a_reader_that_has_gone_is_no_error_of_ours(
    tmp_path: Path, unread: int, arguments: list[str], code: int
) -> None:
    """As in ``hp-tune presets | head -1``: no traceback; what went wrong before still counts."""
    done = subprocess.run(
        [*PROGRAM, *arguments], cwd=tmp_path, stdout=unread, stderr=subprocess.PIPE, text=True,
        timeout=600, check=False,
    )  # fmt: skip

    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    if arguments[0] == "search" and code == 0:
        assert (tmp_path / "plan.json").is_file(), "the work is done all the same"


@pytest.mark.parametrize(("arguments", "code"), [(SEARCH, 0), (["show", "none.json"], 2)])
def test_a_reader_of_both_streams_that_has_gone_changes_no_exit_code(
    tmp_path: Path, unread: int, arguments: list[str], code: int
) -> None:
    """What stderr still holds is dropped: Python would try to write it, and exit with 120."""
    done = subprocess.run(
        [*PROGRAM, *arguments], cwd=tmp_path, stdout=unread, stderr=unread, timeout=600,
        check=False,
    )  # fmt: skip

    assert done.returncode == code


@pytest.mark.parametrize("closed", ["<&- >&-", "2>&-"])
@pytest.mark.parametrize(("arguments", "code"), [(SEARCH, 0), (["show", "none.json"], 2)])
def test_closed_streams_change_no_exit_code(
    tmp_path: Path, closed: str, arguments: list[str], code: int
) -> None:
    """Where Python has no stream at all, words go nowhere; nothing of stderr lands on stdout."""
    command = f'"$0" -m hp_tune {" ".join(arguments)} {closed}'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable], cwd=tmp_path, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip

    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    if closed == "2>&-":
        assert "no plan or study" not in done.stdout
    assert (tmp_path / "plan.json").is_file() == (code == 0)


def test_a_bare_environment_is_enough(tmp_path: Path) -> None:
    """No HOME, no terminal, a locale of ASCII alone, odd COLUMNS: tables, JSON and a page."""
    bare = {
        "PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "LC_ALL": "C",
        "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "COLUMNS": "wide", "TERM": "dumb",
    }  # fmt: skip
    for arguments in (SEARCH, ["show"], ["report", "--lengths", "64K"], ["explain", "--json"],
                      ["presets", "atlas-800t-a2"]):  # fmt: skip
        done = subprocess.run(
            [*PROGRAM, *arguments], cwd=tmp_path, capture_output=True, timeout=600, env=bare,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, (arguments, done.stderr)
        assert done.stdout
        if arguments == ["explain", "--json"]:
            assert json.loads(done.stdout)["winner"]["label"] == "colossal u=1 load_balance"


def test_a_name_that_the_encoding_lacks_is_written_as_an_escape(tmp_path: Path) -> None:
    """A folder of a model in another alphabet, under a locale of ASCII."""
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
    }  # fmt: skip
    folder = tmp_path / "модель"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    bare = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for more in ([], ["--seq", "7"]):
        done = subprocess.run(
            [*PROGRAM, "search", "--model", ".", "--cluster", "hgx-h100", "--cp", "2", "--seq",
             "8K", *more], cwd=folder, capture_output=True, text=True, timeout=600, env=bare,
            check=False,
        )  # fmt: skip
        assert (done.returncode, "Traceback" in done.stderr) == (3 if more else 0, False)
        assert done.stdout.startswith("model    \\u")
