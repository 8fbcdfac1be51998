"""Who works, who waits: of tasks that have not answered, whether any still does something."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["GRACE", "POLL", "Stillness"]

GRACE = 3.0
"""Seconds for which ranks must stand still, after another has raised, to count as left waiting."""

POLL = 0.05
"""Seconds between two looks at them."""

_TELLING = ("State", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")


class Stillness:
    """For how long none of some tasks has run, as Linux tells it.

    A thread that waits in a collective sleeps and is never switched to. One that is only slow runs,
    or stands in the queue for a core, however busy the machine is. Where the system does not tell,
    a task counts as still.

    Args:
        tasks: Of each, the process and the thread (native number); for None it counts as still.
    """

    def __init__(self, tasks: Mapping[int, tuple[int, int | None]]) -> None:
        self._tasks = tasks
        self._seen: dict[int, tuple[str, ...]] = {}
        self._since = time.monotonic()

    def seconds(self, ranks: Iterable[int]) -> float:
        """Return for how many seconds all of ``ranks`` have been still; call it again and again."""
        seen = {rank: _state(*self._tasks[rank]) for rank in ranks}
        moved = any(
            state and (state[0].startswith(("R", "D")) or state != self._seen.get(rank, state))
            for rank, state in seen.items()
        )
        self._seen = seen
        if moved:
            self._since = time.monotonic()
        return time.monotonic() - self._since


def _state(process: int, thread: int | None) -> tuple[str, ...]:
    """Return the state of a task and how often it was switched to and from; empty if unknown."""
    try:
        lines = Path(f"/proc/{process}/task/{thread}/status").read_text().splitlines()
    except OSError:
        return ()
    fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return tuple(fields.get(name, "") for name in _TELLING)
