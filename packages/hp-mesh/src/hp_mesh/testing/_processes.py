"""Ranks as processes: spawned once, fed through sockets, each with gloo over loopback.

The function travels as *file and name*: under pytest's importlib mode a spawned process can't
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

__all__ = ["RankProcesses", "load", "locate", "serve"]


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

    def __init__(self, size: int, *, group_timeout: float, start_timeout: float = 120.0) -> None:
        self.size = size
        self._generation = 0
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
                "from hp_mesh.testing._processes import *; serve()",
            ]
            settings = [listener.address[1], self._store.port, size, group_timeout]
            self._processes = [
                subprocess.Popen([*command, str(rank), *map(str, settings)], env=env)
                for rank in range(size)
            ]
            listener._listener._socket.settimeout(start_timeout)  # type: ignore[attr-defined]
            self._connections: dict[Connection, int] = {}
            try:
                for _ in range(size):
                    connection = listener.accept()
                    self._connections[connection] = connection.recv()
            except BaseException:
                self.close()
                raise
        for outcome in self._collect(deadline, grace=start_timeout):
            if outcome.error is not None:
                self.close()
                raise RuntimeError("ranks: the processes did not start") from outcome.error

    def call(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], timeout: float
    ) -> list[Outcome]:
        """Run ``fn(rank, *args, **kwargs)`` in every process; one outcome a rank."""
        self._send((locate(fn), list(sys.path), tuple(args), kwargs))
        return self._collect(time.monotonic() + timeout, grace=3.0)

    def _send(self, message: object) -> None:
        packed = pickle.dumps(message)
        for connection in self._connections:
            # a process that has ended is noticed when its answer is read
            with contextlib.suppress(OSError):
                connection.send_bytes(packed)

    def _collect(self, deadline: float, *, grace: float) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < self.size:
            waiting = [c for c, rank in self._connections.items() if rank not in outcomes]
            ready = wait(waiting, timeout=max(deadline - time.monotonic(), 0.001))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection), "we wait for connections only"
                rank = self._connections[connection]
                try:
                    outcomes[rank] = _unpack(connection.recv_bytes())
                except (EOFError, OSError):
                    gone = RuntimeError(f"the process of rank {rank} ended")
                    outcomes[rank] = Outcome(error=gone, text=str(gone), lost=True)
                if outcomes[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + grace)
        return [
            outcomes.get(rank) or Outcome.hung("(another process)") for rank in range(self.size)
        ]

    def renew(self, outcomes: Sequence[Outcome]) -> bool:
        """Give the processes a new group if all of them still answer; starting others is slow."""
        if any(outcome.lost for outcome in outcomes):
            return False
        self._generation += 1
        self._send(self._generation)
        renewed = self._collect(time.monotonic() + 30.0, grace=30.0)
        return all(outcome.error is None for outcome in renewed)

    def close(self) -> None:
        """End the processes: they are told by the closed connection, then killed."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.wait()

    def join(self, timeout: float) -> None:
        """Wait for processes that were told to end."""
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout)


def _unpack(message: bytes) -> Outcome:
    value, error, text = pickle.loads(message)
    return Outcome(value, error, text)


def _pack(outcome: Outcome) -> bytes:
    """Pickle an outcome; what can't travel is replaced by an error that says so."""
    try:
        message = pickle.dumps((outcome.value, outcome.error, outcome.text))
        pickle.loads(message)
    except Exception as problem:
        text = outcome.text or traceback.format_exc()
        lost = outcome.error if outcome.error is not None else problem
        error = RuntimeError(f"{type(lost).__name__}: {lost} (it could not be pickled)")
        return pickle.dumps((None, error, text))
    return message


def serve() -> None:
    """Be one rank: join the group, then run what comes until the connection closes."""
    rank, port, store_port, size = map(int, sys.argv[1:5])
    timeout = datetime.timedelta(seconds=float(sys.argv[5]))
    connection = Client(("127.0.0.1", port), authkey=bytes.fromhex(os.environ["HP_RANKS_KEY"]))
    connection.send(rank)
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
