"""The promise of a result that is still on the wire."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from hp_comm.moves import Pending

__all__ = ["Handle"]

T = TypeVar("T")


class Handle(Generic[T]):
    """What ``async_op=True`` returns: the collective runs, `wait` gives its result.

    The handle owns the buffers on the wire. Everything that touches the received data, layout
    included, happens in `wait`, so nothing can read it too early. Handles may be waited for in
    any order.
    """

    def __init__(self, where: str, pending: Pending | None, result: Callable[[], T]) -> None:
        self._where = where
        self._pending = pending
        self._result: Callable[[], T] | None = result
        self._value: T | None = None
        self._error: Exception | None = None

    @classmethod
    def ready(cls, where: str, value: T) -> Handle[T]:
        """Return a handle whose result is known: nothing was sent."""
        handle = cls(where, None, lambda: value)
        handle.wait()
        return handle

    def wait(self) -> T:
        """Return the finished result; a second call returns the same object, or fails alike."""
        if self._error is not None:
            raise self._error
        if self._result is not None:
            result, self._result, self._pending = self._result, None, None
            try:
                self._value = result()
            except Exception as error:
                self._error = error
                raise
        return cast(T, self._value)

    def done(self) -> bool:
        """Say, without waiting, whether `wait` would return at once.

        Some backends learn that a send or a receive has ended only when it is waited for.
        """
        return self._pending is None or self._pending.done()

    def __del__(self) -> None:
        pending = getattr(self, "_pending", None)
        if pending is None or sys.is_finalizing():
            return
        self._pending = None
        try:
            pending.abandon()
        finally:
            warnings.warn(
                f"{self._where}: a handle was dropped before wait(); its exchange was completed "
                "and the result thrown away; keep the handle and call wait() where the result is "
                "used",
                RuntimeWarning,
                stacklevel=2,
            )
