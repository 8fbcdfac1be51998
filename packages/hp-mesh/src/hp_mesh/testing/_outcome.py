"""What one rank's call came to, and how all ranks' calls are reported as one error."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Outcome", "RankError", "RankTimeout", "raise_first", "stack_of"]


class RankError(RuntimeError):
    """At least one rank raised or did not return in time.

    Attributes:
        rank: The rank that failed first in time; its exception is the ``__cause__``.
        errors: One exception or None for each rank.
    """

    def __init__(self, message: str, rank: int, errors: Sequence[BaseException | None]) -> None:
        super().__init__(message)
        self.rank = rank
        self.errors = list(errors)


class RankTimeout(TimeoutError):
    """A rank did not return before the deadline, or was left waiting for one that raised."""


@dataclass(slots=True)
class Outcome:
    """The result or the exception of one rank, and when it came; ``lost`` if the rank is."""

    value: Any = None
    error: BaseException | None = None
    text: str = ""
    time: float = field(default_factory=time.monotonic)
    lost: bool = False

    @staticmethod
    def of(call: Callable[[], Any]) -> Outcome:
        """Run ``call`` and keep what comes of it; pytest's skip and KeyboardInterrupt included."""
        try:
            return Outcome(call())
        except BaseException as error:
            return Outcome(error=error, text=traceback.format_exc())

    @staticmethod
    def hung(where: str) -> Outcome:
        """Describe a rank that has not answered; ``where`` is the stack it was seen in."""
        error = RankTimeout(f"no answer in time; last seen in:\n{where}")
        return Outcome(error=error, text=str(error), time=float("inf"), lost=True)


def stack_of(thread_ident: int | None) -> str:
    """Return the stack that a thread is in now, as text."""
    frame = sys._current_frames().get(thread_ident or 0)
    return "".join(traceback.format_stack(frame)) if frame else "(the thread has ended)"


def raise_first(outcomes: Sequence[Outcome], name: str) -> list[Any]:
    """Return the values of all ranks, or raise `RankError` from the failure that came first."""
    failed = [rank for rank, outcome in enumerate(outcomes) if outcome.error is not None]
    if not failed:
        return [outcome.value for outcome in outcomes]
    errors = [outcome.error for outcome in outcomes]
    first = min(failed, key=lambda rank: outcomes[rank].time)
    cause = errors[first]
    if cause is not None and not isinstance(cause, Exception):
        raise cause  # a skip, an interrupt: not ours to wrap
    parts = [f"{name}: rank {first} failed first ({type(cause).__name__}: {cause})"]
    parts += [f"--- rank {rank} ---\n{outcomes[rank].text.rstrip()}" for rank in failed]
    raise RankError("\n".join(parts), first, errors) from cause
