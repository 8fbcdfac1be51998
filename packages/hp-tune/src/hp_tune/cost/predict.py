"""Predict the time of one configuration.

Counted is what context parallelism can change: projections, attention, its collectives and the
copies around them, forward and backward, summed over layers. Dense layers, optimizer and FSDP
traffic are the same for every configuration and left out.

A layer is a list of pieces (`hp_tune.cost.layer` for the styles of `hp_cp`, `hp_tune.cost.sparse`
for those of `hp_dsa`), each with its price (`hp_tune.cost.pricing`); a schedule of two resources
(`hp_tune.cost.schedule`) says what of it the step waits for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from hp_tune.clusters.cluster import Cluster, Source
from hp_tune.cost.halo import layer_config
from hp_tune.cost.layer import LayerCost
from hp_tune.cost.pricing import Move
from hp_tune.cost.schedule import Slot
from hp_tune.cost.term import Phase, Term, run, source_of
from hp_tune.models.model import Attention, Model
from hp_tune.workload import Config, Workload

if TYPE_CHECKING:
    from hp_tune.cost.sparse import SparseCost

__all__ = ["Prediction", "Timeline", "predict"]


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each piece of one layer runs in one phase.

    Attributes:
        layer: The kind of layer.
        count: How many there are; each runs like this.
        slots: In the order in which each resource runs them.
    """

    layer: Attention
    count: int
    phase: Phase
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one configuration costs per micro-batch, on the slowest rank.

    Attributes:
        forward, backward: Seconds.
        exposed_comm: Seconds of collectives and swaps that nothing hides.
        imbalance: Attention work of the busiest rank over the mean.
        bytes_sent: Bytes that leave a rank, by kind of collective.
        num_collectives: Calls per micro-batch.
        peak_extra_bytes: The largest `Plan.describe` peak of any layer.
        resident_kv_bytes: K and V as attention sees them, the largest of any layer.
        terms: Every addend with its formula, inputs, bytes, share of the peak and source.
        timelines: For each kind of layer, forward and backward.
    """

    forward: float
    backward: float
    exposed_comm: float
    imbalance: float
    bytes_sent: dict[str, int]
    num_collectives: int
    peak_extra_bytes: int
    resident_kv_bytes: int
    terms: tuple[Term, ...] = field(repr=False)
    timelines: tuple[Timeline, ...] = field(default=(), repr=False)

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward + self.backward


def predict(model: Model, cluster: Cluster, workload: Workload, config: Config) -> Prediction:
    """Return the prediction for a configuration that `searching.rules.check` found valid."""
    job = _job(model, cluster, workload)
    terms: list[Term] = []
    timelines: list[Timeline] = []
    imbalance = 1.0
    calls = peak = resident = 0
    sent: dict[str, int] = {}
    for place, (layer, count) in enumerate(model.layer_groups):
        if not layer.exchanges:
            continue
        own = layer_config(layer, config)
        found = job.priced.get((place, own))
        if found is None:
            found = job.priced[place, own] = _priced(job, layer, count, own)
        peak, resident = max(peak, found.peak), max(resident, found.resident)
        imbalance = max(imbalance, found.imbalance)
        timelines += found.timelines
        terms += found.terms
        for move in found.moves:
            again = workload.recompute and move.phase == "forward"
            times = count * (2 if again else 1)
            sent[move.kind] = sent.get(move.kind, 0) + times * move.bytes_sent
            calls += times * move.count
    by_phase = {
        phase: sum(term.exposed for term in terms if term.phase == phase)
        for phase in ("forward", "backward")
    }
    return Prediction(
        forward=by_phase["forward"],
        backward=by_phase["backward"],
        exposed_comm=sum(term.exposed for term in terms if term.resource == "network"),
        imbalance=imbalance,
        bytes_sent=dict(sorted(sent.items())),
        num_collectives=calls,
        peak_extra_bytes=peak,
        resident_kv_bytes=resident,
        terms=tuple(terms),
        timelines=tuple(timelines),
    )


@dataclass(frozen=True, slots=True)
class _Priced:
    """One kind of layer under its own style; terms are those of all layers of the kind."""

    terms: tuple[Term, ...]
    timelines: tuple[Timeline, ...]
    moves: tuple[Move, ...]
    imbalance: float
    peak: int
    resident: int


class _Job(NamedTuple):
    """What stays while a search prices one configuration after the other, and layers so far.

    Configurations differ in some kinds of layers only (``halo``): the others are priced once.
    """

    model: Model
    cluster: Cluster
    workload: Workload
    sources: Mapping[str, Source]
    priced: dict[tuple[int, Config], _Priced]


_last: _Job | None = None


def _job(model: Model, cluster: Cluster, workload: Workload) -> _Job:
    """Return the last job if it is of these very objects, or a new one."""
    global _last
    job = _last
    if job is None or not (
        job.model is model and job.cluster is cluster and job.workload is workload
    ):
        _last = job = _Job(model, cluster, workload, source_of(cluster, workload.dtype), {})
    return job


def _priced(job: _Job, layer: Attention, count: int, config: Config) -> _Priced:
    cost: LayerCost | SparseCost
    if layer.is_sparse:
        from hp_tune.cost.sparse import SparseCost  # most models have no such layer

        cost = SparseCost(job.model, layer, job.cluster, job.workload, config)
        peak = resident = cost.description.gathered_bytes
    else:
        cost = LayerCost(job.model, layer, job.cluster, job.workload, config)
        peak = cost.description.peak_extra_bytes
        resident = cost.description.resident_kv_bytes
    terms: list[Term] = []
    lines: list[Timeline] = []
    slowdown = job.cluster.device.overlap_slowdown.value
    phases: tuple[Phase, ...] = ("forward", "backward")
    for phase in phases:
        found, slots = run(cost.pieces(phase), phase, count, slowdown, job.sources)
        terms += found
        lines.append(Timeline(layer, count, phase, tuple(slots)))
    if job.workload.recompute:
        terms += [
            replace(term, phase="backward", name=f"{term.name} (again)")
            for term in terms
            if term.phase == "forward"
        ]
    return _Priced(tuple(terms), tuple(lines), tuple(cost.moves), cost.imbalance, peak, resident)
