"""Questions to a plan or a study: why not this one, what is on the front, what is in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hp_mesh.checks import nearest
from hp_tune.cost.memory import GIB
from hp_tune.errors import UsageError
from hp_tune.printing.tables import milliseconds

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from hp_tune.plans.plan import PlanFile

__all__ = [
    "Row",
    "front_rows",
    "reason_of",
    "rows_of_plan",
    "rows_of_study",
    "trial_attributes",
    "why_miss",
]


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration at one length.

    Attributes:
        ms: Its time, measured where ``source`` says so; None if it has none.
        reason: Why it has no time: the rule or the class of the failure, and its message.
        hint: The way out.
        is_ranked: Whether all that are faster are known too.
        terms: Milliseconds that a step waits for, by phase and name; empty where not recorded.
    """

    label: str
    where: str = ""
    ms: float | None = None
    memory_GiB: float | None = None
    source: str = ""
    reason: str = ""
    hint: str = ""
    is_ranked: bool = True
    numbers: Mapping[str, Any] = field(default_factory=dict)
    terms: Mapping[str, float] = field(default_factory=dict)


def rows_of_plan(plan: PlanFile) -> list[Row]:
    """Return what a plan holds of each of its entries, the best first.

    After the best and its alternatives come those on a front that was asked for, by time.
    """
    found = []
    for entry in plan.entries:
        low, high = entry.when.seq
        where = f"sequence {low} to {high}" if len(plan.entries) > 1 else ""
        first = (entry.best, *entry.alternatives)
        modes = {priced.mode for priced in first}
        for priced in (*first, *(one for one in entry.front if one.mode not in modes)):
            ran = priced.measured
            ms = priced.forward_ms + priced.backward_ms if ran is None else ran.median_ms
            found.append(Row(priced.mode, where, ms, priced.memory_GiB, source=priced.source,
                             is_ranked=priced in first))  # fmt: skip
        for failed in entry.failed:
            label = failed.config.label(entry.when.cp_size)
            found.append(Row(label, where, reason=f"{failed.outcome}: {failed.reason}"))
        for rejected in entry.rejected:
            label = rejected.config.label(entry.when.cp_size)
            reason = f"{rejected.rule}: {rejected.message}"
            found.append(Row(label, where, reason=reason, hint=rejected.hint,
                             numbers=rejected.numbers))  # fmt: skip
    return found


def rows_of_study(trials: Sequence[FrozenTrial]) -> list[Row]:
    """Return the trials of a study, the best first."""
    found = []
    for trial in trials:
        has = trial.user_attrs
        reason = reason_of(trial)
        if not trial.values and not reason:
            reason = f"{trial.state.name.lower()}: it has no time yet"
        terms: dict[str, float] = {}
        for term in has.get("terms", []):  # several kinds of layers; attention in one call or two
            name = f"{term['phase']} {term['name']}".replace(" (2 calls)", "")
            terms[name] = terms.get(name, 0.0) + float(term["exposed_ms"])
        memory = has.get("memory_bytes")
        found.append(
            Row(
                label=str(has.get("label", f"trial {trial.number}")),
                ms=trial.values[0] if trial.values else None,
                memory_GiB=None if memory is None else memory / GIB,
                source=str(has.get("source", "")),
                reason=reason,
                hint=str(has.get("hint", "")),
                numbers=has.get("numbers", {}),
                terms=terms,
            )
        )
    return sorted(found, key=lambda row: (row.ms is None, row.ms or 0.0, row.label))


def reason_of(trial: FrozenTrial) -> str:
    """Return the rule or the class of failure of a trial with its message; empty without one."""
    has = trial.user_attrs
    kind = has.get("rule") or has.get("outcome")
    return f"{kind}: {has.get('message', '')}" if kind else ""


def why_miss(rows: Sequence[Row], label: str) -> list[str]:
    """Return why the configuration of that label is not the choice, a line per reason.

    Raises:
        UsageError: Nothing is called so.
    """
    asked = [row for row in rows if row.label == label]
    if not asked:
        known = dict.fromkeys(row.label for row in rows)
        close = nearest(label, known)
        raise UsageError(
            f"--why-miss ({label}) must be a configuration that was looked at",
            f"did you mean {close!r}? a plan holds the best few, a study has all" if close
            else f"there are: {', '.join(known)}; a plan holds the best few, a study has all",
        )  # fmt: skip
    found = []
    for row in asked:
        before = f"{row.where}: " if row.where else ""
        if row.ms is None:
            found.append(f"{before}{row.label}: {row.reason}")
            found += [f"  {row.hint}"] if row.hint else []
            told = ", ".join(f"{key} {value}" for key, value in row.numbers.items())
            found += [f"  {told}"] if told else []
            continue
        peers = [other for other in rows if other.where == row.where and other.ms is not None]
        best, rank = peers[0], peers.index(row) + 1
        peers = [other for other in peers if other.is_ranked]
        assert best.ms is not None, "peers have times"
        if rank == 1:
            found.append(f"{before}{row.label} is the choice, {milliseconds(row.ms)} ms")
            continue
        found.append(
            f"{before}{row.label}{f' is {rank} of {len(peers)}' if row.is_ranked else ''}: "
            f"{milliseconds(row.ms)} ms, x{row.ms / best.ms:.3f} of {best.label}"
        )
        found += _losses(row, best)
    return found


def _losses(row: Row, best: Row) -> list[str]:
    """Return the terms of a study in which a row is slower, the largest first."""
    names = dict.fromkeys((*row.terms, *best.terms))
    more = {name: row.terms.get(name, 0.0) - best.terms.get(name, 0.0) for name in names}
    worst = sorted((ms, name) for name, ms in more.items() if ms > 0)[::-1][:5]
    return [f"  {name} +{milliseconds(ms)} ms" for ms, name in worst]


def front_rows(rows: Sequence[Row]) -> list[Row]:
    """Return, for each bucket of lengths, what no other beats in both time and memory."""
    found: list[Row] = []
    for where in dict.fromkeys(row.where for row in rows):
        least = float("inf")
        own = [
            r for r in rows if r.where == where and r.ms is not None and r.memory_GiB is not None
        ]
        for row in sorted(own, key=lambda r: (r.ms or 0.0, r.memory_GiB or 0.0)):
            if row.memory_GiB is not None and row.memory_GiB < least:
                found.append(row)
                least = row.memory_GiB
    return found


def trial_attributes(trials: Sequence[FrozenTrial], number: int) -> dict[str, Any]:
    """Return all that a study holds of one trial."""
    for trial in trials:
        if trial.number == number:
            return {
                "number": trial.number,
                "state": trial.state.name,
                "values": trial.values,
                "params": trial.params,
                **trial.user_attrs,
            }
    raise UsageError(
        f"--trial ({number}) must be the number of a trial",
        f"there are 0 to {max((t.number for t in trials), default=0)}",
    )
