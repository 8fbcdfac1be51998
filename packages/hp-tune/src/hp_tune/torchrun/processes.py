"""The processes of a job on this machine: started, ended whatever happens, and gone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from hp_tune.errors import UsageError
from hp_tune.torchrun.hosts import WHAT_A_HOST_IS
from hp_tune.torchrun.job import local_ranks

__all__ = ["POLL_S", "await_ranks", "end", "is_running", "start"]

GRACE_S = 3.0
"""How long torchrun may take to end its ranks before it is killed, and they with it."""

GONE_S = 60.0
"""How long a rank that was killed may take to be gone, on a busy machine; most are at once."""

POLL_S = 0.05
"""Between two looks at them."""


def start(command: list[str], folder: Path, index: int) -> subprocess.Popen[bytes]:
    """Start the torchrun of node ``index``, which ends when its stdin does."""
    with (
        (folder / f"node{index}.out").open("wb") as out,
        (folder / f"node{index}.err").open("wb") as err,
    ):
        try:
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=err, start_new_session=True
            )
        except OSError as error:
            raise UsageError(
                f"host {index}: {command[0]} cannot be run: {error.strerror}", WHAT_A_HOST_IS
            ) from None


def end(nodes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End every node: SIGTERM, then its stdin closes, then SIGKILL."""
    try:
        _signal(nodes, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while any(node.poll() is None for node in nodes) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    finally:
        for node in nodes:
            assert node.stdin is not None, "a pipe"
            node.stdin.close()
        _signal(nodes, signal.SIGKILL)
        for node in nodes:
            node.wait()


def _signal(nodes: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for node in nodes:
        if node.poll() is None:
            # another user's (sudo): it ends when its stdin does
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(node.pid, number)


def await_ranks(folder: Path) -> None:
    """Wait until the ranks on this machine are gone, they and the memory that they held."""
    deadline = time.monotonic() + GONE_S
    for pid in local_ranks(folder):
        while is_running(pid) and time.monotonic() < deadline:
            time.sleep(POLL_S)


def is_running(pid: int) -> bool:
    """Return whether a process has not ended; one that has may wait for who asks for its code."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
