"""Ranks as processes: started once, fed through sockets, each with gloo over loopback.

On Linux they are forks of one process, which loads torch for all of them and has no threads yet.

The function travels as *file and name*: under pytest's importlib mode another process can't
import the test module by name, and loading it by path works both ways.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import importlib.util
import inspect
import os
import pickle
import secrets
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from hp_mesh.checks import fail
from hp_mesh.testing._outcome import Outcome
from hp_mesh.testing._stillness import GRACE, POLL, Stillness

__all__ = ["RankProcesses", "load", "locate", "start"]

FORKS = sys.platform == "linux"
"""Elsewhere what torch loads may not survive a fork: there, each rank loads it for itself."""

RENEWAL = 300.0
"""Seconds that processes may take to join a new group."""


def locate(fn: Callable[..., Any]) -> tuple[str, str, str]:
    """Return ``(file, module name, function name)`` of a top-level function."""
    name = getattr(fn, "__qualname__", "")
    code = inspect.unwrap(fn)
    if not inspect.isfunction(code) or not name.isidentifier():
        raise fail(
            "ranks",
            f"fn ({name or fn!r}) must be a function at the top level of a file for processes",
            'move it out of its class or function, or use backend="threads"',
        )
    return str(Path(inspect.getfile(code)).resolve()), fn.__module__, name


def load(file: str, module: str, name: str) -> Callable[..., Any]:
    """Find the function again: by module name if that leads to ``file``, else by path."""
    known = sys.modules.get(module)
    if known is None or getattr(known, "__file__", None) != file:
        known = None
        with contextlib.suppress(ImportError, ValueError, AttributeError):
            spec = importlib.util.find_spec(module)
            if module != "__main__" and spec is not None and spec.origin == file:
                known = importlib.import_module(module)
    if known is None:
        alias = f"_by_path_{file}"
        known = sys.modules.get(alias)
        if known is None:
            spec = importlib.util.spec_from_file_location(alias, file)
            assert spec is not None and spec.loader is not None, f"{file} is not a Python file"
            known = importlib.util.module_from_spec(spec)
            sys.modules[alias] = known
            spec.loader.exec_module(known)
    found: Callable[..., Any] = getattr(known, name)
    return found


class RankProcesses:
    """``size`` processes that wait for work; same interface as `RankThreads`."""

    def __init__(self, size: int, *, group_timeout: float, start_timeout: float = 300.0) -> None:
        self.size = size
        self._generation = 0
        self._connections: dict[Connection, int] = {}
        self._pids: dict[int, int] = {}
        # bound to port 0: the free port is found and taken in one step
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        key = secrets.token_bytes(16)
        deadline = time.monotonic() + start_timeout
        env = {"OMP_NUM_THREADS": "1", **os.environ, "HP_RANKS_KEY": key.hex()}
        env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        if sys.platform == "linux":
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with Listener(("127.0.0.1", 0), backlog=size, authkey=key) as listener:
            command = [
                sys.executable,
                "-c",
                "from hp_mesh.testing._processes import *; start()",
            ]
            settings = [size, listener.address[1], self._store.port, group_timeout]
            groups = [range(size)] if FORKS else [[rank] for rank in range(size)]
            self._starters = [
                subprocess.Popen(
                    [*command, ",".join(map(str, group)), *map(str, settings)],
                    env=env,
                    stdin=subprocess.PIPE,
                )
                for group in groups
            ]
            listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
            try:
                while len(self._connections) < size:
                    self._accept(listener, deadline)
            except BaseException:
                self.close()
                raise
        for outcome in self._collect(deadline):
            if outcome.error is not None:
                self.close()
                raise RuntimeError("ranks: the processes did not start") from outcome.error

    def _accept(self, listener: Listener, deadline: float) -> None:
        try:
            connection = listener.accept()
        except TimeoutError:
            ended = any(starter.poll() is not None for starter in self._starters)
            if ended or time.monotonic() > deadline:
                raise RuntimeError("ranks: the processes did not start") from None
            return
        rank, self._pids[rank] = connection.recv()
        self._connections[connection] = rank

    def call(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], timeout: float
    ) -> list[Outcome]:
        """Run ``fn(rank, *args, **kwargs)`` in every process; one outcome a rank."""
        self._send((locate(fn), list(sys.path), tuple(args), kwargs))
        return self._collect(time.monotonic() + timeout)

    def _send(self, message: object) -> None:
        packed = pickle.dumps(message)
        for connection in self._connections:
            # a process that has ended is noticed when its answer is read
            with contextlib.suppress(OSError):
                connection.send_bytes(packed)

    def _collect(self, deadline: float) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        waiting: Stillness | None = None  # see RankThreads
        while len(outcomes) < self.size:
            left = max(deadline - time.monotonic(), 0.001)
            missing = {c: rank for c, rank in self._connections.items() if rank not in outcomes}
            ready = wait(list(missing), timeout=min(left, POLL) if waiting else left)
            if not ready:
                still = waiting.seconds(missing.values()) if waiting else 0.0
                if still > GRACE or time.monotonic() >= deadline:
                    break
            for connection in ready:
                assert isinstance(connection, Connection), "we wait for connections only"
                rank = self._connections[connection]
                try:
                    outcomes[rank] = _unpack(connection.recv_bytes())
                except (EOFError, OSError):
                    gone = RuntimeError(f"the process of rank {rank} ended")
                    outcomes[rank] = Outcome(error=gone, text=str(gone), lost=True)
                if outcomes[rank].error is not None and waiting is None:
                    waiting = Stillness({r: (pid, pid) for r, pid in self._pids.items()})
        return [
            outcomes.get(rank) or Outcome.hung("(another process)") for rank in range(self.size)
        ]

    def renew(self, outcomes: Sequence[Outcome]) -> bool:
        """Give the processes a new group if all of them still answer; starting others is slow."""
        if any(outcome.lost for outcome in outcomes):
            return False
        self._generation += 1
        self._send(self._generation)
        renewed = self._collect(time.monotonic() + RENEWAL)
        return all(outcome.error is None for outcome in renewed)

    def close(self) -> None:
        """End the processes, whatever they do."""
        for starter in self._starters:
            if not FORKS:
                starter.kill()
            if starter.poll() is None:
                starter.communicate(b".")
        for connection in self._connections:
            connection.close()

    def join(self, timeout: float) -> None:
        """Wait for processes that were told to end."""
        for starter in self._starters:
            with contextlib.suppress(subprocess.TimeoutExpired):
                starter.wait(timeout)


def _unpack(message: bytes) -> Outcome:
    return Outcome(*pickle.loads(message))


def _pack(outcome: Outcome) -> bytes:
    """Pickle an outcome; what can't travel is replaced by an error that says so."""
    try:
        message = pickle.dumps((outcome.value, outcome.error, outcome.text, outcome.time))
        pickle.loads(message)
    except Exception as problem:
        text = outcome.text or traceback.format_exc()
        lost = outcome.error if outcome.error is not None else problem
        error = RuntimeError(f"{type(lost).__name__}: {lost} (it could not be pickled)")
        return pickle.dumps((None, error, text, outcome.time))
    return message


def start() -> None:
    """Be the process that some ranks are forks of, and end them when it is told to.

    That is by stdin, which also closes when who asked for them ends, however that ends. A rank that
    has ended is not waited for before, so its number is nobody else's.
    """
    ranks = [int(rank) for rank in sys.argv[1].split(",")]
    if not FORKS:
        _serve(*ranks)
        return
    pids = []
    for rank in ranks:
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            _serve(rank)
            return
        pids.append(pid)
    os.read(0, 1)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)


def _serve(rank: int) -> None:
    """Be one rank: join the group, then run what comes until the connection closes."""
    size, port, store_port = map(int, sys.argv[2:5])
    timeout = datetime.timedelta(seconds=float(sys.argv[5]))
    connection = Client(("127.0.0.1", port), authkey=bytes.fromhex(os.environ["HP_RANKS_KEY"]))
    connection.send((rank, os.getpid()))
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", store_port, is_master=False)

    def join(generation: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        names = PrefixStore(str(generation), store)
        dist.init_process_group("gloo", store=names, rank=rank, world_size=size, timeout=timeout)

    def answer(message: bytes) -> Any:
        asked = pickle.loads(message)
        if isinstance(asked, int):
            return join(asked)
        where, path, args, kwargs = asked
        sys.path[:] = path
        return load(*where)(rank, *args, **kwargs)

    message = pickle.dumps(0)
    while True:
        connection.send_bytes(_pack(Outcome.of(functools.partial(answer, message))))
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return
