"""Hold signals back while a study is changed.

A signal handler that raises may do so between any two steps of Python, also between taking a lock
and the block that would give it back. What then has to record the interruption would wait for
itself.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["Shield"]


class Shield:
    """While it is up, SIGINT and SIGTERM are noted; when it goes down the last of them is raised.

    Off the main thread, which alone runs handlers, it does nothing.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        self._pending: int | None = None

    def up(self) -> None:
        """Hold signals back."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._keep)

    def down(self) -> None:
        """Let signals through, and the one that was held back first."""
        previous, self._previous = self._previous, {}
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        pending, self._pending = self._pending, None
        if pending is not None:
            signal.raise_signal(pending)

    def _keep(self, number: int, frame: FrameType | None) -> None:
        self._pending = number
