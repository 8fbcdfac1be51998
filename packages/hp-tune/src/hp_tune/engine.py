"""Enumerate, check, price, rank, record: the engine behind ``hp-tune search``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hp_tune.cluster import Cluster
from hp_tune.cost import predict
from hp_tune.errors import NoConfigurationError, UsageError
from hp_tune.files import sha256
from hp_tune.memory import GIB, memory_use
from hp_tune.model import Model
from hp_tune.plan_file import Entry, PlanFile, PricedConfig, RejectedConfig, When, seal
from hp_tune.ranking import Flip, Ranked, find_flips, six_digits
from hp_tune.space import Duplicate, Rejection, check, enumerate_space
from hp_tune.study import Point, Recorded, record
from hp_tune.workload import Config, Workload

__all__ = ["COST_MODEL", "NothingValidError", "Result", "search"]

COST_MODEL = 2
"""Raised when a change of the formulas makes old numbers incomparable."""

Recompute = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True)
class Result:
    """All that a search found; ``plan`` is None when nothing is valid."""

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

    @property
    def margin(self) -> float | None:
        """How much slower the second is than the first, as a fraction; None without a second."""
        if len(self.ranking) < 2:
            return None
        first, second = (ranked.prediction.seconds for ranked in self.ranking[:2])
        return second / first - 1


def search(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    *,
    recompute: Recompute = "auto",
    overlap: bool | None = None,
    variants: bool = False,
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
        study: Journal file that keeps every point; None keeps nothing.
        tell: Receives one sentence when there is something to wait for or to repair.

    Returns:
        The ranking, every rejected point with its rule, and the plan to write.

    Raises:
        NoConfigurationError: Everything is rejected; its ``result`` holds the reasons.
    """
    _check_inputs(cluster, workload)
    notes = [*model.notes, *_length_note(model, workload), *_linear_note(model)]
    if workload.world_size is None:
        notes.append("memory is that of activations: parameters and optimizer need --world")
    points: list[Point] = []
    duplicates: list[Duplicate] = []
    for again in (False, True) if recompute == "auto" else (recompute == "on",):
        workload = workload.model_copy(update={"recompute": again})
        configs, duplicates = enumerate_space(workload.cp_size, overlap=overlap, variants=variants)
        points = [_evaluate(model, cluster, workload, config) for config in configs]
        if any(p.prediction for p in points) or not any(_is_memory(p) for p in points):
            break
    if model.qk_norm and workload.handoffs:
        notes.append("async: hand off the norms of q and k, not their projections")
    if recompute == "auto" and workload.recompute:
        notes.append("nothing fits with all activations kept: priced with recomputation")
    ranking = sorted(
        (
            Ranked(point.config, point.prediction, point.memory)
            for point in points
            if point.prediction and point.memory
        ),
        key=lambda ranked: ranked.order,
    )
    result = Result(
        model=model,
        cluster=cluster,
        workload=workload,
        ranking=tuple(ranking),
        rejected=tuple((p.config, p.rejection) for p in points if p.rejection),
        duplicates=tuple(duplicates),
        notes=tuple(notes),
    )
    if study is not None:
        inputs = _inputs(model, cluster, workload)
        recorded = record(study, _name(result), inputs, workload.cp_size, points, tell=tell)
        result = replace(result, study=recorded)
    if not ranking:
        raise NothingValidError(result)
    result = replace(result, flips=tuple(find_flips(model, cluster, workload, ranking)))
    return replace(result, plan=_plan(result))


class NothingValidError(NoConfigurationError):
    """Every point is rejected; ``result`` says why, point by point."""

    def __init__(self, result: Result) -> None:
        rules = sorted({rejection.rule for _, rejection in result.rejected})
        hints = dict.fromkeys(rejection.hint for _, rejection in result.rejected)
        super().__init__(
            f"all {len(result.rejected)} configurations are rejected ({', '.join(rules)})",
            next(iter(hints), ""),
        )
        self.result = result


def _check_inputs(cluster: Cluster, workload: Workload) -> None:
    if workload.dtype not in cluster.device.peak_TFLOPS:
        known = ", ".join(sorted(cluster.device.peak_TFLOPS))
        raise UsageError(
            f"--dtype ({workload.dtype}) must be one that {cluster.name} has a peak for",
            f"known: {known}",
        )
    outer = cluster.tiers[-1].size
    if outer is not None and workload.num_ranks > outer:
        raise UsageError(
            f"--world ({workload.num_ranks}) must be at most {outer}, the ranks of {cluster.name}"
        )


def _length_note(model: Model, workload: Workload) -> list[str]:
    if model.max_length is None or workload.seq_len <= model.max_length:
        return []
    return [f"seq_len ({workload.seq_len}) is longer than {model.name} allows ({model.max_length})"]


def _linear_note(model: Model) -> list[str]:
    linear = sum(layer.kind == "linear" for layer in model.layers)
    return [f"{linear} linear layers need a parallelism of their own: not priced"] if linear else []


def _is_memory(point: Point) -> bool:
    return point.rejection is not None and point.rejection.rule == "V11"


def _evaluate(model: Model, cluster: Cluster, workload: Workload, config: Config) -> Point:
    found = check(model, cluster, workload, config)
    if isinstance(found, Rejection):
        return Point(config, rejection=found)
    memory = memory_use(model, cluster, workload, config)
    return Point(config, predict(model, cluster, workload, config), memory)


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


def _plan(result: Result) -> PlanFile:
    workload = result.workload
    S = workload.seq_len
    best = result.ranking[0].prediction.seconds
    priced = [_priced(ranked, best, workload.cp_size) for ranked in result.ranking]
    entry = Entry(
        when=When(
            world_size=workload.num_ranks,
            cp_size=workload.cp_size,
            tp_size=workload.tp_size,
            seq_len=S,
            seq=(-(-S // 2), 2 * S),
        ),
        best=priced[0],
        layout=workload.layout,
        styles="hp_dsa" if any(layer.is_sparse for layer in result.model.layers) else "hp_cp",
        margin=None if result.margin is None else six_digits(result.margin),
        alternatives=tuple(priced[1:4]),
        rejected=tuple(
            RejectedConfig(
                config=config,
                rule=rejection.rule,
                message=rejection.message,
                numbers=rejection.numbers,
                hint=rejection.hint,
            )
            for config, rejection in result.rejected
        ),
    )
    return seal(
        PlanFile(
            cost_model=COST_MODEL,
            model={
                "name": result.model.name,
                "model_type": result.model.model_type,
                "digest": result.model.digest,
                "qk_norm": result.model.qk_norm,
            },
            cluster={"name": result.cluster.name, "digest": result.cluster.digest},
            workload=workload,
            notes=result.notes,
            entries=(entry,),
        )
    )


def _priced(ranked: Ranked, best: float, cp_size: int) -> PricedConfig:
    found = ranked.prediction
    return PricedConfig(
        config=ranked.config,
        mode=ranked.config.label(cp_size),
        forward_ms=six_digits(found.forward * 1e3),
        backward_ms=six_digits(found.backward * 1e3),
        exposed_comm_ms=six_digits(found.exposed_comm * 1e3),
        imbalance=six_digits(found.imbalance),
        bytes_sent=found.bytes_sent,
        memory_GiB=six_digits(ranked.memory.total / GIB),
        vs_best=six_digits(found.seconds / best),
    )
