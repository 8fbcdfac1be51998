"""Which points are measured, by whom, until when, and who wins: the measured half of a search."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hp_tune.cost.memory import GIB
from hp_tune.measured.ties import is_tie
from hp_tune.searching.ranking import Failed, Ranked, find_flips
from hp_tune.steps import Step, no_step
from hp_tune.study.owner import describe
from hp_tune.study.place import turn
from hp_tune.study.trials import Trials

if TYPE_CHECKING:
    from hp_tune.clusters.cluster import Cluster
    from hp_tune.measured.result import Measured, Measurer
    from hp_tune.models.model import Model
    from hp_tune.searching.budget import Budget
    from hp_tune.workload import Config, Workload

__all__ = ["Measurements", "measure", "shortlist"]

FINALISTS = 4
NEAR = 1.1
"""Within this factor of the fastest, or with an interval that meets its interval: a finalist."""
POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Measurements:
    """What measuring came to.

    Attributes:
        ranking: The best first, every one with its time.
        ended: Why it stopped before its end, or empty.
        notes: What the user should know of the decision.
    """

    ranking: tuple[Ranked, ...]
    failed: tuple[Failed, ...]
    ended: str = ""
    notes: tuple[str, ...] = ()


def shortlist(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    ranking: Sequence[Ranked],
    *,
    within: float,
    keep: int,
) -> list[Ranked]:
    """Return what is worth measuring: predicted near the best, or first if an assumption is wrong.

    Args:
        model: Of the search.
        cluster: Of the search.
        workload: Of the search.
        ranking: By predicted time.
        within: Factor of the best predicted time that is kept.
        keep: At least so many are kept.
    """
    if not ranking:
        return []
    limit = ranking[0].prediction.seconds * within
    winners = {flip.winner for flip in find_flips(model, cluster, workload, ranking)}
    return [
        ranked
        for place, ranked in enumerate(ranking)
        if place < keep or ranked.prediction.seconds <= limit or ranked.config in winners
    ]


def measure(
    trials: Trials,
    wanted: Sequence[Ranked],
    measurer: Measurer,
    budget: Budget,
    tell: Callable[[str], None],
    step: Step = no_step,
) -> Measurements:
    """Measure every point of ``wanted`` that no worker has measured, then the finalists together.

    Args:
        trials: Has all points already.
        wanted: In the order in which they are tried.
        measurer: Runs them.
        budget: Of this run.
        tell: Receives a sentence per trial.
        step: Receives which one runs, how many have run, and of how many.
    """
    by_config = {ranked.config: ranked for ranked in wanted}
    finals: Mapping[Config, Measured] = {}
    try:
        ended = _trials(trials, by_config, measurer, budget, tell, step)
        found = trials.measured(list(by_config))
        finalists = _finalists(_timed(by_config, found))
        if not ended and len(finalists) > 1:
            finals = _finals(trials, finalists, measurer, tell, step)
    except BaseException:  # a signal, say: what is known is said, what was begun waits for others
        trials.give_back()
        tell(_best_so_far(trials, by_config))
        raise
    return _decided(by_config, found, finals, ended, trials.cp_size)


def _trials(
    trials: Trials,
    wanted: Mapping[Config, Ranked],
    measurer: Measurer,
    budget: Budget,
    tell: Callable[[str], None],
    step: Step,
) -> str:
    """Claim and run until nothing is left; return why it stopped before that, or nothing."""
    told = False
    while True:
        with turn(trials.place, tell):
            spent = budget.spent()
            claim = trials.claim(list(wanted), may_take=not spent)
            if not claim.left:
                step("done", len(wanted), len(wanted))
                return ""
            if spent:
                return f"{spent} with {claim.left} of {len(wanted)} points left"
            if claim.config is not None:
                done, total = len(wanted) - claim.left, len(wanted)
                step(claim.config.label(trials.cp_size), done, total)
                _run(trials, wanted[claim.config], measurer, tell, f"{done + 1} of {total}")
                budget.use()
                continue
        step("waiting for another worker", len(wanted) - claim.left, len(wanted))
        if not told:
            tell(f"waiting for {describe(claim.busy[0])}, which measures the rest")
            told = True
        time.sleep(POLL_SECONDS)


def _run(
    trials: Trials,
    ranked: Ranked,
    measurer: Measurer,
    tell: Callable[[str], None],
    number: str,
) -> None:
    label = ranked.config.label(trials.cp_size)
    found = measurer.trial(ranked.config)
    memory = found.memory_bytes or ranked.memory.total
    trials.finish(ranked.config, found, [found.median_ms, memory / GIB][: trials.objectives])
    said = f"{found.median_ms:.4g} ms" if found.outcome == "ok" else found.outcome
    tell(
        f"trial {number}: {label}: {said}, "
        f"predicted {ranked.prediction.seconds * 1e3:.4g} ms"
        + (f": {found.reason}" if found.reason else "")
    )


def _best_so_far(trials: Trials, wanted: Mapping[Config, Ranked]) -> str:
    timed = _timed(wanted, trials.measured(list(wanted)))
    if not timed:
        return "nothing was measured so far"
    best = timed[0]
    return (
        f"best so far of {len(timed)} measured: {best.config.label(trials.cp_size)}, "
        f"{best.ms:.4g} ms"
    )


def _timed(wanted: Mapping[Config, Ranked], found: Mapping[Config, Measured]) -> list[Ranked]:
    timed = [
        replace(wanted[config], measured=one)
        for config, one in found.items()
        if one.outcome == "ok"
    ]
    return sorted(timed, key=lambda ranked: (ranked.ms, ranked.order))


def _finalists(timed: Sequence[Ranked]) -> list[Ranked]:
    if not timed:
        return []
    best = timed[0]
    near = [one for one in timed if one.ms <= best.ms * NEAR or _overlap(one, best)]
    return near[:FINALISTS]


def _finals(
    trials: Trials,
    finalists: Sequence[Ranked],
    measurer: Measurer,
    tell: Callable[[str], None],
    step: Step,
) -> Mapping[Config, Measured]:
    configs = [ranked.config for ranked in finalists]
    with turn(trials.place, tell):
        found = trials.finals(configs)
        if found is None:
            tell(f"finals: {len(configs)} finalists in turns in one job")
            step(f"finals of {len(configs)}", 0, 1)
            found = dict(measurer.finals(configs))
            trials.keep_finals(found)
    return found


def _decided(
    wanted: Mapping[Config, Ranked],
    found: Mapping[Config, Measured],
    finals: Mapping[Config, Measured],
    ended: str,
    cp_size: int,
) -> Measurements:
    timed = _timed(wanted, found)
    good = {config: one for config, one in finals.items() if one.outcome == "ok"}
    notes: list[str] = []
    failed = {config: one for config, one in found.items() if one.outcome != "ok"}
    if finals and not good:
        reason = next(iter(finals.values())).reason
        notes.append(f"the finals failed ({reason}): ranked by single trials")
    elif good:
        failed |= {config: one for config, one in finals.items() if config not in good}
    first = sorted(
        (
            replace(ranked, measured=good[ranked.config], in_finals=True)
            for ranked in timed
            if ranked.config in good
        ),
        key=lambda ranked: (ranked.ms, ranked.order),
    )
    rest = [one for one in timed if one.config not in good and one.config not in failed]
    ranking = [*first, *rest]
    if ranking:
        ranking = _simplest_first(ranking, notes, cp_size)
    return Measurements(
        tuple(ranking),
        tuple(
            Failed(config, wanted[config].prediction, wanted[config].memory, one)
            for config, one in failed.items()
        ),
        ended,
        tuple(notes),
    )


def _simplest_first(ranking: list[Ranked], notes: list[str], cp_size: int) -> list[Ranked]:
    """Move the simplest of those that tie with the fastest to the front."""
    fastest = ranking[0]
    assert fastest.measured is not None, "only what was measured is ranked here"
    ties = [
        one
        for one in ranking
        if one.in_finals == fastest.in_finals
        and one.measured is not None
        and is_tie(one.measured, fastest.measured)
    ]
    winner = min(ties, key=lambda one: one.order[1:])
    if winner is not fastest:
        notes.append(
            f"{winner.config.label(cp_size)} is as fast as {fastest.config.label(cp_size)} "
            "within what measuring can tell, and simpler"
        )
    return [winner, *(one for one in ranking if one is not winner)]


def _overlap(one: Ranked, other: Ranked) -> bool:
    assert one.measured is not None, "only what was measured is compared"
    assert other.measured is not None, "only what was measured is compared"
    low, high = one.measured.interval_ms
    other_low, other_high = other.measured.interval_ms
    return low <= other_high and other_low <= high
