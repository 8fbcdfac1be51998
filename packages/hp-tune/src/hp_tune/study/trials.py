"""Keep every point of a search as a trial of an Optuna study, each exactly once.

A point is one appended record, so a killed search leaves whole points or none. Which points are
missing is decided, and they are added, by one worker at a time: a second worker on the same study
finds nothing left to do. A point that is to be measured waits; who takes it writes down who it is,
so that the point of a worker that was killed is taken up by the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hp_tune.files import sha256
from hp_tune.measured.result import Measured
from hp_tune.study.fresh import first_records, holds
from hp_tune.study.journal import in_one_write
from hp_tune.study.owner import is_gone, this_process
from hp_tune.study.place import JournalPlace, Place
from hp_tune.study.records import Fate, measured_from, measured_to, trial_of
from hp_tune.study.studies import study_in, trials_by_key
from hp_tune.workload import Config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optuna import Study
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

    from hp_tune.searching.evaluate import Point

__all__ = [
    "FINALS",
    "Claim",
    "Recorded",
    "Trials",
    "point_key",
]

FINALS = "finals"
"""Attribute of a study: how the finalists ran against each other, by their keys."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What recording did: points added now, points found there, bytes of a torn tail dropped."""

    path: Path | str
    added: int
    found: int
    dropped_bytes: int


@dataclass(frozen=True, slots=True)
class Claim:
    """What a worker may measure now.

    Attributes:
        config: Its point, or None.
        left: How many points have no end yet, that one included.
        busy: The owners of those that are being measured elsewhere.
    """

    config: Config | None
    left: int
    busy: tuple[Mapping[str, Any], ...]


def point_key(config: Config) -> str:
    """Return the identity of a point within its study."""
    return sha256(config.model_dump())[:16]


class Trials:
    """The trials of one search, which other workers may share.

    Args:
        place: Where the study lives.
        name: Its name, for people; in a shared place with a digest of ``inputs`` behind it.
        inputs: Everything that the numbers follow from. A study of other inputs is refused.
        cp_size: Number of CP ranks, the range of the degree.
        objectives: How many values a trial has: time in ms, and memory in GiB.
    """

    def __init__(
        self,
        place: Place,
        name: str,
        inputs: Mapping[str, Any],
        cp_size: int,
        *,
        objectives: int = 1,
    ) -> None:
        self.place, self.inputs, self.cp_size = place, dict(inputs), cp_size
        self.name = f"{name} ({sha256(self.inputs)[:12]})" if place.is_shared else name
        self.objectives = objectives

    @contextmanager
    def _open(self) -> Iterator[tuple[Study, BaseStorage]]:
        with self.place.exclusive() as storage:
            study = study_in(
                storage, str(self.place), self.name, self.inputs, self.objectives,
                alone=not self.place.is_shared,
            )  # fmt: skip
            yield study, storage

    def add(self, points: Sequence[tuple[Point, Fate]]) -> Recorded:
        """Add the points that the study does not have yet, as done, waiting or ruled out."""
        without = self._added_without_optuna(points)
        if without is not None:
            return without
        with self._open() as (study, storage):
            known = trials_by_key(study, str(self.place))
            missing = [p for p in points if point_key(p[0].config) not in known]
            with in_one_write(storage):
                study.add_trials(
                    trial_of(point, fate, point_key(point.config), self.cp_size, self.objectives)
                    for point, fate in missing
                )
        where = self.place.path if isinstance(self.place, JournalPlace) else str(self.place)
        return Recorded(where, len(missing), len(points) - len(missing), self.place.dropped)

    def _added_without_optuna(self, points: Sequence[tuple[Point, Fate]]) -> Recorded | None:
        """Write a study that is not there yet, or find all points in it; None if that is not so.

        Optuna takes longer to be imported than everything else that a search by prediction does.
        """
        place = self.place
        if not isinstance(place, JournalPlace) or any(fate == "waiting" for _, fate in points):
            return None
        keyed = [(point, fate, point_key(point.config)) for point, fate in points]
        try:
            is_new = not place.path.exists()
        except OSError:  # such as a name that is too long; who opens it says so
            return None
        if is_new:
            records = first_records(self.name, self.inputs, keyed, self.cp_size, self.objectives)
            return Recorded(place.path, len(points), 0, 0) if place.create(records) else None
        wanted = {key for _, _, key in keyed}
        if holds(place.path, self.name, self.inputs, self.objectives, wanted):
            return Recorded(place.path, 0, len(points), 0)
        return None

    def claim(self, wanted: Sequence[Config], *, may_take: bool = True) -> Claim:
        """Take the first of ``wanted`` that waits, or whose owner has died, if there is one.

        Args:
            wanted: In the order in which they are taken.
            may_take: Whether to take one, or only to look.
        """
        from optuna.trial import TrialState

        taken: Config | None = None
        left, busy = 0, list[dict[str, Any]]()
        with self._open() as (study, storage):
            known = trials_by_key(study, str(self.place))
            for config in wanted:
                trial = known[point_key(config)]
                if trial.state.is_finished():
                    continue
                left += 1
                owner = trial.user_attrs.get("owner", {})
                if trial.state == TrialState.RUNNING and not is_gone(owner):
                    busy.append(owner)
                elif taken is None and may_take:
                    storage.set_trial_user_attr(trial._trial_id, "owner", this_process())
                    if trial.state == TrialState.WAITING:
                        storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING)
                    taken = config
        return Claim(taken, left, tuple(busy))

    def finish(self, config: Config, measured: Measured, values: Sequence[float]) -> None:
        """Record how a claimed point ran; ``values`` are those of the objectives."""
        from optuna.trial import TrialState

        with self._mine(config) as (trial, storage):
            if trial is None:
                return
            number = trial._trial_id
            storage.set_trial_user_attr(number, "measured", measured_to(measured))
            if measured.outcome == "ok":
                storage.set_trial_user_attr(number, "source", "measured")
                storage.set_trial_state_values(number, TrialState.COMPLETE, list(values))
                return
            storage.set_trial_user_attr(number, "outcome", measured.outcome)
            storage.set_trial_user_attr(number, "message", measured.reason)
            storage.set_trial_state_values(number, TrialState.FAIL)

    def give_back(self) -> None:
        """Let what this process claimed wait again, after an interruption, for who comes next."""
        from optuna.trial import TrialState

        with self._open() as (study, storage):
            for trial in trials_by_key(study, str(self.place)).values():
                if trial.state == TrialState.RUNNING and _is_mine(trial):
                    times = trial.user_attrs.get("interrupted", 0) + 1
                    storage.set_trial_user_attr(trial._trial_id, "interrupted", times)
                    storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)

    @contextmanager
    def _mine(self, config: Config) -> Iterator[tuple[FrozenTrial | None, BaseStorage]]:
        """Give the trial of a claimed point, or None where another took it for abandoned."""
        with self._open() as (study, storage):
            trial = trials_by_key(study, str(self.place))[point_key(config)]
            mine = _is_mine(trial) and not trial.state.is_finished()
            yield (trial if mine else None), storage

    def measured(self, wanted: Sequence[Config]) -> dict[Config, Measured]:
        """Return how each of ``wanted`` ran, for those that did."""
        with self._open() as (study, _):
            known = trials_by_key(study, str(self.place))
        found = {config: known.get(point_key(config)) for config in wanted}
        return {
            config: measured_from(trial.user_attrs["measured"])
            if "measured" in trial.user_attrs
            else Measured("crash", "another tool ended this trial")
            for config, trial in found.items()
            if trial is not None and trial.state.is_finished()
        }

    def finals(self, finalists: Sequence[Config]) -> dict[Config, Measured] | None:
        """Return how these finalists ran against each other, or None if they have not."""
        with self._open() as (study, _):
            found = study.user_attrs.get(FINALS, {})
        keys = {point_key(config): config for config in finalists}
        if set(found) != set(keys):
            return None
        return {keys[key]: measured_from(one) for key, one in found.items()}

    def keep_finals(self, found: Mapping[Config, Measured]) -> None:
        """Record how the finalists ran against each other."""
        with self._open() as (study, _):
            study.set_user_attr(
                FINALS, {point_key(config): measured_to(one) for config, one in found.items()}
            )


def _is_mine(trial: FrozenTrial) -> bool:
    owner, me = trial.user_attrs.get("owner", {}), this_process()
    return all(owner.get(key) == me[key] for key in me if key != "until")
