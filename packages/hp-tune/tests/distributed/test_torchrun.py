"""Jobs under a real torchrun: what they leave behind is their folder, never a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hp_tune.torchrun import Job, Launcher

from ._marked import JOBS, Marked, wait_for


def run(marked: Marked, do: str, folder: Path) -> Job:
    """Run the toy job on two ranks."""
    launcher = Launcher(nproc_per_node=2, env=marked.environment)
    return launcher.run("toy_job", {"do": do}, folder=folder, timeout=60)


@pytest.fixture
def marked() -> Marked:
    """A mark of its own for each test."""
    return Marked()


def test_a_job_answers_in_a_folder_of_its_own(marked: Marked, tmp_path: Path) -> None:
    """Rank 0's answer comes back; what lay in the folder is gone; so is every process."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "answer.json").write_text('{"ranks": 99}')
    job = run(marked, "answer", tmp_path / "job")
    assert job.ok
    assert job.answer == {"ranks": 2, "backend": "cpu-gloo"}
    assert job.failed_ranks == ()
    states = {rank: json.loads((job.folder / f"rank{rank}.json").read_text()) for rank in (0, 1)}
    assert [states[rank]["state"] for rank in (0, 1)] == ["done", "done"]
    assert marked.pids() == []


def test_a_rank_that_raises_ends_the_job_with_its_traceback(marked: Marked, tmp_path: Path) -> None:
    """The others, which would wait for it, are ended."""
    job = run(marked, "raise", tmp_path / "job")
    assert not job.ok
    assert not job.timed_out
    (failed,) = job.failed_ranks
    assert (failed.rank, failed.error, failed.message) == (1, "RuntimeError", "out of luck")
    assert 'raise RuntimeError("out of luck")' in failed.traceback
    assert "RuntimeError: out of luck" in job.stderr_tail
    assert marked.pids() == []


def test_a_rank_that_a_signal_ends_is_told_by_name(marked: Marked, tmp_path: Path) -> None:
    """SIGKILL leaves no traceback, as when the kernel runs out of memory; torchrun saw it."""
    job = run(marked, "die", tmp_path / "job")
    (failed,) = job.failed_ranks
    assert (failed.rank, failed.exit_code, failed.message) == (1, -signal.SIGKILL, "SIGKILL")
    assert marked.pids() == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_its_controller(
    marked: Marked, tmp_path: Path, number: signal.Signals
) -> None:
    """A signal that can be caught ends the ranks first; after SIGKILL they end by themselves."""
    process = subprocess.Popen(
        [sys.executable, str(JOBS / "controller.py"), str(tmp_path / "job")],
        env={**os.environ, **marked.environment},
    )
    ranks = [tmp_path / "job" / f"rank{rank}.json" for rank in (0, 1)]
    assert wait_for(lambda: all(path.exists() for path in ranks))
    assert len(marked.pids()) == 4, "controller, torchrun, two ranks"
    process.send_signal(number)
    code = process.wait(timeout=30)
    if number == signal.SIGKILL:
        assert wait_for(lambda: marked.pids() == [], 10)
    else:
        assert code == 128 + number
    assert marked.pids() == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_rank_outlives_its_torchrun(marked: Marked, tmp_path: Path) -> None:
    """torchrun killed by someone else: its ranks are in other sessions and end all the same."""
    process = subprocess.Popen(
        [sys.executable, str(JOBS / "controller.py"), str(tmp_path / "job")],
        env={**os.environ, **marked.environment},
    )
    path = tmp_path / "job" / "rank1.json"
    assert wait_for(path.exists)
    rank = json.loads(path.read_text())["pid"]
    torchrun = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
    assert torchrun != process.pid
    os.kill(torchrun, signal.SIGKILL)
    assert process.wait(timeout=30) == 0, "a failed job is an answer"
    assert marked.pids() == []
