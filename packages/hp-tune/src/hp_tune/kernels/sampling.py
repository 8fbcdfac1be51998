"""Which launch to try next: Optuna's TPE on ordered values, and no point twice.

A sampler with the same seed that hears the same answers asks the same questions. So a study is
continued by asking from the beginning and answering from its file: what comes after is what would
have come without the interruption.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING

from hp_tune.kernels.space import Space, label

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution

__all__ = ["Proposals", "proposals"]

Proposals = Generator[dict[str, int], float | None, None]

STARTUP = 8
"""Points at random before TPE has something to learn from."""
REPEATS = 3
"""How often in a row it may propose what is known, before one that is not is put in its way."""


def proposals(space: Space, seed: int, first: Mapping[str, int] | None) -> Proposals:
    """Yield every point of ``space`` once, the most promising first; send the time of each in.

    Args:
        space: The points.
        seed: Of all that is random here.
        first: Is yielded first.

    Yields:
        A launch. Send its time in ms, or None if it cannot be used.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    names = list(space.parameters)
    by_index: dict[str, BaseDistribution] = {
        name: optuna.distributions.IntDistribution(0, len(values) - 1)
        for name, values in space.parameters.items()
    }
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP)
    study = optuna.create_study(sampler=sampler, direction="minimize")
    left = {label(launch): launch for launch in space}
    order = list(left)
    random.Random(seed).shuffle(order)
    known: dict[str, float | None] = {}
    if first is not None:
        _put_in_the_way(study, space, first)
    repeats = 0
    while left:
        if repeats >= REPEATS:
            while order[-1] in known:
                order.pop()
            _put_in_the_way(study, space, left[order[-1]])
            repeats = 0
        trial = study.ask(by_index)
        launch = {name: space.parameters[name][trial.params[name]] for name in names}
        key = label(launch)
        if key in known:
            repeats += 1
        else:
            known[key] = yield launch
            repeats = 0
            del left[key]
        value = known[key]
        # pruned, not failed: TPE forgets what failed, and would propose its neighbours
        state = optuna.trial.TrialState.PRUNED if value is None else None
        study.tell(trial, value, state=state)


def _put_in_the_way(study: Study, space: Space, launch: Mapping[str, int]) -> None:
    study.enqueue_trial(
        {name: values.index(launch[name]) for name, values in space.parameters.items()}
    )
