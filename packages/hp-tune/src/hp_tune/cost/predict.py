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
from typing import TYPE_CHECKING

from hp_tune.clusters.cluster import Cluster, Source
from hp_tune.cost.layer import LayerCost
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
    """Return the prediction for a configuration that `searching.space.check` found valid."""
    sources = source_of(cluster, workload.dtype)
    terms: list[Term] = []
    timelines: list[Timeline] = []
    imbalance = 1.0
    calls = peak = resident = 0
    sent: dict[str, int] = {}
    for layer, count in model.layer_groups:
        if not layer.exchanges:
            continue
        cost: LayerCost | SparseCost
        if layer.is_sparse:
            from hp_tune.cost.sparse import SparseCost  # most models have no such layer

            cost = SparseCost(model, layer, cluster, workload, config)
            extra = held = cost.description.gathered_bytes
        else:
            cost = LayerCost(model, layer, cluster, workload, config)
            extra = cost.description.peak_extra_bytes
            held = cost.description.resident_kv_bytes
        peak, resident = max(peak, extra), max(resident, held)
        imbalance = max(imbalance, cost.imbalance)
        found, lines = _layer(cost, layer, count, cluster, sources)
        timelines += lines
        terms += found
        if workload.recompute:
            terms += [
                replace(term, phase="backward", name=f"{term.name} (again)")
                for term in found
                if term.phase == "forward"
            ]
        for move in cost.moves:
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


def _layer(
    cost: LayerCost | SparseCost,
    layer: Attention,
    count: int,
    cluster: Cluster,
    sources: Mapping[str, Source],
) -> tuple[list[Term], list[Timeline]]:
    terms: list[Term] = []
    lines: list[Timeline] = []
    slowdown = cluster.device.overlap_slowdown.value
    phases: tuple[Phase, ...] = ("forward", "backward")
    for phase in phases:
        found, slots = run(cost.pieces(phase), phase, count, slowdown, sources)
        terms += found
        lines.append(Timeline(layer, count, phase, tuple(slots)))
    return terms, lines
