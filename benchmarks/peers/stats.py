"""Medians and their intervals: rounds are few and their noise has a long tail."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

__all__ = ["Interval", "imbalance", "interval", "quantiles", "ratios"]

RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A median, and where it lies with 95 % confidence.

    Attributes:
        median: Of the rounds.
        low: Lower end, by bootstrap.
        high: Upper end.
    """

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def as_dict(self) -> dict[str, float]:
        """Return the fields, for a record."""
        return asdict(self)


def interval(values: Sequence[float], seed: int = 0) -> Interval:
    """Return the median of ``values`` with the 95 % percentile-bootstrap interval."""
    draw = random.Random(seed)
    count = len(values)
    medians = sorted(
        statistics.median(draw.choices(values, k=count))
        for _ in range(RESAMPLES if count > 1 else 1)
    )
    low, high = medians[int(0.025 * len(medians))], medians[int(0.975 * len(medians))]
    return Interval(statistics.median(values), low, high)


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return ``{"p25", "p50", "p75", "n"}`` of ``values``."""
    if len(values) == 1:
        return {"p25": values[0], "p50": values[0], "p75": values[0], "n": 1}
    p25, p50, p75 = statistics.quantiles(values, n=4, method="inclusive")
    return {"p25": p25, "p50": p50, "p75": p75, "n": len(values)}


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return ``above / below`` round by round: what disturbs a round disturbs both."""
    return [a / b for a, b in zip(above, below, strict=True)]


def imbalance(by_rank: Sequence[Sequence[float]]) -> float:
    """Return the largest rank's share over the mean, the median over rounds; ``[rank][round]``."""
    rounds = zip(*by_rank, strict=True)
    shares: list[float] = [max(times) / statistics.fmean(times) for times in rounds]
    return statistics.median(shares)
