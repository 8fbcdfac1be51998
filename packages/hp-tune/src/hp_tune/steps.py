"""How far work is, for who waits for it."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Step", "no_step"]

Step = Callable[[str, int, int], None]
"""Receives what is worked on now, how many are done, and of how many."""


def no_step(what: str, done: int, total: int) -> None:
    """Show nothing."""
