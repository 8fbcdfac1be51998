"""The wire under hp_comm: as it is, watched, or cut.

All collectives of the library pass three functions of `hp_comm._torch`. Cut, they return at once:
the step then does all its local work, packing included, and waits for nobody. Watched, they say
when each was launched, when it was done, and from when to when it was waited for.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_comm import _torch

KINDS = ("all_to_all", "all_gather", "reduce_scatter")
_originals: dict[str, Callable[..., Any]] = {kind: getattr(_torch, kind) for kind in KINDS}


@contextmanager
def _replaced(make: Callable[[str], Callable[..., Any]]) -> Iterator[None]:
    for kind in KINDS:
        setattr(_torch, kind, make(kind))
    try:
        yield
    finally:
        for kind in KINDS:
            setattr(_torch, kind, _originals[kind])


def let_transport_run_first() -> None:
    """Run gloo's threads before any compute, as a network card would; needs root.

    The ranks compute on all cores. A transport that must wait for its turn on them would be late
    by some ms at every step of every exchange, which says nothing of the schedule.
    """
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != os.getpid():
            os.sched_setscheduler(int(task.name), os.SCHED_FIFO, os.sched_param(1))


class _Done:
    """The work of a collective that was not done."""

    def wait(self) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Say yes."""
        return True


@contextmanager
def cut() -> Iterator[None]:
    """Send nothing. What would be received is zero: what lies in memory may be slow to compute."""

    def make(kind: str) -> Callable[..., Any]:
        def collective(output: Tensor, *_: Any, async_op: bool, **__: Any) -> _Done | None:
            output.zero_()
            return _Done() if async_op else None

        return collective

    with _replaced(make):
        yield


@dataclass
class Event:
    """One collective on this rank; times in seconds on the machine's monotonic clock."""

    kind: str
    size: int
    launch: float
    done: float = 0.0
    wait: float = 0.0
    end: float = 0.0


class _Watched:
    def __init__(self, work: Any, event: Event) -> None:
        self.work, self.event = work, event
        with contextlib.suppress(RuntimeError):  # gloo's reduce-scatter has none
            work.get_future().add_done_callback(self._note)

    def _note(self, _: Any) -> None:
        self.event.done = time.perf_counter()

    def wait(self) -> bool:
        self.event.wait = time.perf_counter()
        result: bool = self.work.wait()
        self.event.end = time.perf_counter()
        self.event.done = self.event.done or self.event.end
        return result

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())


@contextmanager
def watched() -> Iterator[list[Event]]:
    """Collect an `Event` of every collective, in the order of launch."""
    events: list[Event] = []

    def make(kind: str) -> Callable[..., Any]:
        def collective(output: Tensor, input: Tensor, *args: Any, async_op: bool) -> Any:
            event = Event(kind, input.numel() * input.element_size(), time.perf_counter())
            events.append(event)
            work = _Watched(_originals[kind](output, input, *args, async_op=True), event)
            if async_op:
                return work
            work.wait()
            return None

        return collective

    with _replaced(make):
        yield events


TRAIN = 4
"""Transfers of a kind that are timed together: what the link needs for each when it is never idle,
as it should be in a mode that overlaps. One alone takes longer, since ranks first find together."""


def bare(piece: str, elements: int, group: ProcessGroup) -> Callable[[], None]:
    """Return `TRAIN` transfers of a piece and nothing else.

    Args:
        piece: ``"swap 3"``, ``"gather 2"``, ...: the collective, and how many tensors it moves.
            Tensors that swap share one collective, those that are gathered have one each.
        elements: Elements of one tensor's shard on this rank.
        group: The ranks.
    """
    name, count = piece.split()
    size = dist.get_world_size(group)
    if name == "swap":
        send, receive = torch.zeros(2, int(count) * elements)
        collective = _originals["all_to_all"]
        given: list[tuple[Tensor | None, ...]] = [(receive, send, None, None)]
    else:
        shards = torch.zeros(int(count), elements)
        wholes = torch.zeros(int(count), elements * size)
        gathers = name == "gather"
        collective = _originals["all_gather" if gathers else "reduce_scatter"]
        pairs = zip(wholes, shards, strict=True)
        given = [(whole, shard) if gathers else (shard, whole) for whole, shard in pairs]

    def transfer() -> None:
        works = [collective(*one, group, async_op=True) for one in given * TRAIN]
        for work in works:
            work.wait()

    return transfer
