"""The order of valid configurations, and which assumed number would change its head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hp_tune.clusters.cluster import Cluster, Number
from hp_tune.cost.memory import MemoryUse
from hp_tune.cost.predict import Prediction, predict
from hp_tune.models.model import Model
from hp_tune.workload import Config, Workload

if TYPE_CHECKING:
    from hp_tune.measured.result import Measured

__all__ = [
    "Failed",
    "Flip",
    "Ranked",
    "assumed_numbers",
    "at_least",
    "ends_of",
    "find_flips",
    "front",
    "matters",
    "priced_again",
    "six_digits",
    "with_number",
]


@dataclass(frozen=True, slots=True)
class Ranked:
    """A valid configuration with its numbers.

    Attributes:
        measured: How it ran, where it did: in the finals if it came that far.
        in_finals: Whether ``measured`` is from the job that all finalists shared.
    """

    config: Config
    prediction: Prediction
    memory: MemoryUse
    measured: Measured | None = None
    in_finals: bool = False

    @property
    def ms(self) -> float:
        """Forward and backward: the measured median, or the prediction."""
        return self.prediction.seconds * 1e3 if self.measured is None else self.measured.median_ms

    @property
    def memory_bytes(self) -> int:
        """Peak per rank: what was measured where it could be read, or the prediction."""
        measured = 0 if self.measured is None else self.measured.memory_bytes
        return measured or self.memory.total

    @property
    def order(self) -> tuple[float, int, int, bool, int]:
        """Time to six digits, and the simpler configuration among equals."""
        return (
            six_digits(self.prediction.seconds),
            self.prediction.num_collectives,
            self.memory.total,
            self.config.overlap,
            -self.config.ulysses_degree,
        )


@dataclass(frozen=True, slots=True)
class Failed:
    """A valid configuration that was measured and has no time."""

    config: Config
    prediction: Prediction
    memory: MemoryUse
    measured: Measured


@dataclass(frozen=True, slots=True)
class Flip:
    """An assumed number that decides: were it ``other``, ``winner`` would be first."""

    number: str
    value: float
    other: float
    winner: Config


def front(ranking: Sequence[Ranked]) -> list[Ranked]:
    """Return those that no other beats in both time and memory, from fast to small."""
    found: list[Ranked] = []
    for ranked in sorted(ranking, key=lambda one: (six_digits(one.ms), one.memory_bytes)):
        if not found or ranked.memory_bytes < found[-1].memory_bytes:
            found.append(ranked)
    return found


def find_flips(
    model: Model, cluster: Cluster, workload: Workload, ranking: Sequence[Ranked]
) -> Iterator[Flip]:
    """Yield each assumed number that changes the winner when it is 0.3 or 3 times as large.

    Fractions go up to 1 at most.
    """
    best = ranking[0].config
    for name, value in assumed_numbers(cluster):
        if not matters(name, cluster, workload, ranking):
            continue
        for other in ends_of(name, value):
            if not _may_flip(name, other / value, [ranked.prediction for ranked in ranking]):
                continue
            changed = with_number(cluster, name, other)
            first = priced_again(model, changed, workload, ranking[0])
            rivals = [
                priced_again(model, changed, workload, ranked)
                for ranked in ranking[1:]
                if at_least(ranked.prediction, name) <= first.prediction.seconds
            ]
            again = min([first, *rivals], key=lambda ranked: ranked.order)
            if again.config != best:
                yield Flip(name, value, six_digits(other), again.config)


def assumed_numbers(cluster: Cluster) -> list[tuple[str, float]]:
    """Return the name and value of each number that nobody measured and that time depends on."""
    found = [("device", cluster.device), *((f"tiers.{t.name}", t) for t in cluster.tiers)]
    return [
        (f"{where}.{key}", value.value)
        for where, described in found
        for key, value in described
        if isinstance(value, Number) and value.source == "assumed" and key not in _NOT_TIME
    ]


def priced_again(model: Model, cluster: Cluster, workload: Workload, ranked: Ranked) -> Ranked:
    """Return the configuration as it is predicted on another cluster."""
    return replace(ranked, prediction=predict(model, cluster, workload, ranked.config))


def at_least(found: Prediction, name: str) -> float:
    """Return a time that a prediction cannot go below when one number is 0.3 or 3 times as large.

    Only terms with that number behind them change, each to no less than 0.3 of its time.
    """
    return found.seconds - 0.7 * _affected(found, name)


def _may_flip(name: str, factor: float, found: Sequence[Prediction]) -> bool:
    """Return whether a rival may overtake the first when a number is ``factor`` times as large.

    Terms with the number behind them all grow or all shrink, by that factor at most. Where they
    grow rivals do not get faster, and the first grows by them, and by its overlap at most once
    more; where they shrink the first does not get slower.
    """
    first, rivals = found[0], found[1:]
    if not rivals:
        return False
    grows = (factor > 1) != name.endswith(_RATES)
    if grows:
        most = max(factor, 1 / factor) - 1
        slowest = first.seconds + 2 * most * _affected(first, name)
        return min(rival.seconds for rival in rivals) <= slowest
    return min(at_least(rival, name) for rival in rivals) <= first.seconds


def _affected(found: Prediction, name: str) -> float:
    """Return the seconds of the terms that a number of the cluster is behind."""
    network = name.startswith("tiers.") or name == "device.overlap_slowdown"
    return sum(
        term.seconds
        for term in found.terms
        if (term.resource == "network" if network else name in term.sources)
    )


def ends_of(name: str, value: float) -> tuple[float, float]:
    """Return 0.3 and 3 times a number; a fraction stays below 1 and a factor above it."""
    limit = 1.0 if name.endswith(_FRACTIONS) else float("inf")
    lowest = 1.0 if name.endswith(_FACTORS) else 0.0
    return max(value * 0.3, lowest), min(value * 3, limit)


def matters(name: str, cluster: Cluster, workload: Workload, ranking: Sequence[Ranked]) -> bool:
    """Return whether a prediction can depend on a number: not on tiers that no group reaches."""
    if name == "device.overlap_slowdown":
        # something runs beside a collective: a projection, or attention to a part or to a group
        return any(one.config.overlap or one.config.kv_chunks > 1 for one in ranking)
    ranks, tiers = workload.cp_size * workload.tp_size, list(cluster.tiers)
    for index, tier in enumerate(tiers):
        if name.startswith(f"tiers.{tier.name}."):
            inner = tiers[index - 1].size if index else None
            return inner is None or ranks > inner
    return True


_NOT_TIME = ("memory_GiB", "comm_buffer_MiB")
_RATES = ("efficiency", "GBps", "GBps_of_bus", "GBps_per_link", "GBps_per_rank", "TFLOPS")
"""How the names of numbers end that are divided by."""
_FRACTIONS = ("efficiency", "overlap_slowdown")
_FACTORS = ("oversubscription", "ranks_per_nic")


def with_number(cluster: Cluster, name: str, value: float) -> Cluster:
    """Return the cluster with another value for the number of that name."""
    where, key = name.rsplit(".", 1)

    def changed(described: Any) -> Any:
        number = getattr(described, key).model_copy(update={"value": value})
        return described.model_copy(update={key: number})

    if where == "device":
        return cluster.model_copy(update={"device": changed(cluster.device)})
    tiers = tuple(changed(t) if f"tiers.{t.name}" == where else t for t in cluster.tiers)
    return cluster.model_copy(update={"tiers": tiers})


def six_digits(value: float) -> float:
    """Round to six significant digits: enough to rank by, and the same text on every machine."""
    return float(f"{value:.6g}")
