"""What a job's folder says, how a command stands behind a host, and devices that are not here."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from hp_tune.errors import MissingToolsError, UsageError
from hp_tune.torchrun import Launcher
from hp_tune.torchrun.hosts import on_host
from hp_tune.torchrun.job import TAIL_BYTES, read_job, tail


def leave(folder: Path, name: str, **content: Any) -> None:
    """Write a JSON file as a rank or a node does."""
    (folder / name).write_text(json.dumps(content))


def test_the_first_failure_is_the_cause(tmp_path: Path) -> None:
    """A rank ended by torchrun is none; one that raised later is told later."""
    for rank, at in ((0, 7.5), (2, 7.25)):
        leave(
            tmp_path,
            f"rank{rank}.json",
            state="failed",
            error="RuntimeError",
            message="lost",
            at=at,
        )
    leave(tmp_path, "rank1.json", state="running", at=1.0)
    leave(tmp_path, "node0.json", exit_codes={"0": 1, "1": -signal.SIGTERM, "2": 1})
    (tmp_path / "rank2.err").write_text("Traceback\nRuntimeError: lost\n")
    job = read_job(tmp_path, 1, timed_out=False)
    assert [rank.rank for rank in job.failed_ranks] == [2, 0]
    assert job.stderr_tail == "Traceback\nRuntimeError: lost"
    assert str(job.failed_ranks[0]) == "rank 2 raised RuntimeError: lost"


def test_a_rank_that_was_killed_comes_before_those_that_missed_it(tmp_path: Path) -> None:
    """It cannot say when; that the others lost their connection is its doing."""
    leave(tmp_path, "rank0.json", state="failed", error="RuntimeError", message="closed", at=7.5)
    leave(tmp_path, "rank1.json", state="running", host="n1", at=1.0)
    leave(tmp_path, "node0.json", exit_codes={"0": 1, "1": -signal.SIGKILL})
    job = read_job(tmp_path, 1, timed_out=False)
    assert [rank.rank for rank in job.failed_ranks] == [1, 0]
    assert str(job.failed_ranks[0]) == "rank 1 on n1 ended with SIGKILL"


def test_half_written_or_missing_files_are_no_answer(tmp_path: Path) -> None:
    """Nothing here raises: a job that left nothing has failed, and that is all."""
    (tmp_path / "answer.json").write_text('{"a": ')
    job = read_job(tmp_path, 0, timed_out=False)
    assert job.answer is None
    assert not job.ok
    assert job.failed_ranks == ()


def test_a_tail_is_whole_lines(tmp_path: Path) -> None:
    """The end of a long log begins with the start of a line."""
    path = tmp_path / "log"
    path.write_text("".join(f"line {i:06}\n" for i in range(2000)))
    found = tail(path)
    assert found.endswith("line 001999")
    assert found.startswith("line ")
    assert len(found) < TAIL_BYTES


def test_a_host_is_what_stands_in_front_of_a_command() -> None:
    """ssh hands its words to a shell, so they are quoted for it; no other command does."""
    command = ["env", "A=b c", "python", "-m", "x"]
    assert on_host("", command) == command
    assert on_host("ip netns exec hp0 env G=v0", command) == [
        *["ip", "netns", "exec", "hp0", "env", "G=v0"], *command
    ]  # fmt: skip
    words = on_host("ssh -p 22 node1", command)
    assert words[:4] == ["ssh", "-p", "22", "node1"]
    assert shlex.split(words[4]) == command


@pytest.mark.parametrize(
    ("shell", "message"),
    [
        ("echo 0", "cuda-nccl: nproc_per_node (2) must be at most the devices on .* (0)"),
        ("echo 1", "cuda-nccl: nproc_per_node (2) must be at most the devices on .* (1)"),
        ("echo No module named torch >&2; exit 1", "not usable on .*: No module named torch"),
        ("exit 3", "not usable on .*: Python ended without a word"),
    ],
)
def test_a_node_without_the_devices_is_named_before_any_trial(shell: str, message: str) -> None:
    """The node is asked, not this machine; exit code 5."""
    host = shlex.join(["sh", "-c", shell])
    pattern = message.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(MissingToolsError, match=pattern) as caught:
        Launcher("cuda-nccl", 2, hosts=(host,)).check()
    assert caught.value.exit_code == 5


def test_a_node_with_the_devices_passes() -> None:
    """Two are enough for two; the CPU needs none."""
    Launcher("npu-hccl", 2, hosts=("sh -c 'echo a warning; echo 2'",)).check()
    Launcher("cpu-gloo", 99, hosts=("false",)).check()


def test_a_host_that_is_no_command_is_wrong_use(tmp_path: Path) -> None:
    """The sentence shows what a host looks like."""
    launcher = Launcher(nproc_per_node=2, hosts=("no-such-command-here",))
    with pytest.raises(UsageError, match="no-such-command-here cannot be run"):
        launcher.run("toy", {}, folder=tmp_path / "job", timeout=5)


def test_a_folder_that_cannot_be_written_is_wrong_use(tmp_path: Path) -> None:
    """A file is where the folder is to be."""
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written"):
        Launcher().run("toy", {}, folder=tmp_path / "file" / "job", timeout=5)


def test_an_address_is_asked_of_the_first_host(tmp_path: Path) -> None:
    """One that says none is wrong use."""
    launcher = Launcher(hosts=("sh -c 'exit 1'", ""))
    with pytest.raises(UsageError, match="does not say its address"):
        launcher.run("toy", {}, folder=tmp_path / "job", timeout=5)
    told = Launcher(hosts=("sh -c 'echo 10.9.9.1 fe80::1'", ""))
    command, _ = told._commands("toy", Path("f"), 0.0)[1]
    assert command[command.index("--master-addr") + 1] == "10.9.9.1"
    assert sys.executable in command


def test_a_host_that_cannot_be_asked_for_its_address_is_wrong_use(tmp_path: Path) -> None:
    """The first of several must say it; the sentence shows what a host looks like."""
    launcher = Launcher(hosts=("no-such-command-here", ""))
    with pytest.raises(UsageError, match=r"cannot be asked for its address.*; a host is a command"):
        launcher.run("toy", {}, folder=tmp_path / "job", timeout=5)


def test_a_host_with_an_open_quote_is_wrong_use(tmp_path: Path) -> None:
    """Whether the node is asked for its devices first or not."""
    problem = r"host .* must be words as a shell reads them: No closing quotation; a host is"
    with pytest.raises(UsageError, match=problem):
        Launcher("cuda-nccl", hosts=("ssh 'node1",)).check()
    with pytest.raises(UsageError, match=problem):
        Launcher(hosts=("ssh 'node1",)).run("toy", {}, folder=tmp_path / "job", timeout=5)
