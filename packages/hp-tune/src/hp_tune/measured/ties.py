"""Whether what was measured tells two configurations apart."""

from __future__ import annotations

from hp_tune.measured.result import Measured
from hp_tune.measured.statistics import ratio_interval

__all__ = ["TIE", "is_tie"]

TIE, CLOSE = 0.01, 0.03
"""Medians this near tie; so do those that are nearer than the second and not surely different."""


def is_tie(one: Measured, fastest: Measured) -> bool:
    """Return whether ``one`` may as well be as fast as ``fastest``; then the simpler one wins.

    Surely different: the interval of their ratio, round by round, lies above 1 if they ran in turns
    in one job; else their own intervals do not meet. A noisy machine makes no tie of medians that
    are far from each other.
    """
    ratio = one.median_ms / fastest.median_ms
    if ratio <= 1 + TIE:
        return True
    if ratio > 1 + CLOSE:
        return False
    together = one.folder is not None and one.folder == fastest.folder
    if together and len(one.samples_ms) == len(fastest.samples_ms) > 0:
        return ratio_interval(one.samples_ms, fastest.samples_ms)[0] <= 1
    return one.interval_ms[0] <= fastest.interval_ms[1]
