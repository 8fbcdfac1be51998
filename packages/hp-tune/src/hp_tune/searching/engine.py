"""Enumerate, check, price, measure, rank, record: the engine behind ``hp-tune search``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hp_tune.clusters.cluster import Cluster
from hp_tune.files import sha256
from hp_tune.models.model import Model
from hp_tune.plans.plan_making import COST_MODEL, make_plan
from hp_tune.searching.budget import Budget
from hp_tune.searching.evaluate import Evaluated, Point, Recompute, evaluate
from hp_tune.searching.ranking import Ranked, find_flips, front
from hp_tune.searching.result import Mode, NothingValidError, Objective, Result
from hp_tune.steps import Step, no_step
from hp_tune.workload import Config, Workload

if TYPE_CHECKING:
    from hp_tune.measured.result import Measurer
    from hp_tune.searching.requirement import Requirement
    from hp_tune.searching.restriction import Restriction
    from hp_tune.searching.rules import Rejection
    from hp_tune.study.place import Place
    from hp_tune.study.records import Fate
    from hp_tune.study.trials import Trials

__all__ = ["COST_MODEL", "NothingValidError", "Result", "Settings", "search"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How a search is done, apart from what is searched.

    Attributes:
        mode: ``"analytic"`` ranks by prediction; ``"measured"`` runs every valid point;
            ``"hybrid"`` runs those that are predicted near the best, or would be first if an
            assumed number is wrong.
        objective: ``"pareto"`` also returns the front of time and memory.
        recompute: ``"auto"`` recomputes activations only if nothing fits without it.
        overlap: Whether asynchronous exchanges exist; None asks the installed hp-cp. They are
            rejected unless ``workload.handoffs``.
        variants: Also groups of heads and K and V that are gathered again in backward.
        within, keep: What ``"hybrid"`` keeps: all within this factor of the best predicted time,
            and at least so many.
        only: The part of the space that is searched; None for all of it.
        require: What a valid configuration must keep to.
        kernels: An Ascend, such as ``ascend910b3``: the launches of its pack and unpack kernels are
            searched with the configurations, by prediction.
        seed: Of all that is random. Nothing is, where the space is enumerated.
    """

    mode: Mode = "analytic"
    objective: Objective = "time"
    recompute: Recompute = "auto"
    overlap: bool | None = None
    variants: bool = False
    within: float = 1.25
    keep: int = 3
    only: Restriction | None = None
    require: Requirement | None = None
    kernels: str | None = None
    seed: int = 0

    def made_by(self) -> dict[str, Any]:
        """Return what a plan says of how it was searched."""
        found: dict[str, Any] = {"mode": self.mode, "objective": self.objective}
        if self.mode == "hybrid":
            found |= {"within": self.within, "keep": self.keep}
        if self.only is not None and self.only.values:
            found["space"] = self.only.text()
        if self.require is not None:
            found["require"] = self.require.text
        if self.kernels is not None:
            found["kernels"] = self.kernels
        return found | {"seed": self.seed}


def search(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    *,
    study: Path | None = None,
    storage: str | None = None,
    measurer: Measurer | Callable[[Workload], Measurer] | None = None,
    budget: Budget | None = None,
    tell: Callable[[str], None] = lambda _: None,
    step: Step = no_step,
    settings: Settings | None = None,
    **options: Any,
) -> Result:
    """Rank every configuration of ``workload`` by predicted or by measured time.

    Args:
        model: From `hp_tune.read_model`.
        cluster: From `hp_tune.read_cluster`.
        workload: Lengths and degrees; its ``recompute`` is replaced by what is decided here.
        study: Journal file that keeps every point; None keeps nothing.
        storage: Address of a database that keeps them instead, for workers on several machines.
        measurer: Runs configurations, or makes what does for a workload, whose ``recompute`` is
            decided here; for the modes that measure.
        budget: Where measuring stops; None for no limit.
        tell: Receives one sentence when there is something to wait for, to repair or to report.
        step: Receives what is worked on now, how many are done, and of how many.
        settings: How it is done; ``options`` are fields of `Settings` instead.
        **options: Such as ``mode="hybrid"`` or ``variants=True``.

    Returns:
        The ranking, every rejected point with its rule, and the plan to write.

    Raises:
        NoConfigurationError: Everything is rejected; its ``result`` holds the reasons.
        BudgetError: The budget ran out; its ``result`` holds what was measured, with a plan.
        AllFailedError: Nothing that was measured has a time; its ``result`` says how each failed.
    """
    how = replace(settings or Settings(), **options)
    assert how.mode == "analytic" or measurer is not None, "a mode that measures has a measurer"
    found = evaluate(
        model, cluster, workload,
        recompute=how.recompute, overlap=how.overlap, variants=how.variants,
        only=how.only, require=how.require, memory_counts=how.objective == "pareto",
    )  # fmt: skip
    result = Result(
        model=model,
        cluster=cluster,
        workload=found.workload,
        ranking=found.ranking,
        rejected=tuple((p.config, p.rejection) for p in found.points if p.rejection),
        duplicates=found.duplicates,
        notes=found.notes,
        mode=how.mode,
        how=how,
        objective=how.objective,
    )
    place = _place(study, storage, how, tell)
    if how.mode == "analytic" or not found.ranking:
        if place is not None:
            trials = _trials(place, result, found, how, None)
            result = replace(result, study=trials.add([(p, _analytic(p)) for p in found.points]))
        if result.ranking:
            flips = find_flips(model, cluster, result.workload, result.ranking)
            result = replace(result, flips=tuple(flips))
    else:
        assert measurer is not None, "checked above"
        assert place is not None, "a mode that measures has a place"
        measurer = measurer(result.workload) if callable(measurer) else measurer
        result = _measured(result, found, how, place, measurer, budget or Budget(), tell, step)
    if how.kernels is not None and result.ranking:
        result = _with_kernels(result, how, study, tell, step)
    return concluded(result, how)


def _with_kernels(
    result: Result,
    how: Settings,
    study: Path | None,
    tell: Callable[[str], None],
    step: Step,
) -> Result:
    """Add the launches of the best; say so if with launches another one would be first."""
    from hp_tune.searching.joint import search_joint

    assert how.kernels is not None, "asked for by the caller"
    path = None if study is None else study.with_suffix(".kernels.journal")
    joint = search_joint(result, how.kernels, study=path, seed=how.seed, tell=tell, step=step)
    notes = [f"launches: {joint.recorded} of {joint.size} points priced; {joint.note}"]
    best, first = result.ranking[0], joint.ranking[0].ranked
    if first.config != best.config:
        label = first.config.label(result.workload.cp_size)
        notes.append(f"with the best launches {label} would be first")
    launches = {point.ranked.config: point.launches for point in joint.ranking}
    return replace(result, kernels=launches.get(best.config, {}), notes=(*result.notes, *notes))


def concluded(result: Result, how: Settings) -> Result:
    """Return the result with its plan, or raise the error that it amounts to."""
    if result.ranking:
        if how.objective == "pareto":
            result = replace(result, front=tuple(front(result.ranking)))
        result = replace(result, plan=make_plan([result], how.made_by()))
    error = result.outcome()
    if error is not None:
        raise error
    return result


def _measured(
    result: Result,
    found: Evaluated,
    how: Settings,
    place: Place,
    measurer: Measurer,
    budget: Budget,
    tell: Callable[[str], None],
    step: Step,
) -> Result:
    """Measure what the mode asks for, and rank by it."""
    from hp_tune.searching.measure import measure, shortlist

    wanted: list[Ranked] = list(found.ranking)
    if how.mode == "hybrid":
        wanted = shortlist(
            result.model, result.cluster, result.workload, found.ranking,
            within=how.within, keep=how.keep,
        )  # fmt: skip
    chosen = {ranked.config for ranked in wanted}
    trials = _trials(place, result, found, how, measurer)
    fates: list[tuple[Point, Fate]] = []
    for point in found.points:
        fate: Fate = "waiting" if point.config in chosen else "outranked"
        fates.append((point, "rejected" if point.rejection else fate))
    recorded = trials.add(fates)
    ran = measure(trials, wanted, measurer, budget, tell, step)
    late = [] if how.require is None else _broken(how.require, ran.ranking)
    return replace(
        result,
        ranking=tuple(one for one in ran.ranking if one.config not in dict(late)),
        rejected=(*result.rejected, *late),
        failed=ran.failed,
        outranked=tuple(ranked for ranked in found.ranking if ranked.config not in chosen),
        ended=ran.ended,
        notes=(*result.notes, *ran.notes),
        study=None if _is_memory(place) else recorded,
    )


def _broken(require: Requirement, ranking: Sequence[Ranked]) -> list[tuple[Config, Rejection]]:
    """Return what was predicted to keep to the requirement, and does not as it ran."""
    checked = ((ranked.config, require.check(ranked)) for ranked in ranking)
    return [(config, found) for config, found in checked if found is not None]


def _analytic(point: Point) -> Fate:
    return "rejected" if point.rejection else "priced"


def _place(
    study: Path | None, storage: str | None, how: Settings, tell: Callable[[str], None]
) -> Place | None:
    from hp_tune.study.place import DatabasePlace, JournalPlace, MemoryPlace

    if storage is not None:
        return DatabasePlace(storage, tell)
    if study is not None:
        return JournalPlace(study, tell)
    return None if how.mode == "analytic" else MemoryPlace()


def _is_memory(place: Place) -> bool:
    from hp_tune.study.place import MemoryPlace

    return isinstance(place, MemoryPlace)


def _trials(
    place: Place, result: Result, found: Evaluated, how: Settings, measurer: Measurer | None
) -> Trials:
    from hp_tune.study.trials import Trials

    workload = result.workload
    name = (
        f"{result.model.name} on {result.cluster.name}, "
        f"cp {workload.cp_size}, sequence {workload.seq_len}"
    )
    inputs: dict[str, Any] = {
        "cost_model": COST_MODEL,
        "model": sha256(result.model.model_dump(mode="json")),
        "cluster": result.cluster.digest,
        **{f"workload.{key}": value for key, value in workload.model_dump(mode="json").items()},
    }
    if how.require is not None:
        inputs["require"] = how.require.text
    if how.mode != "analytic":
        assert measurer is not None, "a mode that measures has a measurer"
        inputs["mode"] = how.mode
        inputs |= {f"measurer.{key}": value for key, value in measurer.identity.items()}
        name = f"{name}, {how.mode}"
    if how.mode == "hybrid":  # what is ruled out as too slow depends on all that it is beside
        inputs |= {"within": how.within, "keep": how.keep}
        inputs["space"] = sha256([point.config.model_dump() for point in found.points])[:16]
    if how.objective != "time":
        inputs["objective"] = how.objective
    objectives = 2 if how.objective == "pareto" else 1
    return Trials(place, name, inputs, workload.cp_size, objectives=objectives)
