"""Keep every point of a search as a trial of an Optuna study, each exactly once.

An analytic point is recorded by one appended line (`Study.add_trial`), so a killed search leaves
whole points or none. Which points are missing is decided, and they are added, under one lock:
a second worker on the same file finds nothing left to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hp_mesh.checks import divisors
from hp_tune.errors import StudyError
from hp_tune.evaluate import Point
from hp_tune.files import sha256
from hp_tune.journal import locked, open_storage, repair_tail
from hp_tune.space import HEAD_GROUPS
from hp_tune.workload import Config

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

__all__ = ["Point", "Recorded", "open_study", "point_key", "read_study", "record"]


@dataclass(frozen=True, slots=True)
class Recorded:
    """What recording did: points added now, points found there, bytes of a torn tail dropped."""

    path: Path
    added: int
    found: int
    dropped_bytes: int


def point_key(config: Config) -> str:
    """Return the identity of a point within its study."""
    return sha256(config.model_dump())[:16]


def record(
    path: Path,
    name: str,
    inputs: Mapping[str, Any],
    cp_size: int,
    points: Sequence[Point],
    *,
    tell: Callable[[str], None] = lambda _: None,
) -> Recorded:
    """Add the points that the study at ``path`` does not have yet.

    Args:
        path: The Journal file; created when it does not exist.
        name: Name of the study, for people.
        inputs: Everything that the numbers follow from. A study of other inputs is refused.
        cp_size: Number of CP ranks, the range of the degree.
        points: The whole space.
        tell: Receives one sentence when there is something to wait for or to repair.
    """
    with locked(path, tell=tell):
        dropped = repair_tail(path)
        if dropped:
            tell(f"{path} ended in the middle of a record: dropped {dropped} bytes and went on")
        try:
            study = open_study(path, name, inputs)
            known = _keys(study, path)
            missing = [point for point in points if point_key(point.config) not in known]
            for point in missing:
                study.add_trial(_trial(point, cp_size))
        except OSError as error:
            raise StudyError(
                f"study {path} cannot be written: {error.strerror}", "use another --study"
            ) from None
    return Recorded(path, len(missing), len(points) - len(missing), dropped)


def read_study(path: Path) -> tuple[str, dict[str, Any], list[FrozenTrial]]:
    """Return (name, attributes, trials) of the one study in ``path``; nothing is written."""
    import optuna

    if not path.is_file():
        raise StudyError(f"there is no study {path}")
    storage = open_storage(path)
    found = storage.get_all_studies()
    if len(found) != 1:
        raise StudyError(f"{path} must hold one study of hp-tune, not {len(found)}")
    study = optuna.load_study(study_name=found[0].study_name, storage=storage)
    return study.study_name, study.user_attrs, study.get_trials(deepcopy=False)


def open_study(path: Path, name: str, inputs: Mapping[str, Any]) -> Study:
    """Return the study in ``path``, made if it is not there; one of other inputs is refused."""
    import optuna

    storage = open_storage(path)
    others = [found for found in storage.get_all_studies() if found.study_name != name]
    if others:
        wanted, has = dict(inputs), dict(others[0].user_attrs.get("inputs", {}))
        fields = [key for key in wanted if has.get(key) != wanted[key]]
        raise StudyError(
            f"{path} holds another search ({others[0].study_name!r}, different in "
            f"{', '.join(fields) or 'its name'})",
            "use another --study, or delete the file",
        )
    study = optuna.create_study(
        storage=storage, study_name=name, direction="minimize", load_if_exists=True
    )
    stored = study.user_attrs.get("inputs")
    if stored is None:  # new, or killed right after it was created
        study.set_user_attr("inputs", dict(inputs))
    elif stored != dict(inputs):
        fields = [key for key in inputs if stored.get(key) != inputs[key]]
        raise StudyError(
            f"{path} was made from other inputs: {', '.join(fields) or 'unknown'} differ",
            "use another --study, or delete the file",
        )
    return study


def _keys(study: Study, path: Path) -> set[str]:
    keys = [trial.user_attrs.get("point") for trial in study.get_trials(deepcopy=False)]
    if None in keys:
        raise StudyError(f"{path} has trials that hp-tune did not write", "use another --study")
    return {str(key) for key in keys}


def _trial(point: Point, cp_size: int) -> FrozenTrial:
    from optuna.distributions import CategoricalDistribution
    from optuna.trial import TrialState, create_trial

    config = point.config
    attributes: dict[str, Any] = {
        "point": point_key(config),
        "label": config.label(cp_size),
        **_numbers(point),
    }
    flags = CategoricalDistribution((False, True))
    return create_trial(
        state=TrialState.PRUNED if point.rejection else TrialState.COMPLETE,
        value=None if point.prediction is None else point.prediction.seconds * 1e3,
        params=config.model_dump(),
        distributions={
            "ulysses_degree": CategoricalDistribution(tuple(divisors(cp_size))),
            "load_balance": flags,
            "overlap": flags,
            "head_groups": CategoricalDistribution((1, *HEAD_GROUPS)),
            "keep_kv": flags,
            "gather": CategoricalDistribution(("kv", "latent")),
        },
        user_attrs=attributes,
    )


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
