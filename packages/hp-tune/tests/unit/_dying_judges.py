"""Judges that a worker's process opens by name; it imports nothing that they do not need."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hp_tune.errors import MissingToolsError
from hp_tune.kernels.devices import Asked
from hp_tune.kernels.shapes import Shape
from hp_tune.kernels.verdict import Facts, Mode, Verdict


class DyingJudge:
    """Dies, hangs or loses its device, as the tile says."""

    def open(self, asked: Asked, mode: Mode) -> Facts:
        return Facts("cuda-sm90", "cuda", "a stand-in")

    def judge(self, kernel: str, shape: Shape, launch: Mapping[str, int]) -> Verdict:
        if launch["tile"] == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if launch["tile"] == 2:
            signal.pause()
        if launch["tile"] == 5:  # the compiler that it would wait for
            child = subprocess.Popen(["sleep", "3600"])
            Path("child.pid").write_text(str(child.pid))
        print("noise of a compiler")  # noqa: T201
        return Verdict("complete", float(os.getpid()), broken=launch["tile"] == 3)

    def close(self) -> None:
        """Nothing is open."""


class MissingJudge(DyingJudge):
    """Finds no device."""

    def open(self, asked: Asked, mode: Mode) -> Facts:
        raise MissingToolsError("no device", "bring one")
