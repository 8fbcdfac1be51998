"""Tools to test code on many ranks: pools of ranks, counters, tolerances, poison, peak memory."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hp_mesh.testing._outcome import RankError, RankTimeout
    from hp_mesh.testing.collectives import Collective, count_collectives
    from hp_mesh.testing.data import randn
    from hp_mesh.testing.memory import largest_allocation, peak_memory, poison_empty
    from hp_mesh.testing.pools import Pool, ranks
    from hp_mesh.testing.repeating import eventually, everywhere, least_peak
    from hp_mesh.testing.tolerances import TOLERANCES, assert_close, tolerance

__all__ = [
    "TOLERANCES",
    "Collective",
    "Pool",
    "RankError",
    "RankTimeout",
    "assert_close",
    "count_collectives",
    "eventually",
    "everywhere",
    "largest_allocation",
    "least_peak",
    "peak_memory",
    "poison_empty",
    "randn",
    "ranks",
    "tolerance",
]

_HOME = {
    "TOLERANCES": "tolerances",
    "Collective": "collectives",
    "Pool": "pools",
    "RankError": "_outcome",
    "RankTimeout": "_outcome",
    "assert_close": "tolerances",
    "count_collectives": "collectives",
    "eventually": "repeating",
    "everywhere": "repeating",
    "largest_allocation": "memory",
    "least_peak": "repeating",
    "peak_memory": "memory",
    "poison_empty": "memory",
    "randn": "data",
    "ranks": "pools",
    "tolerance": "tolerances",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
