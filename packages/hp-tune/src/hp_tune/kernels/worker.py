"""Judge launches in a process of its own, which may hang, crash or lose its device.

A kernel that reads beyond its tensors takes the device context with it, a compiler can hang: the
process is then ended and the next launch finds a new one. The parent imports no torch.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from hp_tune.errors import MissingToolsError
from hp_tune.kernels.devices import Asked
from hp_tune.kernels.shapes import Shape
from hp_tune.kernels.verdict import Facts, Judge, Mode, Verdict

__all__ = ["Worker"]

START_S = 300.0
"""To import torch and triton and open a device, on a busy machine."""
GRACE_S = 30.0


class Worker:
    """A `Judge` in another process.

    Args:
        timeout_s: For one launch, its compilation included.
        judge: Dotted name of the class that judges there.
    """

    def __init__(self, timeout_s: float, judge: str = "hp_tune.kernels.judges.LocalJudge") -> None:
        self.timeout_s = timeout_s
        self._judge = judge
        self._opened: tuple[Asked, Mode] | None = None
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def open(self, asked: Asked, mode: Mode) -> Facts:
        """See `Judge.open`."""
        self._opened = (asked, mode)
        return self._start()

    def judge(self, kernel: str, shape: Shape, launch: Mapping[str, int]) -> Verdict:
        """See `Judge.judge`; a process that does not answer in time is ended."""
        if self._pipe is None:
            self._start()
        assert self._pipe is not None, "a process that was started has a pipe"
        try:
            self._pipe.send(("judge", kernel, shape, dict(launch)))
            if not self._pipe.poll(self.timeout_s):
                self.close()
                return Verdict(
                    "failed", rule="time", reason=f"no answer after {self.timeout_s:g} s"
                )
            verdict: Verdict = self._pipe.recv()
        except (EOFError, OSError):
            return Verdict("failed", rule="crash", reason=self._ended())
        if verdict.broken:
            self.close()
        return verdict

    def close(self) -> None:
        """End the process, and those that it started."""
        process, self._process = self._process, None
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close()
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # and the compiler that it may wait for
        process.kill()  # it may not have had a group of its own yet
        process.join(GRACE_S)

    def _start(self) -> Facts:
        assert self._opened is not None, "open comes first"
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, self._judge, *self._opened), daemon=True
        )
        self._process.start()
        theirs.close()
        try:
            if not self._pipe.poll(START_S):
                raise MissingToolsError(f"the device did not answer after {START_S:g} s")
            answer: Any = self._pipe.recv()
        except EOFError:
            raise MissingToolsError(
                f"the process that opens the device must answer, and {self._ended()}",
                "see what it wrote above",
            ) from None
        except BaseException:  # Ctrl-C too: no process may stay behind; raised again below
            self.close()
            raise
        if isinstance(answer, Facts):
            return answer
        self.close()
        raise MissingToolsError(*answer)

    def _ended(self) -> str:
        """Return how the process ended, and clear it away."""
        process = self._process
        code = None
        if process is not None:
            process.join(GRACE_S)
            code = process.exitcode
        self.close()
        if code is not None and code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with {code}"


def serve(pipe: Connection, judge: str, asked: Asked, mode: Mode) -> None:
    """Answer from the process's side of ``pipe`` until it closes."""
    os.setsid()  # the parent decides what an interrupt means, and ends all of us at once
    sys.stdout = sys.stderr  # stdout is the parent's, and may be JSON
    os.environ.setdefault("TORCH_SHOW_CPP_STACKTRACES", "0")
    module, _, name = judge.rpartition(".")
    try:
        judging: Judge = getattr(__import__(module, fromlist=[name]), name)()
        pipe.send(judging.open(asked, mode))
    except MissingToolsError as error:
        pipe.send((error.message, error.hint))
        return
    while True:
        try:
            _, kernel, shape, launch = pipe.recv()
        except EOFError:
            return
        pipe.send(judging.judge(kernel, shape, launch))
