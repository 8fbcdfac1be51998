"""The search behind a plan again, from its model and its cluster.

A plan holds digests of both descriptions and not their content, so that it stays small and names
no paths. What is explained is predicted anew, and only if it comes to the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from hp_tune.clusters.cluster import Cluster
from hp_tune.clusters.cluster_files import read_cluster
from hp_tune.cost.memory import GIB
from hp_tune.errors import PlanMismatchError, UsageError
from hp_tune.measured.result import Measured
from hp_tune.models.hf_config import read_model
from hp_tune.models.model import Model
from hp_tune.plans.plan import Entry, PlanFile
from hp_tune.searching.engine import COST_MODEL, Result, search
from hp_tune.searching.ranking import Ranked
from hp_tune.searching.requirement import read_requirement
from hp_tune.searching.restriction import read_restriction

__all__ = ["entry_for", "other_description", "read_described", "result_of_plan"]

Described = TypeVar("Described", Model, Cluster)
WHERE = "explain"


def result_of_plan(
    plan: PlanFile,
    *,
    model: str | Path | None = None,
    cluster: str | Path | None = None,
    seq_len: int | None = None,
) -> Result:
    """Return the search that ``plan`` came from, made again.

    Args:
        plan: From `hp_tune.load`.
        model: Where its model is described; None takes the preset of the plan's name.
        cluster: Likewise.
        seq_len: Which of the plan's entries; None takes the first.

    Raises:
        PlanMismatchError: Another model, cluster or cost model than the plan was made with, or the
            numbers come out differently.
        UsageError: There is no preset of that name, and nothing was given.
    """
    if plan.cost_model != COST_MODEL:
        raise PlanMismatchError(
            f"{WHERE}: cost_model of the plan ({plan.cost_model}) must be that of this hp-tune "
            f"({COST_MODEL}): the numbers would be others",
            "write the plan again with `hp-tune search`",
        )
    found_model, found_cluster = _model(plan, model), _cluster(plan, cluster)
    entry = entry_for(plan, seq_len)
    workload = plan.workload.model_copy(
        update={
            "seq_len": entry.when.seq_len,
            "cp_size": entry.when.cp_size,
            "tp_size": entry.when.tp_size,
        }
    )
    priced = [entry.best.config, *(other.config for other in entry.alternatives)]
    every = [*priced, *(rejected.config for rejected in entry.rejected)]
    result = search(
        found_model,
        found_cluster,
        workload,
        recompute="on" if entry.recompute else "off",
        overlap=any(config.overlap for config in every),
        variants=any(
            config.head_groups > 1 or not config.keep_kv or config.balance_hybrid or config.halo > 1
            for config in every
        ),
        only=read_restriction(plan.made_by.get("space", ""), workload.cp_size),
        objective=plan.made_by.get("objective", "time"),
        require=read_requirement(plan.made_by["require"]) if "require" in plan.made_by else None,
    )
    _check_same(result, entry)
    return replace(result, ranking=tuple(_with_measured(r, entry) for r in result.ranking))


def _with_measured(ranked: Ranked, entry: Entry) -> Ranked:
    """Return a configuration with how it ran, if the plan says so."""
    for priced in (entry.best, *entry.alternatives):
        ran = priced.measured
        if ran is not None and priced.config == ranked.config:
            measured = Measured(
                outcome="ok",
                samples_ms=ran.samples_ms,
                forward_ms=ran.forward_ms,
                backward_ms=ran.backward_ms,
                median_ms=ran.median_ms,
                interval_ms=ran.interval_ms,
                memory_bytes=round(ran.memory_GiB * GIB),
            )
            return replace(ranked, measured=measured, in_finals=ran.in_finals)
    return ranked


def entry_for(plan: PlanFile, seq_len: int | None) -> Entry:
    """Return the plan's entry that serves a length; the first if none is asked for."""
    if seq_len is None:
        return plan.entries[0]
    for entry in plan.entries:
        low, high = entry.when.seq
        if low <= seq_len <= high:
            return entry
    lengths = ", ".join(f"{entry.when.seq[0]} to {entry.when.seq[1]}" for entry in plan.entries)
    raise PlanMismatchError(
        f"{WHERE}: seq_len ({seq_len}) must be a length that the plan serves ({lengths})",
        "run `hp-tune search` for this length",
    )


def _model(plan: PlanFile, source: str | Path | None) -> Model:
    name = str(plan.model["name"])
    found = read_described("model", name, source, read_model)
    if found.digest != plan.model["digest"]:
        raise other_description("model", name, str(plan.model["digest"]), found.digest, source)
    return found


def _cluster(plan: PlanFile, source: str | Path | None) -> Cluster:
    name = str(plan.cluster["name"])
    found = read_described("cluster", name, source, read_cluster)
    if found.digest != plan.cluster["digest"]:
        raise other_description("cluster", name, str(plan.cluster["digest"]), found.digest, source)
    return found


def read_described(
    kind: str,
    name: str,
    source: str | Path | None,
    read: Callable[[str | Path], Described],
    made: str = "plan",
) -> Described:
    """Return the model or cluster that was given, or the preset of the name in a plan or study."""
    if source is not None:
        return read(source)
    try:
        return read(name)
    except UsageError:
        raise UsageError(
            f"{WHERE}: the {made} was made with a {kind} {name!r}, which is no preset",
            f"say where it is described with --{kind}",
        ) from None


def other_description(
    kind: str, name: str, wanted: str, found: str, source: str | Path | None, made: str = "plan"
) -> PlanMismatchError:
    """Return the error of a plan or study that was made with another model or cluster."""
    where = f"--{kind} {source}" if source is not None else f"the preset {name}"
    return PlanMismatchError(
        f"{WHERE}: the {made} was made with a {kind} {name!r} of digest {wanted[:12]}, and {where} "
        f"has {found[:12]}",
        f"give the {kind} that it was made with as --{kind}, or search again",
    )


def _check_same(result: Result, entry: Entry) -> None:
    """Refuse numbers that are not those of the plan: an edited preset, another version."""
    best = entry.best
    for ranked in result.ranking:
        if ranked.config == best.config:
            found = ranked.prediction.seconds * 1e3
            break
    else:
        found = float("nan")
    written = best.forward_ms + best.backward_ms
    if best.source == "analytic" and not abs(found - written) <= 1e-4 * written:
        raise PlanMismatchError(
            f"{WHERE}: {best.mode} comes to {found:.6g} ms and must come to {written:.6g} ms, as "
            "the plan says: it was made by another version of hp-tune",
            "write the plan again with `hp-tune search`",
        )
