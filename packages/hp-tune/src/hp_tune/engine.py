"""Enumerate, check, price, measure, rank, record: the engine behind ``hp-tune search``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hp_tune.cluster import Cluster
from hp_tune.evaluate import Recompute, evaluate
from hp_tune.files import sha256
from hp_tune.model import Model
from hp_tune.plan_making import COST_MODEL, make_plan
from hp_tune.ranking import find_flips, front
from hp_tune.result import NothingValidError, Objective, Result
from hp_tune.study import record
from hp_tune.workload import Workload

__all__ = ["COST_MODEL", "NothingValidError", "Result", "search"]


def search(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    *,
    recompute: Recompute = "auto",
    overlap: bool | None = None,
    variants: bool = False,
    objective: Objective = "time",
    study: Path | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Result:
    """Rank every configuration of ``workload`` by predicted time.

    Args:
        model: From `hp_tune.read_model`.
        cluster: From `hp_tune.read_cluster`.
        workload: Lengths and degrees; its ``recompute`` is replaced by what is decided here.
        recompute: ``"auto"`` recomputes activations only if nothing fits without it.
        overlap: Whether asynchronous exchanges exist; None asks the installed hp-cp. They are
            rejected unless ``workload.handoffs``.
        variants: Also groups of heads and K and V that are gathered again in backward.
        objective: ``"pareto"`` also returns the front of time and memory.
        study: Journal file that keeps every point; None keeps nothing.
        tell: Receives one sentence when there is something to wait for or to repair.

    Returns:
        The ranking, every rejected point with its rule, and the plan to write.

    Raises:
        NoConfigurationError: Everything is rejected; its ``result`` holds the reasons.
    """
    found = evaluate(
        model, cluster, workload, recompute=recompute, overlap=overlap, variants=variants
    )
    workload = found.workload
    result = Result(
        model=model,
        cluster=cluster,
        workload=workload,
        ranking=found.ranking,
        rejected=tuple((p.config, p.rejection) for p in found.points if p.rejection),
        duplicates=found.duplicates,
        notes=found.notes,
        objective=objective,
        front=tuple(front(found.ranking)) if objective == "pareto" else (),
    )
    if study is not None:
        inputs = _inputs(model, cluster, workload)
        recorded = record(study, _name(result), inputs, workload.cp_size, found.points, tell=tell)
        result = replace(result, study=recorded)
    error = result.outcome()
    if error is not None:
        raise error
    result = replace(result, flips=tuple(find_flips(model, cluster, workload, result.ranking)))
    return replace(result, plan=make_plan([result], {"mode": "analytic", "objective": objective}))


def _inputs(model: Model, cluster: Cluster, workload: Workload) -> dict[str, Any]:
    return {
        "cost_model": COST_MODEL,
        "model": sha256(model.model_dump(mode="json")),
        "cluster": cluster.digest,
        **{f"workload.{key}": value for key, value in workload.model_dump(mode="json").items()},
    }


def _name(result: Result) -> str:
    workload = result.workload
    return (
        f"{result.model.name} on {result.cluster.name}, "
        f"cp {workload.cp_size}, sequence {workload.seq_len}"
    )
