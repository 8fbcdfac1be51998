"""Time pieces of work in interleaved rounds; what counts is the rank that takes longest."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

__all__ = ["Clock", "Found", "Piece"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Work to be timed; ``calls`` of it are timed together, where one is too short."""

    run: Callable[[], object]
    calls: int = 1


@dataclass(frozen=True, slots=True)
class Found:
    """Times of one call, of the rank that took longest.

    Attributes:
        ms: Median over the rounds.
        low, high: The quarter and the three quarters of the rounds.
        cpu_ms: Processor time of all ranks together, median over the rounds.
        busy_ms: Processor time of the rank that used most, likewise: what it takes alone on a core,
            however many others want it.
    """

    ms: float
    low: float
    high: float
    cpu_ms: float
    busy_ms: float


class Clock:
    """Times pieces on a device; every rank must do so at the same time, in the same order.

    Args:
        device: Of this rank.
        after_round: Is called after each round of each `measure`.
    """

    def __init__(
        self, device: torch.device, after_round: Callable[[], None] = lambda: None
    ) -> None:
        self.device, self._after_round = device, after_round

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize()

    def finish_kernels(self) -> None:
        """Wait for the kernels of this thread, not for collectives, which have their own stream."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).current_stream().synchronize()

    def once(self, piece: Piece) -> tuple[float, float]:
        """Return wall ms and processor ms of one call on this rank, started on all together."""
        dist.barrier()
        cpu, start = time.process_time(), time.perf_counter()
        for _ in range(piece.calls):
            piece.run()
        self.synchronize()
        wall = time.perf_counter() - start
        return 1e3 * wall / piece.calls, 1e3 * (time.process_time() - cpu) / piece.calls

    def longest(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over the ranks."""
        return self._over_ranks(values, dist.ReduceOp.MAX)

    def measure(self, pieces: Mapping[str, Piece], rounds: int) -> dict[str, Found]:
        """Time every piece once in each of ``rounds``, after one that does not count."""
        walls: dict[str, list[float]] = {name: [] for name in pieces}
        used: dict[str, list[float]] = {name: [] for name in pieces}
        most: dict[str, list[float]] = {name: [] for name in pieces}
        for number in range(rounds + 1):
            once = [self.once(piece) for piece in pieces.values()]
            longest = self.longest([wall for wall, _ in once])
            busiest = self.longest([cpu for _, cpu in once])
            together = self._over_ranks([cpu for _, cpu in once], dist.ReduceOp.SUM)
            if number > 0:
                for at, name in enumerate(pieces):
                    walls[name].append(longest[at])
                    used[name].append(together[at])
                    most[name].append(busiest[at])
            self._after_round()
        return {
            name: Found(
                statistics.median(walls[name]),
                *_quarters(walls[name]),
                statistics.median(used[name]),
                statistics.median(most[name]),
            )
            for name in pieces
        }

    def _over_ranks(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        # devices of some vendors have no float64
        together = torch.tensor(values, dtype=torch.float32, device=self.device)
        dist.all_reduce(together, op=op)
        found: list[float] = together.tolist()
        return found


def _quarters(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
