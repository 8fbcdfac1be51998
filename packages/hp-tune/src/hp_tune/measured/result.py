"""What a measured trial says, and who can be asked for one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from hp_tune.workload import Config

__all__ = ["Measured", "Measurer", "Outcome"]

Outcome = Literal["ok", "oom", "timeout", "wrong", "inactive", "crash"]
"""How a trial ended. ``wrong``: another result than the unsharded computation; ``inactive``: the
collectives of the configuration did not run, so its time is that of something else; ``crash``: a
rank died or raised."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One configuration as it ran.

    Attributes:
        outcome: ``ok``, or the class of the failure.
        reason: One sentence for people; empty when ``ok``.
        details: The traceback of the rank that failed first, or the end of its log.
        samples_ms: Forward and backward of the model's layers, scaled to all of them: one number
            per timed round, the maximum over ranks.
        forward_ms, backward_ms: Medians of the two halves.
        median_ms: Of ``samples_ms``; NaN unless ``ok``.
        interval_ms: 95 % bootstrap interval of the median.
        collectives: Calls per kind on rank 0, forward and backward of one layer of each kind.
        bytes_sent: Bytes per kind that left that rank.
        memory_bytes: Peak of a rank's memory in its steps, the largest over ranks; 0 where it
            cannot be read.
        checked_len: Length of the sequence that was compared with the unsharded result; shorter
            than that of the trial where that would be costly.
        folder: Where the logs of the ranks lie.
    """

    outcome: Outcome
    reason: str = ""
    details: str = ""
    samples_ms: tuple[float, ...] = ()
    forward_ms: float = float("nan")
    backward_ms: float = float("nan")
    median_ms: float = float("nan")
    interval_ms: tuple[float, float] = (float("nan"), float("nan"))
    collectives: Mapping[str, int] | None = None
    bytes_sent: Mapping[str, int] | None = None
    memory_bytes: int = 0
    checked_len: int = 0
    folder: Path | None = None


class Measurer(Protocol):
    """Runs configurations of one model, workload and cluster; no failure of a trial is raised."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """All that its numbers follow from beside model, cluster and workload, as JSON values.

        The backend, hosts, versions, rounds: studies of measurers that differ here are not mixed.
        """
        ...

    def trial(self, config: Config) -> Measured:
        """Run one configuration in a job of its own: right, active, timed."""
        ...

    def finals(self, configs: Sequence[Config]) -> Mapping[Config, Measured]:
        """Time the finalists in one job, in turns, so that all see the same machine."""
        ...
