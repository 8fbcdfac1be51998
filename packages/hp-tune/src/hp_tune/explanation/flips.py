"""At what value exactly an assumed number changes the winner."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hp_tune.clusters.cluster import Cluster
from hp_tune.models.model import Model
from hp_tune.searching.ranking import (
    Ranked,
    assumed_numbers,
    at_least,
    ends_of,
    matters,
    priced_again,
    six_digits,
    with_number,
)
from hp_tune.workload import Config, Workload

__all__ = ["ExactFlip", "find_exact_flips"]

STEPS = 4
"""Places between a number and the end of its range that are looked at before bisecting: a winner
that comes and goes between two of them is not seen."""
PRECISION = 1e-4


@dataclass(frozen=True, slots=True)
class ExactFlip:
    """An assumed number that decides.

    Attributes:
        number: Its name, such as ``device.attention_efficiency``.
        value: What the cluster's description has.
        factor: The multiple of ``value`` nearest to 1 at which another configuration is first, to
            four digits.
        winner: That configuration.
    """

    number: str
    value: float
    factor: float
    winner: Config

    @property
    def at(self) -> float:
        """The number where the winner changes."""
        return six_digits(self.value * self.factor)


def find_exact_flips(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    ranking: Sequence[Ranked],
    tell: Callable[[str, int, int], None] = lambda _name, _done, _total: None,
) -> Iterator[ExactFlip]:
    """Yield, for each assumed number and direction between x0.3 and x3, where it flips.

    Args:
        model, cluster, workload, ranking: Of a search; ``ranking`` is not empty.
        tell: Receives the number that is looked at, how many are done, and of how many.
    """
    best = ranking[0].config
    numbers = [
        (name, value)
        for name, value in assumed_numbers(cluster)
        if matters(name, cluster, workload, ranking)
    ]
    for done, (name, value) in enumerate(numbers):
        tell(name, done, len(numbers))
        for end in ends_of(name, value):
            search = _Search(model, cluster, workload, ranking, name, end)
            if search.rivals and not math.isclose(end, value):
                found = search.nearest(value, best)
                if found is not None:
                    factor, winner = found
                    yield ExactFlip(name, value, float(f"{factor:.4g}"), winner)


class _Search:
    """Who wins as one number moves to ``end``, among those who can win at all."""

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        workload: Workload,
        ranking: Sequence[Ranked],
        name: str,
        end: float,
    ) -> None:
        self.model, self.cluster, self.workload, self.name = model, cluster, workload, name
        self.first, self.end = ranking[0], end
        slowest = max(self._price(self.first, end).prediction.seconds,
                      self.first.prediction.seconds)  # fmt: skip
        self.rivals = [r for r in ranking[1:] if at_least(r.prediction, name) <= slowest]

    def _price(self, ranked: Ranked, value: float) -> Ranked:
        changed = with_number(self.cluster, self.name, value)
        return priced_again(self.model, changed, self.workload, ranked)

    def winner(self, value: float) -> Config:
        """Return the first of the ranking with that value."""
        found = [self._price(ranked, value) for ranked in (self.first, *self.rivals)]
        return min(found, key=lambda ranked: ranked.order).config

    def nearest(self, value: float, best: Config) -> tuple[float, Config] | None:
        """Return (factor, winner) where the winner stops being ``best``, or None."""
        limit = self.end / value
        same = 1.0
        for step in range(1, STEPS + 1):
            other = limit ** (step / STEPS)
            winner = self.winner(value * other)
            if winner != best:
                break
            same = other
        else:
            return None
        while abs(other / same - 1) > PRECISION:
            middle = math.sqrt(same * other)
            found = self.winner(value * middle)
            if found == best:
                same = middle
            else:
                other, winner = middle, found
        return other, winner
