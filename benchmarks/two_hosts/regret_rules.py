"""Who picks what, and what the pick costs: fixed rules, regrets and their intervals."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence

from hp_tune.models.model import Attention
from hp_tune.workload import Config

__all__ = ["RULES", "interval", "mean_interval", "regret", "regrets"]

RESAMPLES = 1000


def largest_ulysses(configs: Sequence[Config], layer: Attention, cp_size: int) -> Config:
    """Return Ulysses on as many ranks as is valid."""
    plain = [config for config in configs if _is_plain(config)]
    return max(plain, key=lambda config: config.ulysses_degree)


def always_colossal(configs: Sequence[Config], layer: Attention, cp_size: int) -> Config:
    """Return the gather of K and V over all ranks."""
    return next(c for c in configs if _is_plain(c) and c.ulysses_degree == 1)


def gather_for_few_heads(configs: Sequence[Config], layer: Attention, cp_size: int) -> Config:
    """Return the gather if ``P < H / Hkv + 1``, where it sends less than Ulysses, else Ulysses."""
    if cp_size < layer.num_heads / layer.num_kv_heads + 1:
        return always_colossal(configs, layer, cp_size)
    return largest_ulysses(configs, layer, cp_size)


def _is_plain(config: Config) -> bool:
    return config == Config(ulysses_degree=config.ulysses_degree)


Rule = Callable[[Sequence[Config], Attention, int], Config]
RULES: dict[str, Rule] = {
    "largest Ulysses": largest_ulysses,
    "always Colossal": always_colossal,
    "P < H/Hkv + 1": gather_for_few_heads,
}
Samples = Mapping[Config, Sequence[float]]


def regret(samples: Samples, pick: Config) -> float:
    """Return the median time of the pick over the least median, less one."""
    medians = {config: statistics.median(found) for config, found in samples.items()}
    return medians[pick] / min(medians.values()) - 1


def regrets(samples: Samples, pick: Config) -> list[float]:
    """Return the regret in each of `RESAMPLES` draws of rounds; a round is one for all."""
    drawn = random.Random(0)
    rounds = min(map(len, samples.values()))
    found = []
    for _ in range(RESAMPLES):
        chosen = drawn.choices(range(rounds), k=rounds)
        found.append(regret({c: [s[at] for at in chosen] for c, s in samples.items()}, pick))
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the bounds of the middle 95 %."""
    ordered = sorted(values)
    cut = len(ordered) * 25 // 1000
    return ordered[cut], ordered[-1 - cut]


def mean_interval(cells: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the interval of the mean over cells, each with its draws."""
    return interval([statistics.fmean(draw) for draw in zip(*cells, strict=True)])
