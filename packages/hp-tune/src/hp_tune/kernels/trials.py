"""Trials of launches in a study file: what was judged once is not judged again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hp_tune.errors import StudyError
from hp_tune.kernels.space import Space, label
from hp_tune.kernels.verdict import Verdict
from hp_tune.study.journal import locked, repair_tail
from hp_tune.study.studies import open_study

if TYPE_CHECKING:
    from collections.abc import Callable

    from optuna import Study
    from optuna.trial import FrozenTrial

__all__ = ["Record", "opened"]


class Record:
    """A study file, open for its only writer.

    Args:
        path: The Journal file.
        study: The study in it.
        space: Of its points.
    """

    def __init__(self, path: Path, study: Study, space: Space) -> None:
        self.path = path
        self._study, self._space = study, space
        self._found: dict[str, Verdict] = {}
        for trial in study.get_trials(deepcopy=False):
            if "point" not in trial.user_attrs:
                raise StudyError(
                    f"{path} has trials that hp-tune did not write", "use another --studies"
                )
            self._found[trial.user_attrs["point"]] = _verdict(trial)

    def __len__(self) -> int:
        """Return the number of trials."""
        return len(self._found)

    def find(self, launch: Mapping[str, int]) -> Verdict | None:
        """Return what was said of a launch, or None."""
        return self._found.get(label(launch))

    def add(self, launch: Mapping[str, int], verdict: Verdict) -> None:
        """Append a trial: one line, whole or not there."""
        try:
            self._study.add_trial(_trial(self._space, launch, verdict))
        except OSError as error:
            raise StudyError(
                f"study {self.path} cannot be written: {error.strerror}", "use another --studies"
            ) from None
        self._found[label(launch)] = verdict


@contextmanager
def opened(
    path: Path,
    name: str,
    inputs: Mapping[str, Any],
    space: Space,
    tell: Callable[[str], None] = lambda _: None,
) -> Iterator[Record]:
    """Open a study for as long as it is tuned: two would time each other's launches.

    Args:
        path: The Journal file; created if it is not there.
        name: Of the study, for people.
        inputs: All that its numbers follow from.
        space: Of its points.
        tell: Receives one sentence when there is something to wait for or to repair.
    """
    with locked(path, tell=tell):
        dropped = repair_tail(path)
        if dropped:
            tell(f"{path} ended in the middle of a record: dropped {dropped} bytes and went on")
        yield Record(path, open_study(path, name, inputs), space)


def _trial(space: Space, launch: Mapping[str, int], verdict: Verdict) -> FrozenTrial:
    from optuna.distributions import CategoricalDistribution
    from optuna.trial import TrialState, create_trial

    states = {
        "complete": TrialState.COMPLETE,
        "failed": TrialState.FAIL,
        "pruned": TrialState.PRUNED,
    }
    why = {"rule": verdict.rule, "message": verdict.reason} if verdict.rule else {}
    return create_trial(
        state=states[verdict.state],
        value=verdict.ms,
        params=dict(launch),
        distributions={
            name: CategoricalDistribution(values) for name, values in space.parameters.items()
        },
        user_attrs={
            "point": label(launch),
            "label": label(launch),
            "launch": dict(launch),
            "numbers": {
                name: value
                for name, value in verdict.numbers.items()
                if not isinstance(value, float) or math.isfinite(value)
            },
            **why,
        },
    )


def _verdict(trial: FrozenTrial) -> Verdict:
    from optuna.trial import TrialState

    states = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned"}
    found = trial.user_attrs
    return Verdict(
        states.get(trial.state, "failed"),  # type: ignore[arg-type]
        trial.value if trial.state == TrialState.COMPLETE else None,
        found.get("rule", ""),
        found.get("message", ""),
        found.get("numbers", {}),
    )
