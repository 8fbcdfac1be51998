"""Jobs under a real torchrun: what they leave behind is their folder, never a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hp_tune.torchrun import Job, Launcher
from hp_tune.torchrun.rank import NODE

from ._marked import JOBS, Marked, wait_for


def run(marked: Marked, do: str, folder: Path) -> Job:
    """Run the toy job on two ranks."""
    launcher = Launcher(nproc_per_node=2, env=marked.environment)
    return launcher.run("toy_job", {"do": do}, folder=folder, timeout=300)


@pytest.fixture
def marked() -> Marked:
    """A mark of its own for each test."""
    return Marked()


@pytest.fixture
def controller(marked: Marked, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program whose two ranks stay until it is ended; both have started."""
    with subprocess.Popen(
        [sys.executable, str(JOBS / "controller.py"), str(tmp_path / "job")],
        env={**os.environ, **marked.environment},
    ) as process:
        try:
            ranks = [tmp_path / "job" / f"rank{rank}.json" for rank in (0, 1)]
            assert wait_for(lambda: all(path.exists() for path in ranks))
            yield process
        finally:
            process.kill()


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
    marked: Marked, controller: subprocess.Popen[bytes], number: signal.Signals
) -> None:
    """A signal that can be caught ends the ranks first; after SIGKILL they end by themselves."""
    assert wait_for(lambda: len(marked.pids()) == 4), "controller, torchrun, two ranks"
    controller.send_signal(number)
    code = controller.wait(timeout=300)
    if number == signal.SIGKILL:
        assert wait_for(lambda: marked.pids() == [])
    else:
        assert code == 128 + number
    assert marked.pids() == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_rank_outlives_its_torchrun(
    marked: Marked, controller: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """torchrun killed by someone else: its ranks are in other sessions and end all the same."""
    rank = json.loads((tmp_path / "job" / "rank1.json").read_text())["pid"]
    torchrun = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
    assert torchrun != controller.pid
    os.kill(torchrun, signal.SIGKILL)
    assert controller.wait(timeout=300) == 0, "a failed job is an answer"
    assert marked.pids() == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_that_starts_after_its_torchrun_has_ended_ends_at_once(tmp_path: Path) -> None:
    """Its parent is another process then, which will not end with the job."""
    (tmp_path / "request.json").write_text('{"do": "stay"}')
    environment = {**os.environ, **Marked().environment, "RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "hp_tune.torchrun.rank", "toy_job", str(tmp_path / "request.json")],
        env={**environment, NODE: str(os.getppid())}, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["request.json"]
