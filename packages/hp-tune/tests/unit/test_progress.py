"""The bar on stderr: on a terminal only, and never a word of it on stdout."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("_fake_search.py")
SEARCH = [
    "search", "--model", "Qwen2.5-7B", "--cluster", "atlas-800t-a2", "--cp", "8", "--seq", "64K",
    "--space", "overlap=off", "--json",
]  # fmt: skip
MEASURED = [*SEARCH, "--mode", "measured"]
LINE = re.compile(r"hp-tune: trial (\d) of 4: .* ms, predicted .* ms")


def on_terminal(*arguments: str, folder: Path, seconds: float = 0.3) -> tuple[int, str, str]:
    """Run with a terminal as stderr; return exit code, stdout, and all that the terminal got."""
    ours, theirs = pty.openpty()
    seen: list[bytes] = []

    def read() -> None:
        try:
            while found := os.read(ours, 4096):
                seen.append(found)
        except OSError:  # Linux: the last process has closed its end
            pass

    worker = subprocess.Popen(
        [sys.executable, str(PROGRAM), "log", str(seconds), "0", *arguments],
        cwd=folder, stdout=subprocess.PIPE, stderr=theirs, text=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )  # fmt: skip
    os.close(theirs)
    reader = threading.Thread(target=read)
    reader.start()
    out, _ = worker.communicate(timeout=600)
    reader.join(timeout=600)
    os.close(ours)
    return worker.returncode, out, b"".join(seen).decode()


def test_a_measured_search_shows_how_far_it_is(tmp_path: Path) -> None:
    """Which one runs, done of all, time left; sentences above; the result alone on stdout."""
    code, out, screen = on_terminal(*MEASURED, folder=tmp_path)

    assert code == 0
    assert json.loads(out)["mode"] == "measured"
    for words in ("searching: ", "colossal u=1 load_balance", "0/4", "3/4", "left", "finals of"):
        assert words in screen, words
    assert re.search(r"0:00:0\d", screen), "elapsed, and left"
    assert re.search(r"finals of \d .* 0/1 0:00:0\d left -:--:--", bare(screen)), "not known yet"
    assert [match[1] for match in LINE.finditer(screen)] == ["1", "2", "3", "4"]
    assert "\x1b[?25h" in screen, "the cursor is given back"


def test_without_a_terminal_there_is_one_line_per_trial_and_no_more(tmp_path: Path) -> None:
    """No escape sequence, no bar; ``--quiet`` says nothing, on a terminal too."""
    command = [sys.executable, str(PROGRAM), "log", "0", "0", *MEASURED]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)

    assert done.returncode == 0
    assert json.loads(done.stdout)["mode"] == "measured"
    assert "\x1b" not in done.stderr
    assert [match[1] for match in LINE.finditer(done.stderr)] == ["1", "2", "3", "4"]
    assert len(done.stderr.splitlines()) == 5, "four trials and the finals"
    code, out, screen = on_terminal(*MEASURED, "--quiet", "--study", "q", folder=tmp_path)
    assert (code, screen) == (0, "")
    assert json.loads(out)["mode"] == "measured"


def bare(screen: str) -> str:
    """What a terminal got, without colours and movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen)


@pytest.mark.parametrize("more", [[], ["--kernels", "ascend910b3"]])
def test_an_analytic_search_shows_a_bar_for_the_launches_alone(
    tmp_path: Path, more: list[str]
) -> None:
    """A ranking is there at once; thousands of launches are not."""
    code, out, screen = on_terminal(*SEARCH, *more, folder=tmp_path)

    assert code == 0
    assert json.loads(out)["mode"] == "analytic"
    assert ("points recorded" in screen) == bool(more)
    assert bool(screen) == bool(more)
