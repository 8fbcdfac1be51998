"""What a feature that the runtime lacks, or the model does not use yet, would win.

Each is priced with the same pieces, bandwidths and schedule as a configuration that runs. It is
offered only while the search rejects it, so that what a style has learnt disappears from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from hp_tune.clusters.cluster import Cluster
from hp_tune.cost.layer import LayerCost
from hp_tune.cost.predict import Prediction
from hp_tune.cost.ring import ring_attention
from hp_tune.cost.sparse import SparseCost
from hp_tune.cost.term import Phase, run
from hp_tune.models.model import Model
from hp_tune.searching.engine import Result
from hp_tune.searching.rules import Rejection, check
from hp_tune.workload import Config, Workload

__all__ = ["Opportunity", "find_opportunities"]

Change = Callable[[LayerCost], None]


@dataclass(frozen=True, slots=True)
class Opportunity:
    """A feature with what the best configuration that uses it would cost.

    Attributes:
        feature: Its name.
        label: The configuration that is fastest with it.
        missing_in: ``runtime``: no style does it. ``model``: a style does, and the model would have
            to be changed for it. ``plan``: styles do it, and a plan does not say it.
        ms: Predicted, forward and backward.
        gain: Part of the best configuration's time that it would save; negative where it loses.
        how: What would have to be done, one sentence.
    """

    feature: str
    label: str
    missing_in: str
    ms: float
    gain: float
    how: str

    @property
    def is_new_best(self) -> bool:
        """Whether it would be faster than all that runs today."""
        return self.gain > 0


@dataclass(frozen=True, slots=True)
class _Candidate:
    feature: str
    label: str
    missing_in: str
    seconds: float
    how: str


def find_opportunities(result: Result) -> tuple[Opportunity, ...]:
    """Return every feature that applies here, the one that wins most first."""
    if not result.ranking or result.workload.cp_size == 1:
        return ()
    best = result.ranking[0].prediction.seconds
    fastest: dict[str, _Candidate] = {}
    for candidate in _candidates(result):
        known = fastest.get(candidate.feature)
        if known is None or candidate.seconds < known.seconds:
            fastest[candidate.feature] = candidate
    found = [
        Opportunity(c.feature, c.label, c.missing_in, c.seconds * 1e3, 1 - c.seconds / best, c.how)
        for c in fastest.values()
    ]
    return tuple(sorted(found, key=lambda opportunity: (opportunity.ms, opportunity.feature)))


def _candidates(result: Result) -> Iterator[_Candidate]:
    model, cluster, workload = result.model, result.cluster, result.workload
    layers = [layer for layer, _ in model.layer_groups if layer.exchanges]
    yield from _with_handoffs(result)
    yield from _by_kind(result)
    if any(layer.is_sparse or layer.kind == "compressed" for layer in layers):
        return
    if any(layer.latent_size for layer in layers):
        yield from _latents(result)
    yield from _balanced_async(result)
    if workload.causal and workload.documents is None and not any(a.window for a in layers):
        seconds = _ring_seconds(model, cluster, workload)
        how = "a style that sends K and V from rank to rank, head-tail ordered; only priced here"
        yield _Candidate("zigzag ring", "ring", "runtime", seconds, how)


def _rule(result: Result, config: Config) -> str | None:
    """Return the rule that rejects a configuration, or None for a valid one."""
    found = check(result.model, result.cluster, result.workload, config)
    return found.rule if isinstance(found, Rejection) else None


def _with_handoffs(result: Result) -> Iterator[_Candidate]:
    """Asynchronous exchanges, where only the mark in the model is missing."""
    if result.workload.handoffs:
        return
    marked = result.workload.model_copy(update={"handoffs": True})
    rejected = [config for config, found in result.rejected if found.rule == "V09"]
    # a point that is rejected with a halo as it is without one is told once (`evaluate`)
    halos = [config.model_copy(update={"halo": _halo(result)}) for config in rejected]
    for config in dict.fromkeys((*rejected, *halos)):
        if not config.overlap:
            continue
        if isinstance(check(result.model, result.cluster, marked, config), Rejection):
            continue
        seconds = _seconds(result.model, result.cluster, marked, config)
        how = "mark where q, k and v are final with hp_cp.Handoff, and search with --handoffs"
        label = config.label(marked.cp_size)
        yield _Candidate("async exchanges", label, "model", seconds, how)


def _by_kind(result: Result) -> Iterator[_Candidate]:
    """Each kind of layer under the configuration that is fastest for it alone."""
    workload = result.workload
    times = [_times_by_kind(ranked.prediction, workload) for ranked in result.ranking]
    if len(times[0]) < 2:
        return
    chosen = [min(range(len(times)), key=lambda i: times[i][kind]) for kind in range(len(times[0]))]
    if len(set(chosen)) < 2:
        return
    names = [result.ranking[i].config.label(workload.cp_size) for i in chosen]
    seconds = sum(times[i][kind] for kind, i in enumerate(chosen))
    how = "apply them yourself: a plan has one style for sliding layers and one for all others"
    label = " + ".join(dict.fromkeys(names))
    yield _Candidate("a style per kind of layer", label, "plan", seconds, how)


def _times_by_kind(prediction: Prediction, workload: Workload) -> list[float]:
    """Return the seconds of each kind of layer, in their order in the model."""
    found: dict[int, float] = {}
    for line in prediction.timelines:
        times = line.count * (2 if workload.recompute and line.phase == "forward" else 1)
        length = times * sum(slot.exposed for slot in line.slots)
        found[id(line.layer)] = found.get(id(line.layer), 0.0) + length
    return list(found.values())


def _latents(result: Result) -> Iterator[_Candidate]:
    """MLA's latents gathered instead of K and V, which every rank then projects again."""
    workload = result.workload
    asynchronous = (False, True) if workload.handoffs else (False,)
    for balance, overlap in product((False, True), asynchronous):
        config = Config(
            ulysses_degree=1, load_balance=balance, overlap=overlap, gather="latent",
            halo=_halo(result),
        )  # fmt: skip
        if _rule(result, config) == "V09" and _balances(result, config):
            seconds = _seconds(result.model, result.cluster, workload, config)
            how = "a style that gathers the latent and runs the K and V projections behind it"
            label = config.label(workload.cp_size)
            yield _Candidate("latent gather", label, "runtime", seconds, how)


def _balances(result: Result, config: Config) -> bool:
    """Return whether causal work can be evened out here, where a configuration asks for it."""
    workload = result.workload
    return not config.load_balance or (
        workload.causal
        and workload.documents is None
        and workload.seq_len % (2 * workload.cp_size) == 0
    )


def _balanced_async(result: Result) -> Iterator[_Candidate]:
    """K and V gathered behind the projections although tails of q are swapped."""
    workload = result.workload
    config = Config(ulysses_degree=1, load_balance=True, overlap=True, halo=_halo(result))
    synchronous = config.model_copy(update={"overlap": False})
    same = any(duplicate.config == config for duplicate in result.duplicates)
    if same and _rule(result, synchronous) is None:
        seconds = _seconds(result.model, result.cluster, workload, config)
        how = "asynchronous gathers of K and V under load_balance, which runs synchronously today"
        label = config.label(workload.cp_size)
        yield _Candidate("async with load_balance", label, "runtime", seconds, how)


def _halo(result: Result) -> int:
    """Return how the best treats sliding layers, where there are others that a feature is about."""
    others = any(layer.exchanges and not layer.slides for layer in result.model.layers)
    return result.ranking[0].config.halo if others else 0


def _ring_seconds(model: Model, cluster: Cluster, workload: Workload) -> float:
    """Return the time with attention and exchanges replaced by a ring, projections as they are."""
    config = Config(ulysses_degree=1)

    def without(cost: LayerCost) -> None:
        cost.moves, cost.pairs = [], 0.0

    total = _seconds(model, cluster, workload, config, without)
    again = 2 if workload.recompute else 1
    for layer, count in model.layer_groups:
        if layer.exchanges:
            ring = ring_attention(layer, cluster, workload)
            total += count * (again * ring.forward + ring.backward)
    return total


def _seconds(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    config: Config,
    change: Change = lambda _: None,
) -> float:
    """Return the predicted time of all layers, each ``changed`` before it is scheduled."""
    slowdown = cluster.device.overlap_slowdown.value
    again = 2 if workload.recompute else 1
    phases: Sequence[tuple[Phase, int]] = (("forward", again), ("backward", 1))
    total = 0.0
    for layer, count in model.layer_groups:
        if not layer.exchanges:
            continue
        cost: LayerCost | SparseCost
        if layer.is_sparse:
            cost = SparseCost(model, layer, cluster, workload, config)
        else:
            cost = LayerCost(model, layer, cluster, workload, config)
            change(cost)
        for phase, times in phases:
            _, slots = run(cost.pieces(phase), phase, 1, slowdown, {})
            total += count * times * sum(slot.exposed for slot in slots)
    return total
