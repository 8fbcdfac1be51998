"""Print what ``hp-tune search`` found: one length or several, predicted or measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hp_tune.cost.memory import GIB
from hp_tune.printing import render
from hp_tune.printing.tables import milliseconds, new_console, new_table, print_json
from hp_tune.searching.buckets import Searches
from hp_tune.searching.ranking import Ranked
from hp_tune.searching.result import Result
from hp_tune.study.records import measured_to

__all__ = ["as_json", "as_text"]


def as_text(found: Searches, out: Path | None) -> None:
    """Print each search, then the buckets of the plan."""
    several = len(found.results) > 1
    for result in found.results:
        whole = replace(result, plan=found.plan)
        render.result_text(whole, None if several else out)
        _more(result)
    plan = found.plan
    if plan is None or not several:
        return
    table = new_table("lengths", "serves", "share", "config", "vs next")
    for entry in plan.entries:
        low, high = entry.when.seq
        margin = "" if entry.margin is None else f"{entry.margin:.1%}"
        table.add_row(
            ", ".join(map(str, entry.when.lengths)), f"{low} to {high}",
            f"{entry.when.weight:.1%}", entry.best.mode, margin,
        )  # fmt: skip
    console = new_console()
    console.print("buckets", table)
    console.print(
        f'plan     {out} digest {plan.digest[:12]}  (hp_tune.load("{out}"))', soft_wrap=True
    )


def as_json(found: Searches, out: Path | None, told_by: Mapping[str, str]) -> None:
    """Print one search as one object, and several as a list of them with the buckets.

    ``told_by`` is where each option was said that has not its default.
    """
    objects = [
        {
            **render.result_object(replace(result, plan=found.plan), out),
            "mode": result.mode,
            "objective": result.objective,
            "weight": result.weight,
            "ended": result.ended,
            "measured": [_measured(one) for one in result.ranking if one.measured is not None],
            "failed": [
                {"config": failed.config.model_dump(), **measured_to(failed.measured)}
                for failed in result.failed
            ],
            "outranked": [one.config.model_dump() for one in result.outranked],
            "front": [
                {
                    "config": one.config.model_dump(),
                    "ms": one.ms,
                    "memory_bytes": one.memory_bytes,
                }
                for one in result.front
            ],
        }
        for result in found.results
    ]
    if len(objects) == 1:
        print_json({**objects[0], "told_by": dict(told_by)})
        return
    plan = found.plan
    print_json(
        {
            "searches": objects,
            "buckets": [entry.when.model_dump() for entry in plan.entries] if plan else [],
            "plan": None if out is None else str(out),
            "digest": None if plan is None else plan.digest,
            "told_by": dict(told_by),
        }
    )


def _measured(ranked: Ranked) -> dict[str, Any]:
    assert ranked.measured is not None, "only what ran is printed"
    return {
        "config": ranked.config.model_dump(),
        "in_finals": ranked.in_finals,
        **measured_to(ranked.measured),
    }


def _more(result: Result) -> None:
    """Print what only some searches have: times, failures, the front."""
    console, cp = new_console(), result.workload.cp_size
    line = partial(console.print, soft_wrap=True)
    if any(ranked.measured for ranked in result.ranking):
        best = result.ranking[0].ms
        table = new_table(
            "rank", "config", "measured ms", "from ms", "to ms", "vs best", "predicted ms",
            "memory GiB", "job",
        )  # fmt: skip
        for rank, ranked in enumerate(result.ranking, start=1):
            assert ranked.measured is not None, "a measured ranking has times"
            low, high = ranked.measured.interval_ms
            table.add_row(
                str(rank), ranked.config.label(cp), milliseconds(ranked.ms), milliseconds(low),
                milliseconds(high), f"{ranked.ms / best:.3f}",
                milliseconds(ranked.prediction.seconds * 1e3),
                f"{ranked.memory_bytes / GIB:.2f}", "finals" if ranked.in_finals else "trial",
            )  # fmt: skip
        line("measured")
        console.print(table)
    for failed in result.failed:
        line(
            f"failed   {failed.config.label(cp)}: {failed.measured.outcome}: "
            f"{failed.measured.reason}"
        )
    if result.outranked:
        names = ", ".join(ranked.config.label(cp) for ranked in result.outranked)
        line(f"not run  predicted too slow: {names}")
    if result.front:
        line("front    of time and memory, from fast to small")
        for ranked in result.front:
            line(
                f"  {ranked.config.label(cp)}: {milliseconds(ranked.ms)} ms, "
                f"{ranked.memory_bytes / GIB:.1f} GiB"
            )
    if result.ended:
        line(f"ended    {result.ended}")
