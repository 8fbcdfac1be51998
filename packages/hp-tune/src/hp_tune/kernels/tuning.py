"""Tune one kernel for one shape: propose, refuse, judge, record; stop when nothing is left to win.

No torch, no triton, no click here: who judges is handed in.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hp_comm.kernels import catalog
from hp_comm.kernels.config import kernel_hash
from hp_tune.files import sha256
from hp_tune.kernels.devices import Family
from hp_tune.kernels.sampling import proposals
from hp_tune.kernels.shapes import Shape
from hp_tune.kernels.space import Space, label, planned, refusal, space_of, start
from hp_tune.kernels.trials import Record, opened
from hp_tune.kernels.verdict import STOP, Facts, Judge, Mode, Verdict
from hp_tune.steps import Step, no_step

__all__ = ["Settings", "Trial", "Tuned", "tune"]

TIE = 0.01
"""Times that differ by less are the same time."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What holds for a whole run.

    Attributes:
        mode: How launches are judged.
        facts: Where.
        budget: Launches that are tried per kernel and shape; refused ones are free.
        seed: Of the sampler.
        studies: Folder of study files.
    """

    mode: Mode
    facts: Facts
    budget: int
    seed: int
    studies: Path

    @property
    def space(self) -> Space:
        """What is searched."""
        return space_of(self.facts.family, self.facts.cores)


@dataclass(frozen=True, slots=True)
class Trial:
    """A launch and what was said of it; ``replayed`` if it was said in an earlier run."""

    launch: dict[str, int]
    verdict: Verdict
    replayed: bool = False


@dataclass(slots=True)
class Tuned:
    """A kernel at one shape; filled while it is tuned, so an interrupt finds the best so far.

    Attributes:
        kernel: Name of the kernel.
        shape: Its layout.
        trials: In the order in which they were proposed.
        ended: Why no more were tried; empty while it goes on.
        study: Its Journal file.
    """

    kernel: str
    shape: Shape
    trials: list[Trial] = field(default_factory=list)
    ended: str = ""
    study: Path | None = None

    @property
    def ranking(self) -> list[Trial]:
        """Launches that work, the fastest first."""
        done = [one for one in self.trials if one.verdict.state == "complete"]
        return sorted(done, key=lambda one: (one.verdict.ms or 0.0, *one.launch.values()))

    @property
    def best(self) -> Trial | None:
        """The launch to use: of those that are as fast as the fastest, the one tried first.

        The first of all is what runs untuned: it is left only for what is faster.
        """
        ranking = self.ranking
        if not ranking:
            return None
        limit = (ranking[0].verdict.ms or 0.0) * (1 + TIE)
        equal = [one for one in ranking if (one.verdict.ms or 0.0) <= limit]
        if self.trials[0] in equal:
            return self.trials[0]
        return ranking[0]

    @property
    def untuned(self) -> Trial | None:
        """The first trial, if it worked: what runs without a file."""
        first = self.trials[0] if self.trials else None
        return first if first is not None and first.verdict.state == "complete" else None

    def count(self, state: str) -> int:
        """Return how many trials are in a state."""
        return sum(one.verdict.state == state for one in self.trials)


def tune(
    tuned: Tuned,
    settings: Settings,
    judge: Judge,
    tell: Callable[[str], None] = lambda _: None,
    step: Step = no_step,
) -> None:
    """Fill ``tuned``.

    Args:
        tuned: Kernel and shape.
        settings: How.
        judge: Open already.
        tell: Receives one sentence when there is something to say.
        step: Receives the launch that is tried, how many were, and how many there may be.
    """
    if settings.mode == "check":  # what was right once is looked at again
        _fill(tuned, settings, judge, None, step)
        return
    inputs = _inputs(tuned, settings)
    tuned.study = settings.studies / _name(tuned, settings, inputs)
    with opened(tuned.study, tuned.study.stem, inputs, settings.space, tell) as record:
        if len(record):
            tell(f"{tuned.study} has {len(record)} trials: they are not tried again")
        _fill(tuned, settings, judge, record, step)


def _fill(
    tuned: Tuned, settings: Settings, judge: Judge, record: Record | None, step: Step
) -> None:
    space, family = settings.space, settings.facts.family
    source = proposals(space, settings.seed, start(space, family))
    launch = next(source)
    tried = 0
    first_of: dict[str, Trial] = {}  # of those that the planner makes the same of
    most = min(settings.budget, len(space))
    while True:
        step(f"{tuned.kernel} {label(launch)}", tried, most)
        twin = first_of.get(planned(tuned.kernel, tuned.shape, launch))
        verdict = None if record is None else record.find(launch)
        replayed = verdict is not None
        if verdict is None:
            if twin is not None and twin.verdict.state != "pruned":
                verdict = _same(twin)
            else:
                verdict = _verdict(tuned, family, launch, judge)
            if record is not None:
                record.add(launch, verdict)
        tuned.trials.append(Trial(launch, verdict, replayed))
        first_of.setdefault(planned(tuned.kernel, tuned.shape, launch), tuned.trials[-1])
        tried += verdict.state != "pruned"
        if verdict.share >= STOP:
            tuned.ended = (
                f"{label(launch)} reaches {verdict.share:.0%} of the copy bandwidth, "
                f"at least {STOP:.0%}: nothing is left to win"
            )
            return
        if tried >= settings.budget:
            tuned.ended = f"budget of {settings.budget} launches used"
            return
        try:
            launch = source.send(twin.verdict.ms if twin else verdict.ms)
        except StopIteration:
            tuned.ended = f"all {len(space)} launches tried or refused"
            return


def _same(twin: Trial) -> Verdict:
    return Verdict("pruned", rule="same", reason=f"it comes to what {label(twin.launch)} comes to")


def _verdict(tuned: Tuned, family: Family, launch: dict[str, int], judge: Judge) -> Verdict:
    """Refuse a launch that cannot fit before it is compiled, or have it judged."""
    refused = refusal(tuned.kernel, tuned.shape, launch, family)
    if refused is not None:
        return Verdict(
            "pruned", rule=refused.rule, reason=refused.message, numbers=dict(refused.numbers)
        )
    return judge.judge(tuned.kernel, tuned.shape, launch)


def _inputs(tuned: Tuned, settings: Settings) -> dict[str, Any]:
    """Return all that the numbers of a study follow from."""
    facts, space = settings.facts, settings.space
    plan = catalog.launches(tuned.kernel, tuned.shape.case(tuned.kernel), next(iter(space)))
    return {
        "kernel": tuned.kernel,
        "shape": str(tuned.shape),
        "device": facts.name,
        "description": facts.description,
        "mode": settings.mode,
        "kernel_hash": kernel_hash(),
        "plan": sha256([[one.grid, one.table, dict(one.numbers)] for one in plan])[:16],
        "versions": dict(facts.versions),
        "space": {name: list(values) for name, values in space.parameters.items()},
        "seed": settings.seed,
    }


def _name(tuned: Tuned, settings: Settings, inputs: dict[str, Any]) -> str:
    shape = re.sub(r"[^A-Za-z0-9-]+", "_", str(tuned.shape))
    words = (tuned.kernel, settings.facts.name, shape, settings.mode, sha256(inputs)[:8])
    return f"{'.'.join(words)}.journal"
