"""Processes that can be found again: they carry a mark in their environment."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path

JOBS = Path(__file__).parent / "jobs"


class Marked:
    """A mark, and the environment that carries it; modules of ``jobs`` can be imported there."""

    def __init__(self) -> None:
        self.mark = f"HP_TUNE_TEST_MARK={uuid.uuid4()}"
        path = os.pathsep.join([str(JOBS), *filter(None, [os.environ.get("PYTHONPATH")])])
        name, _, value = self.mark.partition("=")
        self.environment = {"PYTHONPATH": path, name: value}

    def pids(self) -> list[int]:
        """Return those that run now, zombies not counted."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    marked = self.mark.encode() in (entry / "environ").read_bytes()
                except OSError:  # gone, or another user's
                    continue
                found += [int(entry.name)] if marked else []
        return found


def wait_for(what: Callable[[], bool], seconds: float = 300) -> bool:
    """Wait until something holds, and return whether it does."""
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.05)
    return what()
