"""Medians, how sure they are, and when it is enough. No torch, no numpy."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from statistics import median

__all__ = ["FEWEST_ROUNDS", "enough", "interval", "ratio_interval"]

RESAMPLES = 1000
SEED = 0
FEWEST_ROUNDS = 6
"""The range of n samples misses their median's true value once in ``2 ** (n - 1)`` times: below 6
no interval is one of 95 %."""


def interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return the bootstrap interval of the median of ``samples``; the same for the same samples."""
    drawn = random.Random(SEED)
    n = len(samples)
    medians = sorted(median(drawn.choices(samples, k=n)) for _ in range(RESAMPLES))
    cut = int(RESAMPLES * (1 - confidence) / 2)
    return medians[cut], medians[-1 - cut]


def ratio_interval(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Return the interval of the median of ``a / b``, sample by sample of one round each."""
    return interval([x / y for x, y in zip(a, b, strict=True)])


def enough(samples: Mapping[int, Sequence[float]], precision: float) -> bool:
    """Return whether further rounds would change nothing.

    One configuration: the interval is as narrow as ``precision`` on either side of the median.
    Several: for all but the fastest, either the interval of the ratio to the fastest is above 1, or
    it is that narrow.
    """
    rounds = min(map(len, samples.values()))
    if rounds < FEWEST_ROUNDS:
        return False
    best = min(samples, key=lambda key: median(samples[key]))
    if len(samples) == 1:
        low, high = interval(samples[best])
        return high - low <= 2 * precision * median(samples[best])
    for key, found in samples.items():
        if key != best:
            low, high = ratio_interval(found, samples[best])
            if low <= 1 and high - low > 2 * precision:
                return False
    return True
