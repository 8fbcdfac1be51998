"""How well predictions order what somebody measured: regret and order, case by case.

A file of recorded times::

    {"schema": "hp-tune/acceptance/1", "max_mean_regret": 0.05,
     "cases": [{"name": "two hosts, 1 Gbit", "model": "tiny", "cluster": "rig.yaml",
                "workload": {"seq_len": 4096, "cp_size": 4},
                "measured_ms": {"ulysses u=4": 41.0, "colossal u=1": 52.5}}]}

Model and cluster are presets, or paths from where the file lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError

from hp_tune.clusters.cluster_files import cluster_presets, read_cluster
from hp_tune.errors import UsageError
from hp_tune.files import explain_validation, load_json
from hp_tune.models.hf_config import read_model
from hp_tune.searching.engine import NothingValidError, search
from hp_tune.workload import Workload

__all__ = ["Acceptance", "Case", "Score", "mean_regret", "read_acceptance", "score"]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Case(_Strict):
    """One workload with the measured milliseconds of at least two configurations, by label."""

    name: str
    model: str
    cluster: str
    workload: Workload
    measured_ms: Annotated[dict[str, PositiveFloat], Field(min_length=2)]


class Acceptance(_Strict):
    """Recorded cases, and how much slower the picks may be on average than the best measured."""

    schema_: Literal["hp-tune/acceptance/1"] = Field(alias="schema")
    max_mean_regret: float = Field(default=0.05, ge=0)
    cases: tuple[Case, ...] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class Score:
    """One case.

    Attributes:
        pick: What is predicted to be the fastest of those that were measured.
        best: What was the fastest.
        regret: How much slower the pick was, as a fraction.
        order: Part of all pairs that are predicted in the measured order.
        unknown: Measured labels that the search has no valid configuration for.
    """

    case: str
    pick: str
    best: str
    regret: float
    order: float
    unknown: tuple[str, ...]


def read_acceptance(path: Path) -> Acceptance:
    """Return the cases in ``path``; paths in it are made to start from its folder."""
    data = load_json(path)
    try:
        found = Acceptance.model_validate(data)
    except ValidationError as error:
        raise explain_validation(error, Acceptance, str(path), {}) from None
    return found.model_copy(
        update={"cases": tuple(_placed(case, path.parent) for case in found.cases)}
    )


def _placed(case: Case, folder: Path) -> Case:
    """Take names that lie beside the file as paths; others are presets."""
    moved: dict[str, Any] = {}
    for key in ("model", "cluster"):
        beside = folder / getattr(case, key)
        if beside.exists() and getattr(case, key) not in cluster_presets():
            moved[key] = str(beside)
    return case.model_copy(update=moved)


def score(case: Case) -> Score:
    """Return how the prediction compares with what was measured.

    Raises:
        UsageError: Fewer than two of the measured configurations are valid here.
    """
    cp = case.workload.cp_size
    model, cluster = read_model(case.model), read_cluster(case.cluster)
    try:
        ranking = search(
            model, cluster, case.workload, overlap=True, variants=True,
            recompute="on" if case.workload.recompute else "off",
        ).ranking  # fmt: skip
    except NothingValidError:
        ranking = ()
    predicted = {ranked.config.label(cp): ranked.prediction.seconds for ranked in ranking}
    known = [label for label in predicted if label in case.measured_ms]
    unknown = tuple(sorted(set(case.measured_ms) - set(known)))
    if len(known) < 2:
        raise UsageError(
            f"case {case.name!r}: at least two measured configurations must be valid, not "
            f"{len(known)} (unknown: {', '.join(unknown)})",
            f"there are: {', '.join(predicted) or 'none'}",
        )
    times = case.measured_ms
    best = min(known, key=times.__getitem__)
    pairs = list(combinations(known, 2))  # in predicted order
    right = sum(times[first] <= times[second] for first, second in pairs)
    return Score(
        case=case.name,
        pick=known[0],
        best=best,
        regret=times[known[0]] / times[best] - 1,
        order=right / len(pairs),
        unknown=unknown,
    )


def mean_regret(scores: list[Score]) -> float:
    """Return the mean over cases."""
    return sum(found.regret for found in scores) / len(scores)
