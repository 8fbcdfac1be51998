"""Why a search chose what it chose: the data behind ``hp-tune explain`` and its page.

Everything is computed from a `hp_tune.Result`: what the winner's time is made of, by which terms
each rival loses, which assumed number would change the winner and where, and what a feature that
does not exist yet would win.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hp_mesh.checks import nearest
from hp_tune.cost.predict import Prediction
from hp_tune.cost.term import Phase, Term
from hp_tune.errors import UsageError
from hp_tune.explanation.flips import ExactFlip, find_exact_flips
from hp_tune.explanation.what_if import Opportunity, find_opportunities
from hp_tune.searching.engine import Result
from hp_tune.searching.ranking import Ranked

__all__ = ["Difference", "Explanation", "Rival", "explain", "find_rival", "layers_of", "link_rate"]


@dataclass(frozen=True, slots=True)
class Difference:
    """One addend of two configurations, in milliseconds that the step waits for."""

    phase: Phase
    name: str
    best_ms: float
    rival_ms: float

    @property
    def ms(self) -> float:
        """By how much the rival's is longer; negative where it is shorter."""
        return self.rival_ms - self.best_ms


@dataclass(frozen=True, slots=True)
class Rival:
    """A configuration that lost.

    Attributes:
        rank: Its place, 2 for the second.
        vs_best: Its time over the winner's.
        differences: The term that costs it most first; they add up to the whole difference.
    """

    ranked: Ranked
    rank: int
    label: str
    ms: float
    vs_best: float
    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What there is to say about a result; ``rivals`` are in order of rank."""

    result: Result
    label: str
    rivals: tuple[Rival, ...]
    flips: tuple[ExactFlip, ...]
    opportunities: tuple[Opportunity, ...]

    @property
    def best(self) -> Ranked:
        """The configuration that is explained."""
        return self.result.ranking[0]


def explain(
    result: Result, tell: Callable[[str, int, int], None] = lambda _name, _done, _total: None
) -> Explanation:
    """Return why the first of ``result.ranking``, which must not be empty, is the first.

    What is explained is the prediction: a measured ranking is put into the predicted order, with a
    note where another configuration ran fastest.

    Args:
        result: From `hp_tune.search`.
        tell: Receives what is looked at, how much is done, and of how much.
    """
    cp, result = result.workload.cp_size, _as_predicted(result)
    best = result.ranking[0]
    rivals = []
    for rank, ranked in enumerate(result.ranking[1:], start=2):
        seconds = ranked.prediction.seconds
        rivals.append(
            Rival(
                ranked=ranked,
                rank=rank,
                label=ranked.config.label(cp),
                ms=seconds * 1e3,
                vs_best=seconds / best.prediction.seconds,
                differences=_differences(best.prediction.terms, ranked.prediction.terms),
            )
        )
    flips = find_exact_flips(result.model, result.cluster, result.workload, result.ranking, tell)
    return Explanation(
        result=result,
        label=best.config.label(cp),
        rivals=tuple(rivals),
        flips=tuple(flips),
        opportunities=find_opportunities(result),
    )


def _as_predicted(result: Result) -> Result:
    cp = result.workload.cp_size
    predicted = tuple(sorted(result.ranking, key=lambda ranked: ranked.order))
    ran = [ranked for ranked in predicted if ranked.measured is not None]
    if not ran:
        return replace(result, ranking=predicted)
    fastest = min(ran, key=lambda ranked: ranked.ms)
    note = f"{fastest.config.label(cp)} ran fastest, in {fastest.ms:.4g} ms"
    if fastest is not predicted[0]:
        note += f"; {predicted[0].config.label(cp)} is predicted to, and is what is explained"
    return replace(result, ranking=predicted, notes=(*result.notes, note))


def find_rival(explanation: Explanation, label: str) -> Rival:
    """Return the rival of that label or rank.

    Raises:
        UsageError: It is the winner, it is rejected (the rule is in the message), or nothing is
            called so.
    """
    cp = explanation.result.workload.cp_size
    for rival in explanation.rivals:
        if label in (rival.label, str(rival.rank)):
            return rival
    if label in (explanation.label, "1"):
        raise UsageError(f"--rival ({label}) must be another configuration than the winner")
    for config, rejection in explanation.result.rejected:
        if config.label(cp) == label:
            raise UsageError(
                f"--rival ({label}) must be a valid configuration, and {rejection.rule} rejects "
                f"it: {rejection.message}",
                rejection.hint,
            )
    for duplicate in explanation.result.duplicates:
        if duplicate.config.label(cp) == label:
            same = duplicate.same_as.label(cp)
            raise UsageError(f"--rival ({label}) is {same!r}: {duplicate.reason}")
    known = [rival.label for rival in explanation.rivals]
    close = nearest(label, known)
    raise UsageError(
        f"--rival ({label}) must be a configuration of this search",
        f"did you mean {close!r}?" if close else f"there are: {', '.join(known) or 'none'}",
    )


def layers_of(prediction: Prediction) -> list[tuple[str, Term]]:
    """Return each term with the layers that it stands for, such as ``12 sliding``.

    Terms come kind of layer by kind of layer, forward before backward.
    """
    kinds = [line for line in prediction.timelines if line.phase == "forward"]
    found, at, before = [], 0, "forward"
    for term in prediction.terms:
        at += before == "backward" and term.phase == "forward"
        before = term.phase
        found.append((f"{kinds[at].count} {kinds[at].layer.kind}", term))
    return found


def link_rate(term: Term) -> float | None:
    """Return the GB/s (decimal) that a term moves its bytes with; None for one that moves none."""
    return term.bytes / term.seconds / 1e9 if term.bytes and term.seconds else None


def _differences(best: Sequence[Term], rival: Sequence[Term]) -> tuple[Difference, ...]:
    ours, theirs = _exposed(best), _exposed(rival)
    found = [
        Difference(phase, name, ours.get((phase, name), 0.0), theirs.get((phase, name), 0.0))
        for phase, name in dict.fromkeys((*ours, *theirs))
    ]
    kept = [difference for difference in found if abs(difference.ms) > 1e-9]
    return tuple(sorted(kept, key=lambda difference: (-difference.ms, difference.name)))


def _exposed(terms: Sequence[Term]) -> dict[tuple[Phase, str], float]:
    """Return the milliseconds of each addend; attention is one thing in one call or in two."""
    found: dict[tuple[Phase, str], float] = {}
    for term in terms:
        key = (term.phase, term.name.replace(" (2 calls)", ""))
        found[key] = found.get(key, 0.0) + term.exposed * 1e3
    return found
