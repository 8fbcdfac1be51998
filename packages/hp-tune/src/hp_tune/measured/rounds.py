"""Timed rounds: all configurations in turn, so that all see the same machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from hp_tune.measured.device import Device
from hp_tune.measured.layers import Step
from hp_tune.measured.request import Protocol
from hp_tune.measured.statistics import enough

__all__ = ["Runner", "Samples", "measure"]


@dataclass
class Runner:
    """One configuration at its full length: a step per kind of layer, with its data.

    Attributes:
        steps: One per kind of layer.
        x, upstream: What enters, and the gradient of what leaves; shared by the kinds.
    """

    steps: Sequence[Step]
    x: Tensor
    upstream: Tensor

    def run(self, index: int, device: Device) -> list[float]:
        """Run a kind of layer, and return the milliseconds until forward's end and backward's."""
        step = self.steps[index]
        self.x.grad = None
        for parameter in step.layer.parts.parameters():
            parameter.grad = None
        clock = device.clock()
        clock()
        out, loss = step.forward(self.x)
        clock()
        step.backward(out, loss, self.upstream)
        return clock()


@dataclass
class Samples:
    """Milliseconds per round of all layers of the model, the maximum over ranks."""

    total: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)


def measure(runners: Sequence[Runner], protocol: Protocol, device: Device) -> list[Samples]:
    """Time the runners in rounds, beginning with another one in each.

    What ends them is the same on every rank: numbers are those of the slowest.
    """
    found = [Samples() for _ in runners]
    start = time.perf_counter()
    for number in range(protocol.rounds):
        for turn in range(len(runners)):
            which = (number + turn) % len(runners)
            total, forward, elapsed = _sample(runners[which], device, start)
            found[which].total.append(total)
            found[which].forward.append(forward)
        samples = {index: one.total for index, one in enumerate(found)}
        if elapsed > protocol.budget_s or enough(samples, protocol.precision):
            break
    return found


def _sample(runner: Runner, device: Device, start: float) -> tuple[float, float, float]:
    """Return milliseconds of all layers, those of forward, and seconds since ``start``."""
    times = []
    for index in range(len(runner.steps)):
        dist.barrier()
        device.synchronize()
        times += runner.run(index, device)
    numbers = torch.tensor(
        [*times, time.perf_counter() - start], dtype=torch.float64, device=device.device
    )
    if device.type == "npu":
        numbers = numbers.float()  # HCCL reduces no float64
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    *slowest, elapsed = numbers.tolist()
    counts = [step.shape.count for step in runner.steps]
    forward = sum(count * ms for count, ms in zip(counts, slowest[0::2], strict=True))
    total = sum(count * ms for count, ms in zip(counts, slowest[1::2], strict=True))
    return total, forward, elapsed
