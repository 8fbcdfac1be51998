"""Searches of several sequence lengths, and their one plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hp_tune.errors import TuneError
from hp_tune.plans.plan_making import make_plan
from hp_tune.searching.engine import Settings, search
from hp_tune.searching.result import NothingMeasuredError, NothingValidError, OutOfBudgetError
from hp_tune.steps import Step, no_step

if TYPE_CHECKING:
    from hp_tune.clusters.cluster import Cluster
    from hp_tune.measured.result import Measurer
    from hp_tune.models.model import Model
    from hp_tune.plans.plan import PlanFile
    from hp_tune.searching.budget import Budget
    from hp_tune.searching.result import Result
    from hp_tune.workload import Workload

__all__ = ["Searches", "search_lengths"]


@dataclass(frozen=True, slots=True)
class Searches:
    """What the searches of several lengths found.

    Attributes:
        results: One per length, ascending; those without an answer too.
        plan: Of all lengths that have an answer; None if none has.
        error: What is missing from the answer, or None.
    """

    results: tuple[Result, ...]
    plan: PlanFile | None
    error: TuneError | None


def search_lengths(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    lengths: Sequence[tuple[int, float]],
    *,
    study: Callable[[Workload], Path] | None = None,
    storage: str | None = None,
    measurer: Callable[[Workload], Measurer] | None = None,
    budget: Budget | None = None,
    tell: Callable[[str], None] = lambda _: None,
    step: Step = no_step,
    settings: Settings | None = None,
    **options: Any,
) -> Searches:
    """Search each length by itself, and put neighbours with the same winner into one bucket.

    Args:
        model: As in `search`.
        cluster: As in `search`.
        workload: As in `search`; its length is replaced by each of ``lengths``.
        lengths: Lengths with their shares, from `lengths.read_histogram` or by hand.
        study: Returns the Journal file of a length; None keeps nothing.
        storage: A database for all of them instead.
        measurer: Returns what runs configurations of a length.
        budget: For all lengths together.
        tell: As in `search`.
        step: As in `search`, a length at a time.
        settings: As in `search`.
        **options: As in `search`.
    """
    how = replace(settings or Settings(), **options)
    results: list[Result] = []
    errors: list[TuneError] = []
    for length, weight in sorted(lengths):
        here = workload.model_copy(update={"seq_len": length})
        try:
            result = search(
                model, cluster, here,
                study=None if study is None else study(here),
                storage=storage,
                measurer=measurer,
                budget=budget,
                tell=tell,
                step=step if len(lengths) == 1 else _at(length, step),
                settings=how,
            )  # fmt: skip
        except (NothingValidError, OutOfBudgetError, NothingMeasuredError) as error:
            result = error.result
            errors.append(_of(error, length) if len(lengths) > 1 else error)
        results.append(replace(result, weight=weight))
    answered = [result for result in results if result.ranking]
    plan = make_plan(answered, how.made_by()) if answered else None
    return Searches(tuple(results), plan, errors[0] if errors else None)


def _at(length: int, step: Step) -> Step:
    return lambda what, done, total: step(f"sequence {length}, {what}", done, total)


def _of(error: TuneError, length: int) -> TuneError:
    """Return the same error with the length that it is about."""
    error.message = f"sequence {length}: {error.message}"
    return error
