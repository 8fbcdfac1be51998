"""Sliding layers under ``halo``: which ranks fetch and send most of the keys of a window.

Which rows a rank fetches is `hp_cp.halo`'s to say. Ranks differ: the first fetches nothing, the
last sends nothing, and those near either end less than the others::

    c = 4, a window of one shard and a half
    rank 0    fetches  -     sends  1.5
    rank 1             1            1.5
    rank 2             1.5          1
    rank 3             1.5          -
"""

from __future__ import annotations

from functools import lru_cache

from hp_cp.halo import passed_rows
from hp_cp.plan import Plan
from hp_tune.models.model import Attention
from hp_tune.workload import Config

__all__ = ["busiest_messages", "busiest_ranks", "layer_config", "layer_plan"]


def layer_config(layer: Attention, config: Config) -> Config:
    """Return the configuration of a layer: sliding ones may have a style of their own."""
    return config.of_layers(slide=layer.slides)


def layer_plan(layer: Attention, config: Config, cp_size: int) -> Plan:
    """Return the plan of a layer's style."""
    own = layer_config(layer, config)
    return Plan(cp_size, own.ulysses_degree, own.balances)


def busiest_ranks(ranks: int, shard: int, window: int, sinks: int) -> tuple[int, ...]:
    """Return Colossal indices among which are those that send, fetch and hold most.

    The first sends most, the last fetches most; in both directions together it is the last one
    whose rows a window reaches in full, or the next. Others have sinks to send as well.

    Args:
        ranks: Of a Colossal group.
        shard: Rows of each.
        window: Keys that a query sees, its own included.
        sinks: First keys that it sees as well.
    """
    reach = -(-(window - 1) // shard)  # ranks back
    found = {ranks - 1, ranks - reach - 1, ranks - reach, *range(-(-sinks // shard) + 1)}
    return tuple(sorted(rank for rank in found if 0 <= rank < ranks))


@lru_cache(maxsize=256)
def busiest_messages(ranks: int, shard: int, window: int, sinks: int) -> tuple[int, ...]:
    """Return the rows of each message of the rank that is done last, the nearest peer's first.

    The same forward, where it sends or fetches them, and backward, where their gradients go back.
    """
    found: list[tuple[int, ...]] = []
    for rank in busiest_ranks(ranks, shard, window, sinks):
        sent, fetched = passed_rows(rank, ranks, shard, window, sinks)
        found += [tuple(sent), tuple(reversed(fetched))]  # peers ascend: those before are far first
    return max(found, key=sum)
