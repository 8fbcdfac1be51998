"""Two resources, one after another on each: when what runs, and what the step waits for.

The compute stream runs kernels, projections and copies in order; the network runs collectives in
order. Each waits for what it depends on. While both are busy kernels are slower by a fraction,
which is charged to the collective that caused it::

    compute  | q proj | k proj | v proj |           | attention
    network           | a2a q    | a2a k    | a2a v |
                                        exposed: ^^^^
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Slot", "Task", "schedule"]


@dataclass(frozen=True, slots=True)
class Task:
    """Something that takes ``seconds`` of a resource alone, after others.

    A collective with ``slows`` makes kernels slower by that fraction, and not by what all do.
    """

    key: str
    resource: Literal["compute", "network"]
    seconds: float
    after: tuple[str, ...] = ()
    slows: float | None = None


@dataclass(frozen=True, slots=True)
class Slot:
    """When a task runs.

    Attributes:
        start, end: Seconds from the start of the phase.
        exposed: What it adds to the length of the phase.
    """

    key: str
    resource: Literal["compute", "network"]
    start: float
    end: float
    exposed: float


def schedule(tasks: Sequence[Task], slowdown: float = 0.0) -> list[Slot]:
    """Return when each task runs, in the given order; the exposed parts add up to the whole.

    Args:
        tasks: In the order in which each resource runs them. A task may depend on earlier ones.
        slowdown: How much longer a kernel takes while a collective runs, as a fraction.
    """
    queues = {
        resource: [task for task in tasks if task.resource == resource]
        for resource in ("compute", "network")
    }
    at = {"compute": 0, "network": 0}
    left = {task.key: task.seconds for task in tasks}
    starts: dict[str, float] = {}
    exposed = dict.fromkeys(left, 0.0)
    done: dict[str, float] = {}
    now = 0.0

    def running(resource: str) -> Task | None:
        if at[resource] == len(queues[resource]):
            return None
        task = queues[resource][at[resource]]
        return task if all(key in done for key in task.after) else None

    while len(done) < len(tasks):
        kernel, send = running("compute"), running("network")
        assert kernel or send, "a task depends on a later one"
        for task in (kernel, send):
            if task is not None:
                starts.setdefault(task.key, now)
        slower = 1.0
        if kernel and send:
            slower += slowdown if send.slows is None else send.slows
        steps = [left[kernel.key] * slower] if kernel else []
        steps += [left[send.key]] if send else []
        step = min(steps)
        now += step
        if kernel is not None:
            exposed[kernel.key] += step / slower
            _spend(left, kernel.key, step / slower)
        if send is not None:
            exposed[send.key] += step - step / slower if kernel else step
            _spend(left, send.key, step)
        for task in (kernel, send):
            if task is not None and left[task.key] <= 0.0:
                done[task.key] = now
                at[task.resource] += 1
    return [
        Slot(task.key, task.resource, starts[task.key], done[task.key], exposed[task.key])
        for task in tasks
    ]


def _spend(left: dict[str, float], key: str, seconds: float) -> None:
    rest = left[key] - seconds
    left[key] = 0.0 if rest < 1e-15 else rest
