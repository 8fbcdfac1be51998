"""`ranks(n)`: n ranks with a real gloo group, started once and kept for the test session.

A test hands over a function and gets a list with one result per rank::

    def test_sums():
        assert ranks(3).run(lambda rank: all_reduced(rank)) == [3, 3, 3]

Threads (the default) take any callable and any argument, by reference. What is global to a process
is shared by them: torch's CPU generator (make data with `hp_mesh.testing.randn`, which is seeded
by value), warning filters, environment variables. Process groups and meshes end with the call that
made them. ``backend="processes"`` is for what threads can't show; its function must stand at the
top level of a file, arguments and results are pickled.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from hp_mesh.checks import fail, require_positive
from hp_mesh.testing._outcome import Outcome, raise_first

__all__ = ["Pool", "ranks"]

Backend = Literal["threads", "processes"]

TIMEOUT = 300.0
"""Seconds that a call may take by default: a busy machine is not a hang."""

GROUP_TIMEOUTS: dict[Backend, float] = {"threads": 60.0, "processes": 300.0}
"""Seconds after which a collective that lacks a rank fails by itself; threads cannot be ended."""


class _Ranks(Protocol):
    def call(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], timeout: float
    ) -> list[Outcome]: ...
    def renew(self, outcomes: Sequence[Outcome]) -> bool: ...
    def close(self) -> None: ...
    def join(self, timeout: float) -> None: ...


class Pool:
    """The ranks of one world size; get it from `ranks`.

    Attributes:
        size: Number of ranks.
        backend: ``"threads"`` or ``"processes"``.
        timeout: Seconds that a call may take unless it says otherwise.
    """

    def __init__(self, size: int, backend: Backend, timeout: float) -> None:
        self.size = size
        self.backend = backend
        self.timeout = timeout
        self._ranks: _Ranks | None = None

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Return ``[fn(rank, *args, **kwargs) for every rank]``, run at the same time.

        Raises:
            RankError: A rank raised or did not return within ``timeout`` seconds. It is raised from
                the exception that came first and shows the tracebacks of all ranks.
        """
        return raise_first(self._call(fn, args, kwargs, timeout), _name(fn))

    def errors(
        self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[BaseException | None]:
        """Return what each rank raised, None where it returned.

        A rank that hung, or did nothing but wait for one that raised, gets a `RankTimeout` with its
        stack.
        """
        return [outcome.error for outcome in self._call(fn, args, kwargs, timeout)]

    def close(self) -> None:
        """End the ranks; the next call starts new ones."""
        if self._ranks is not None:
            ended, self._ranks = self._ranks, None
            ended.close()

    def _call(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        timeout: float | None,
    ) -> list[Outcome]:
        limit = self.timeout if timeout is None else timeout
        if self._ranks is None:
            self._ranks = self._start()
        try:
            outcomes = self._ranks.call(fn, args, kwargs, limit)
        except BaseException:
            self.close()
            raise
        failed = any(outcome.error is not None for outcome in outcomes)
        # ranks may have stopped at different collectives: never reuse such a group
        if failed and not self._ranks.renew(outcomes):
            self.close()
        return outcomes

    def _start(self) -> _Ranks:
        if self.backend == "threads":
            from hp_mesh.testing._threads import RankThreads

            return RankThreads(self.size, group_timeout=GROUP_TIMEOUTS[self.backend])
        from hp_mesh.testing._processes import RankProcesses

        return RankProcesses(self.size, group_timeout=GROUP_TIMEOUTS[self.backend])


def ranks(n: int, *, backend: Backend = "threads", timeout: float = TIMEOUT) -> Pool:
    """Return the pool of ``n`` ranks, the same one each time in this session.

    Args:
        n: World size.
        backend: ``"threads"`` of this process, or spawned ``"processes"`` (seconds to start).
        timeout: Seconds that each call may take unless `Pool.run` is told otherwise.
    """
    require_positive("ranks", "n", n)
    if backend not in ("threads", "processes"):
        raise fail("ranks", f'backend ({backend!r}) must be "threads" or "processes"')
    pool = _pool(n, backend)
    pool.timeout = timeout
    return pool


@functools.cache
def _pool(n: int, backend: Backend) -> Pool:
    pool = Pool(n, backend, TIMEOUT)
    atexit.register(_end, pool)
    return pool


def _end(pool: Pool) -> None:
    """Close at exit and wait a moment: a gloo thread that outlives the interpreter crashes it."""
    ended = pool._ranks
    pool.close()
    if ended is not None:
        ended.join(30.0)


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))
