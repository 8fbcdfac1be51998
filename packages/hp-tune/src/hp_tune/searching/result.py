"""What a search found, and how it says that it found nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hp_tune.errors import AllFailedError, BudgetError, NoConfigurationError, TuneError
from hp_tune.searching.ranking import Failed, Flip, Ranked

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hp_tune.clusters.cluster import Cluster
    from hp_tune.models.model import Model
    from hp_tune.plans.plan import PlanFile
    from hp_tune.searching.engine import Settings
    from hp_tune.searching.rules import Rejection
    from hp_tune.searching.space import Duplicate
    from hp_tune.study.trials import Recorded
    from hp_tune.workload import Config, Workload

__all__ = [
    "Mode",
    "NothingMeasuredError",
    "NothingValidError",
    "Objective",
    "OutOfBudgetError",
    "Result",
]

Mode = Literal["analytic", "measured", "hybrid"]
Objective = Literal["time", "pareto"]


@dataclass(frozen=True, slots=True)
class Result:
    """All that a search found; ``plan`` is None when nothing is valid.

    Attributes:
        ranking: The best first. By predicted time, or by measured time if ``mode`` measures: then
            every one of them ran, and `Ranked.measured` says how.
        rejected: Points that are not valid, with the rule.
        flips: Assumed numbers that decide; empty where the winner was measured.
        failed: Points that were measured and have no time, with the class of the failure.
        outranked: Valid points that ``hybrid`` did not measure, by predicted time.
        front: With the objective ``pareto``, the points that no other beats in both time and
            memory, by time; else empty.
        kernels: Launch parameters of the best's kernels, where they were searched too.
        ended: Why measuring stopped before its end, or empty.
        weight: Share of this sequence length among those that were searched together.
        how: The settings of the search.
    """

    model: Model
    cluster: Cluster
    workload: Workload
    ranking: tuple[Ranked, ...]
    rejected: tuple[tuple[Config, Rejection], ...]
    duplicates: tuple[Duplicate, ...]
    notes: tuple[str, ...]
    flips: tuple[Flip, ...] = ()
    plan: PlanFile | None = None
    study: Recorded | None = None
    mode: Mode = "analytic"
    objective: Objective = "time"
    failed: tuple[Failed, ...] = ()
    outranked: tuple[Ranked, ...] = ()
    front: tuple[Ranked, ...] = ()
    kernels: Mapping[str, Mapping[str, int]] | None = None
    ended: str = ""
    weight: float = 1.0
    how: Settings | None = None

    @property
    def margin(self) -> float | None:
        """How much slower the second is than the first, as a fraction; None without a second."""
        if len(self.ranking) < 2:
            return None
        first, second = (ranked.ms for ranked in self.ranking[:2])
        return second / first - 1

    def outcome(self) -> TuneError | None:
        """Return the error that this result amounts to, or None if it is a whole answer."""
        if not (self.ranking or self.failed or self.outranked or self.ended):
            return NothingValidError(self)
        if self.ended:
            return OutOfBudgetError(self)
        if not self.ranking:
            return NothingMeasuredError(self)
        return None


class NothingValidError(NoConfigurationError):
    """Every point is rejected; ``result`` says why, point by point."""

    def __init__(self, result: Result) -> None:
        rules = sorted({rejection.rule for _, rejection in result.rejected})
        hints = [rejection.hint for _, rejection in result.rejected]
        message = f"all {len(result.rejected)} configurations are rejected ({', '.join(rules)})"
        if not result.rejected:
            message, *hints = _no_point(result)
        super().__init__(message, hints[0])
        self.result = result


def _no_point(result: Result) -> tuple[str, str]:
    """Say why a part of the space is empty: what it names runs as something outside of it."""
    if not result.duplicates:
        return "--space must name a configuration, and there is none like it", "leave a key out"
    one, cp = result.duplicates[0], result.workload.cp_size
    return (
        f"--space must leave a configuration of its own: {one.config.label(cp)} runs as "
        f"{one.same_as.label(cp)}, for {one.reason}",
        "name what that one has, or leave --space out",
    )


class OutOfBudgetError(BudgetError):
    """Measuring was stopped by its budget; ``result`` holds what was measured until then."""

    def __init__(self, result: Result) -> None:
        best = ""
        if result.ranking:
            first = result.ranking[0]
            label = first.config.label(result.workload.cp_size)
            best = f"; best so far: {label}, {first.ms:.4g} ms"
        super().__init__(f"{result.ended}{best}", "the same command goes on from here")
        self.result = result


class NothingMeasuredError(AllFailedError):
    """No measured trial has a time; ``result`` says how each of them failed."""

    def __init__(self, result: Result) -> None:
        first = result.failed[0]
        outcomes = sorted({failed.measured.outcome for failed in result.failed})
        super().__init__(
            f"all {len(result.failed)} measured trials failed ({', '.join(outcomes)}); the first, "
            f"{first.config.label(result.workload.cp_size)}: {first.measured.reason}",
            f"its logs are in {first.measured.folder}" if first.measured.folder else "",
        )
        self.result = result
