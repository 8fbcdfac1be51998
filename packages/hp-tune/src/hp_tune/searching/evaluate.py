"""Check and price configurations: from a space to points that are valid, with numbers, or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hp_tune.clusters.cluster import Cluster
from hp_tune.cost.cores import stretch
from hp_tune.cost.memory import MemoryUse, memory_use
from hp_tune.cost.predict import Prediction, predict
from hp_tune.errors import UsageError
from hp_tune.models.model import Model
from hp_tune.searching.ranking import Ranked
from hp_tune.searching.rules import Rejection, check
from hp_tune.searching.space import Duplicate, Sliding, enumerate_space
from hp_tune.workload import Config, Workload

if TYPE_CHECKING:
    from hp_tune.searching.requirement import Requirement
    from hp_tune.searching.restriction import Restriction

__all__ = ["Evaluated", "Point", "Recompute", "check_inputs", "evaluate"]

Recompute = Literal["auto", "on", "off"]
MOST_CP, MOST_RANKS, MOST_DOCUMENTS = 2**14, 2**20, 100_000
"""More take minutes to be priced, one by one, and are a slip of the pen."""


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration with what became of it: a prediction, or the rule that it breaks."""

    config: Config
    prediction: Prediction | None = None
    memory: MemoryUse | None = None
    rejection: Rejection | None = None


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A whole space, checked and priced.

    Attributes:
        workload: With the ``recompute`` that was decided.
        ranking: The valid points, by predicted time.
    """

    workload: Workload
    points: tuple[Point, ...]
    duplicates: tuple[Duplicate, ...]
    ranking: tuple[Ranked, ...]
    notes: tuple[str, ...]


def check_inputs(cluster: Cluster, workload: Workload) -> None:
    """Refuse what no configuration could serve."""
    if workload.dtype not in cluster.device.peak_TFLOPS:
        known = ", ".join(sorted(cluster.device.peak_TFLOPS))
        raise UsageError(
            f"--dtype ({workload.dtype}) must be one that {cluster.name} has a peak for",
            f"known: {known}",
        )
    if workload.cp_size > MOST_CP:
        raise UsageError(f"--cp ({workload.cp_size}) must be at most {MOST_CP}")
    if workload.num_ranks > MOST_RANKS:
        raise UsageError(f"--world ({workload.num_ranks}) must be at most {MOST_RANKS}")
    if workload.documents is not None:
        total = sum(weight for _, weight in workload.documents)
        mean = sum(length * weight for length, weight in workload.documents) / total
        if workload.seq_len > MOST_DOCUMENTS * mean:
            raise UsageError(
                f"--documents: a sequence of {workload.seq_len} must hold at most {MOST_DOCUMENTS} "
                f"documents, and they are {mean:.3g} long on average",
                "leave out the shortest ones",
            )
    outer = cluster.tiers[-1].size
    if outer is not None and workload.num_ranks > outer:
        raise UsageError(
            f"--world ({workload.num_ranks}) must be at most {outer}, the ranks of {cluster.name}"
        )


def evaluate(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    *,
    recompute: Recompute = "auto",
    overlap: bool | None = None,
    variants: bool = False,
    only: Restriction | None = None,
    require: Requirement | None = None,
    memory_counts: bool = False,
) -> Evaluated:
    """Check and price every configuration of ``workload``.

    Args:
        model: From `hp_tune.read_model`.
        cluster: From `hp_tune.read_cluster`.
        workload: Its ``recompute`` is replaced by what is decided here.
        recompute: ``"auto"`` recomputes activations only if nothing fits without it.
        overlap: Whether asynchronous exchanges exist; None asks the installed hp-cp.
        variants: Also groups of heads and K and V that are gathered again in backward.
        only: The part of the space that is searched.
        require: What a valid configuration must keep to.
        memory_counts: Whether memory is an objective beside time. Then K and V that are gathered
            in parts (``kv_chunks``) are searched too; else only if nothing fits without.
    """
    check_inputs(cluster, workload)
    if not any(layer.exchanges for layer in model.layers):
        raise UsageError(
            f"{model.name} must have a layer that context parallelism touches, and has none: all "
            f"{len(model.layers)} are linear or without attention",
            "there is nothing to choose",
        )
    notes = [*model.notes, *_length_note(model, workload), *_linear_note(model)]
    notes += _shared_note(cluster, workload)
    if workload.world_size is None:
        notes.append("memory is that of activations: parameters and optimizer need --world")
    points: list[Point] = []
    duplicates: list[Duplicate] = []
    stages = [(again, memory_counts) for again in _RECOMPUTES[recompute]]
    if not memory_counts and workload.cp_size > 1:
        stages += [(again, True) for again, _ in stages]
    chunks = memory_counts
    for again, chunks in stages:
        workload = workload.model_copy(update={"recompute": again})
        configs, duplicates = enumerate_space(
            workload.cp_size,
            overlap=overlap,
            variants=variants,
            only=only,
            sliding=_sliding(model, workload),
            chunks=chunks,
        )
        points = [_point(model, cluster, workload, config, require) for config in configs]
        if any(p.prediction for p in points) or not any(_is_memory(p) for p in points):
            break
    points = _with_own_reasons(points)
    if chunks and not memory_counts:
        notes.append("nothing fits with K and V gathered at once: searched with kv_chunks too")
    if model.qk_norm and workload.handoffs:
        notes.append("async: hand off the norms of q and k, not their projections")
    if any(point.config.halo and point.prediction for point in points):
        notes.append("halo: sliding layers must say their window, as sliding_window_attention does")
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
    return Evaluated(workload, tuple(points), tuple(duplicates), tuple(ranking), tuple(notes))


def _point(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    config: Config,
    require: Requirement | None,
) -> Point:
    found = check(model, cluster, workload, config)
    if isinstance(found, Rejection):
        return Point(config, rejection=found)
    memory = memory_use(model, cluster, workload, config)
    prediction = predict(model, cluster, workload, config)
    if require is not None:
        broken = require.check(Ranked(config, prediction, memory))
        if broken is not None:
            return Point(config, rejection=broken)
    return Point(config, prediction, memory)


_RECOMPUTES: dict[Recompute, tuple[bool, ...]] = {
    "auto": (False, True), "on": (True,), "off": (False,),
}  # fmt: skip


def _sliding(model: Model, workload: Workload) -> Sliding:
    """Return how many layers have a window that a style fetches."""
    slides = {layer.slides for layer, _ in model.layer_groups if layer.exchanges}
    if not workload.causal or True not in slides:
        return "none"
    return "some" if False in slides else "all"


def _with_own_reasons(points: Sequence[Point]) -> list[Point]:
    """Leave out what is rejected just as it is without ``halo`` and ``kv_chunks``."""
    said = {
        (point.config, point.rejection.rule, point.rejection.message)
        for point in points
        if point.rejection is not None
    }

    def is_said(point: Point) -> bool:
        plain = point.config.model_copy(update={"halo": 0, "kv_chunks": 1})
        found = point.rejection
        if found is None or plain == point.config:
            return False
        return (plain, found.rule, found.message) in said

    return [point for point in points if not is_said(point)]


def _is_memory(point: Point) -> bool:
    """Return whether a point might be valid with less memory: recomputed."""
    found = point.rejection
    return found is not None and (found.rule == "V11" or "memory_gib" in found.numbers)


def _length_note(model: Model, workload: Workload) -> list[str]:
    if model.max_length is None or workload.seq_len <= model.max_length:
        return []
    return [f"seq_len ({workload.seq_len}) is longer than {model.name} allows ({model.max_length})"]


def _linear_note(model: Model) -> list[str]:
    linear = sum(layer.kind == "linear" for layer in model.layers)
    return [f"{linear} linear layers need a parallelism of their own: not priced"] if linear else []


def _shared_note(cluster: Cluster, workload: Workload) -> list[str]:
    if stretch(cluster, workload.num_ranks) == 1:
        return []
    return [
        f"ranks share {cluster.shared_cores} cores: causal imbalance is invisible in wall time "
        "but for the last ranks to be done, since an idle rank leaves its time to the others"
    ]
