"""Ranks as threads: the one place where torch's private names for that are used.

Each thread gets its own world (`torch.distributed`'s globals become thread-local) and a real gloo
process group over loopback, so that uneven all-to-all, p2p, autograd, DTensor and FSDP2 behave as
they do between processes, at the price of a few milliseconds a rank.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from hp_mesh.testing._outcome import Outcome, stack_of
from hp_mesh.testing._stillness import GRACE, POLL, Stillness

__all__ = ["RankThreads"]

_installed = threading.Lock()
_here = threading.local()
_tokens = itertools.count(1)


def _thread_local_world() -> None:
    """Make the process groups of `torch.distributed` thread-local, once for this process."""
    from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

    with _installed:
        if isinstance(distributed_c10d._world, ThreadLocalWorld):
            return
        if dist.is_initialized():
            raise RuntimeError(
                "ranks: this process already has a default process group, which threads would "
                'hide; destroy it first, or use ranks(n, backend="processes")'
            )
        distributed_c10d._world = ThreadLocalWorld()  # type: ignore[assignment]
        # group names repeat in every thread ("0", "1", ...), so their registry must be per thread
        c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
        _tell_meshes_of_threads_apart()
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _tell_meshes_of_threads_apart() -> None:
    """Put thread and call into a mesh's hash and equality, as torch does for its thread backend.

    Caches keyed by mesh (DTensor has many) hold what depends on the rank and on the groups; without
    this rank 1 would be served what rank 0 computed, or a call the ended groups of an earlier one.
    """
    build = DeviceMesh.__init__

    @functools.wraps(build)
    def build_and_mark(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        token: int | None = getattr(_here, "token", None)
        if token is not None:
            self._thread_id = token
            self._hash = None
            _here.meshes.append(weakref.ref(self))

    DeviceMesh.__init__ = build_and_mark  # type: ignore[method-assign]


@functools.cache
def _resolve_collectives() -> None:
    """Make Python's handles of torch's collectives, before any thread asks for one.

    Two threads that see an operator for the first time under a dispatch mode make one each, and the
    one that torch forgets is still called by the other thread: a segmentation fault.
    """
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        if namespace == "c10d":
            operator, _, overload = rest.partition(".")
            getattr(getattr(torch.ops.c10d, operator), overload or "default")


class RankThreads:
    """``size`` threads that wait for work, each with its own default gloo group.

    It lives until a rank raises or misses a deadline; then `close` it and build another.
    """

    def __init__(self, size: int, *, group_timeout: float, start_timeout: float = 300.0) -> None:
        _thread_local_world()
        _resolve_collectives()
        self.size = size
        self._group_timeout = datetime.timedelta(seconds=group_timeout)
        self._store = HashStore()
        self._done: queue.SimpleQueue[tuple[int, int, Outcome]] = queue.SimpleQueue()
        self._inbox: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(size)]
        self._call = 0
        hook = sys.excepthook  # init_process_group replaces it for the whole process
        self._threads = [
            threading.Thread(target=self._work, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in range(size)
        ]
        for thread in self._threads:
            thread.start()
        outcomes = self._collect(time.monotonic() + start_timeout)
        sys.excepthook = hook
        for outcome in outcomes:
            if outcome.error is not None:
                raise RuntimeError("ranks: the threads did not start") from outcome.error

    def call(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], timeout: float
    ) -> list[Outcome]:
        """Run ``fn(rank, *args, **kwargs)`` in every thread; one outcome a rank."""
        self._call += 1
        for inbox in self._inbox:
            inbox.put((self._call, fn, args, kwargs))
        return self._collect(time.monotonic() + timeout)

    def renew(self, outcomes: Sequence[Outcome]) -> bool:
        """Say that after an error new threads are needed; they start in milliseconds."""
        return False

    def close(self) -> None:
        """Let the threads end: at once if they are idle, else when their call returns or fails."""
        self._call = -1
        for inbox in self._inbox:
            inbox.put(None)

    def join(self, timeout: float) -> None:
        """Wait for threads that were told to end."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _collect(self, deadline: float) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        # peers of a rank that raised may wait for it in a collective; as long as one of them does
        # something, they get the time to end or fail on their own
        waiting: Stillness | None = None
        while len(outcomes) < self.size:
            left = max(deadline - time.monotonic(), 0.001)
            try:
                call, rank, outcome = self._done.get(timeout=min(left, POLL) if waiting else left)
            except queue.Empty:
                missing = set(range(self.size)) - outcomes.keys()
                still = waiting.seconds(missing) if waiting else 0.0
                if still > GRACE or time.monotonic() >= deadline:
                    break
                continue
            if call != self._call:
                continue
            outcomes[rank] = outcome
            if outcome.error is not None and waiting is None:
                tasks = {r: (os.getpid(), t.native_id) for r, t in enumerate(self._threads)}
                waiting = Stillness(tasks)
        return [outcomes.get(rank) or self._missing(rank) for rank in range(self.size)]

    def _missing(self, rank: int) -> Outcome:
        return Outcome.hung(stack_of(self._threads[rank].ident))

    def _work(self, rank: int) -> None:
        torch.set_num_threads(1)
        started = Outcome.of(lambda: self._init_group(rank))
        self._done.put((0, rank, started))
        while started.error is None:
            item = self._inbox[rank].get()
            if item is None:
                break
            call, fn, args, kwargs = item
            del item
            _here.token = next(_tokens)
            _here.meshes = getattr(_here, "meshes", [])
            outcome = Outcome.of(functools.partial(_fresh_call, fn, rank, *args, **kwargs))
            del fn, args, kwargs
            self._done.put((call, rank, outcome))
            del outcome
        if dist.is_initialized():
            dist.destroy_process_group()

    def _init_group(self, rank: int) -> None:
        dist.init_process_group(
            "gloo", store=self._store, rank=rank, world_size=self.size, timeout=self._group_timeout
        )


def _fresh_call(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``fn`` as the first call of a thread would be.

    Groups that the last call made are dropped now and not at its end: only now has every rank
    returned from it, and a closed socket fails the peers that still use it.
    """
    world = distributed_c10d._world
    for reference in _here.meshes:
        mesh = reference()
        if mesh is not None:  # DTensor's caches keep meshes, and a mesh its groups
            mesh._pg_registry.clear()
    _here.meshes = []
    for group in [group for group in world.pg_map if group is not world.default_pg]:
        dist.destroy_process_group(group)
    torch.set_grad_enabled(True)
    return fn(*args, **kwargs)
