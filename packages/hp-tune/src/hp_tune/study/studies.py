"""The Optuna study that holds a search: made, opened, and refused where it is another one's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hp_tune.errors import StudyError
from hp_tune.study.journal import open_storage

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

__all__ = ["open_study", "read_study", "study_in", "trials_by_key"]


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
    return study_in(open_storage(path), str(path), name, inputs)


def study_in(
    storage: BaseStorage,
    where: str,
    name: str,
    inputs: Mapping[str, Any],
    objectives: int = 1,
    *,
    alone: bool = True,
) -> Study:
    """Return the study of that name, made if it is not there; one of other inputs is refused.

    Args:
        storage: Held by this worker alone.
        where: Its name for people.
        name: Of the study.
        inputs: All that its numbers follow from.
        objectives: How many values a trial has.
        alone: Whether no other study may be in the storage.
    """
    import optuna

    others = [found for found in storage.get_all_studies() if found.study_name != name]
    if alone and others:
        wanted, has = dict(inputs), dict(others[0].user_attrs.get("inputs", {}))
        fields = [key for key in wanted if has.get(key) != wanted[key]]
        raise StudyError(
            f"{where} holds another search ({others[0].study_name!r}, different in "
            f"{', '.join(fields) or 'its name'})",
            "use another --study, or delete the file",
        )
    study = optuna.create_study(
        storage=storage,
        study_name=name,
        directions=["minimize"] * objectives,
        load_if_exists=True,
    )
    stored = study.user_attrs.get("inputs")
    if stored is None:  # new, or killed right after it was created
        study.set_user_attr("inputs", dict(inputs))
    elif stored != dict(inputs):
        fields = [key for key in inputs if stored.get(key) != inputs[key]]
        raise StudyError(
            f"{where} was made from other inputs: {', '.join(fields) or 'unknown'} differ",
            "use another --study, or delete the file",
        )
    return study


def trials_by_key(study: Study, where: str) -> dict[str, FrozenTrial]:
    """Return the trials by the identity of their point; ``where`` names the study for people."""
    found: dict[str, FrozenTrial] = {}
    for trial in study.get_trials(deepcopy=False):
        if "point" not in trial.user_attrs:
            raise StudyError(
                f"{where} has trials that hp-tune did not write", "use another --study"
            )
        found[str(trial.user_attrs["point"])] = trial
    return found
