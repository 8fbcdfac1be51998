"""Times that may not fall with size, from noisy ones."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log

__all__ = ["ascending"]


def ascending(times: Sequence[float]) -> list[float]:
    """Return the ascending values nearest to ``times``, as ratios (pool adjacent violators).

    Where a larger message took less time, the truth of both is taken to lie between: their
    geometric mean.
    """
    pools: list[tuple[float, int]] = []  # sum of logarithms, and of how many
    for value in times:
        total, count = log(value), 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            before, number = pools.pop()
            total, count = total + before, count + number
        pools.append((total, count))
    return [exp(total / count) for total, count in pools for _ in range(count)]
