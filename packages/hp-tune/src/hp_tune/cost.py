"""Predict the time of one configuration.

Counted is what context parallelism can change: the four projections, attention, its collectives
and the copies around them, forward and backward, summed over layers (`hp_tune.layer_cost`). Dense
layers, optimizer and FSDP traffic are the same for every configuration and left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hp_cp.plan import Plan
from hp_tune.cluster import Cluster
from hp_tune.layer_cost import LayerCost, Term
from hp_tune.model import Model
from hp_tune.workload import Config, Workload

__all__ = ["Prediction", "predict"]


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

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward + self.backward


def predict(model: Model, cluster: Cluster, workload: Workload, config: Config) -> Prediction:
    """Return the prediction for a configuration that `hp_tune.space.check` found valid."""
    plan = Plan(workload.cp_size, config.ulysses_degree, config.load_balance)
    terms: list[Term] = []
    imbalance = 1.0
    calls = peak = resident = 0
    sent: dict[str, int] = {}
    for layer, count in model.layer_groups:
        if not layer.exchanges:
            continue
        cost = LayerCost(model, layer, count, cluster, workload, config, plan)
        terms += cost.terms()
        imbalance = max(imbalance, cost.imbalance)
        peak = max(peak, cost.description.peak_extra_bytes)
        resident = max(resident, cost.description.resident_kv_bytes)
        again = ("forward",) if workload.recompute else ()
        for row in cost.description.collectives:
            times = count * (2 if row.phase in again else 1)
            sent[row.kind] = sent.get(row.kind, 0) + times * row.bytes_sent
            calls += times * row.count
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
    )
