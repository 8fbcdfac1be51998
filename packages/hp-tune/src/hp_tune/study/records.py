"""What a trial of a study holds: from points and measurements to attributes, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hp_mesh.checks import divisors
from hp_tune.cost.memory import GIB
from hp_tune.measured.result import Measured
from hp_tune.searching.restriction import HEAD_GROUPS, KV_CHUNKS

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from hp_tune.searching.evaluate import Point

__all__ = [
    "STATES",
    "Fate",
    "attributes_of",
    "choices",
    "measured_from",
    "measured_to",
    "trial_of",
    "values_of",
]

Fate = Literal["priced", "waiting", "outranked", "rejected"]
"""What becomes of a point: its prediction is its value; it is to be measured; it is predicted too
slow to be measured; it is not valid."""


def trial_of(point: Point, fate: Fate, key: str, cp_size: int, objectives: int = 1) -> FrozenTrial:
    """Return the trial of a point, with all its numbers."""
    from optuna.distributions import CategoricalDistribution
    from optuna.trial import TrialState, create_trial

    return create_trial(
        state=TrialState[STATES[fate]],
        values=values_of(point, fate, objectives),
        params=point.config.model_dump(),
        distributions={
            name: CategoricalDistribution(found) for name, found in choices(cp_size).items()
        },
        user_attrs=attributes_of(point, fate, key, cp_size),
    )


STATES = {"priced": "COMPLETE", "waiting": "WAITING", "outranked": "PRUNED", "rejected": "PRUNED"}
"""Names of Optuna's states."""


def choices(cp_size: int) -> dict[str, tuple[Any, ...]]:
    """Return what each parameter of a trial may be."""
    flags = (False, True)
    return {
        "ulysses_degree": tuple(divisors(cp_size)),
        "load_balance": flags,
        "overlap": flags,
        "head_groups": (1, *HEAD_GROUPS),
        "keep_kv": flags,
        "kv_chunks": (1, *KV_CHUNKS),
        "balance_hybrid": flags,
        "halo": (0, *divisors(cp_size)),
        "gather": ("kv", "latent"),
    }


def values_of(point: Point, fate: Fate, objectives: int) -> list[float] | None:
    """Return the time in ms, and the memory in GiB as a second objective, of a priced point."""
    if fate != "priced":
        return None
    assert point.prediction is not None, "a priced point has a prediction"
    assert point.memory is not None, "a priced point has its memory"
    return [point.prediction.seconds * 1e3, point.memory.total / GIB][:objectives]


def attributes_of(point: Point, fate: Fate, key: str, cp_size: int) -> dict[str, Any]:
    """Return what a trial says beside parameters and values."""
    return {
        "point": key,
        "label": point.config.label(cp_size),
        **_numbers(point),
        **(_OUTRANKED if fate == "outranked" else {}),
    }


_OUTRANKED = {
    "rule": "outranked",
    "message": "predicted too slow to be measured",
    "numbers": {},
    "hint": "search with --mode measured, or with a larger --within or --keep",
}


def _numbers(point: Point) -> dict[str, Any]:
    if point.rejection is not None:
        found = point.rejection
        return {
            "rule": found.rule,
            "message": found.message,
            "numbers": found.numbers,
            "hint": found.hint,
        }
    prediction, memory = point.prediction, point.memory
    assert prediction is not None, "a point is priced or rejected"
    assert memory is not None, "a priced point has its memory"
    return {
        "source": "analytic",
        "predicted_ms": prediction.seconds * 1e3,
        "forward_ms": prediction.forward * 1e3,
        "backward_ms": prediction.backward * 1e3,
        "exposed_comm_ms": prediction.exposed_comm * 1e3,
        "imbalance": prediction.imbalance,
        "bytes_sent": prediction.bytes_sent,
        "num_collectives": prediction.num_collectives,
        "memory_bytes": memory.total,
        "memory": dict(memory.terms),
        "terms": [
            {
                "name": term.name,
                "phase": term.phase,
                "resource": term.resource,
                "layers": term.layers,
                "ms": term.seconds * 1e3,
                "exposed_ms": term.exposed * 1e3,
                "bytes": term.bytes,
                "formula": term.formula,
                "inputs": dict(term.inputs),
                "share_of_peak": term.share_of_peak,
                "source": term.source,
                "sources": list(term.sources),
            }
            for term in prediction.terms
        ],
    }


def measured_to(found: Measured) -> dict[str, Any]:
    """Return a measurement as JSON values; numbers that are none are null."""

    def number(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "outcome": found.outcome,
        "reason": found.reason,
        "details": found.details,
        "samples_ms": list(found.samples_ms),
        "forward_ms": number(found.forward_ms),
        "backward_ms": number(found.backward_ms),
        "median_ms": number(found.median_ms),
        "interval_ms": [number(end) for end in found.interval_ms],
        "collectives": None if found.collectives is None else dict(found.collectives),
        "bytes_sent": None if found.bytes_sent is None else dict(found.bytes_sent),
        "memory_bytes": found.memory_bytes,
        "checked_len": found.checked_len,
        "folder": None if found.folder is None else str(found.folder),
    }


def measured_from(stored: Mapping[str, Any]) -> Measured:
    """Return the measurement that `measured_to` wrote."""

    def number(value: float | None) -> float:
        return math.nan if value is None else value

    low, high = stored["interval_ms"]
    return Measured(
        outcome=stored["outcome"],
        reason=stored["reason"],
        details=stored["details"],
        samples_ms=tuple(stored["samples_ms"]),
        forward_ms=number(stored["forward_ms"]),
        backward_ms=number(stored["backward_ms"]),
        median_ms=number(stored["median_ms"]),
        interval_ms=(number(low), number(high)),
        collectives=stored["collectives"],
        bytes_sent=stored["bytes_sent"],
        memory_bytes=stored["memory_bytes"],
        checked_len=stored["checked_len"],
        folder=None if stored["folder"] is None else Path(stored["folder"]),
    )
