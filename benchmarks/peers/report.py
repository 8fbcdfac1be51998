"""Tables for people, and what a record says besides its row."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from peers.cases import Case
from peers.verdict import Verdict

__all__ = ["LIBRARIES", "progress", "show_case", "show_verdicts"]

Row = dict[str, Any]
MIB = 2**20
PLAIN_WIDTH = 190
"""Columns of a file or a pipe: what is cut off there is lost."""
LIBRARIES = (
    "torch",
    "deepspeed",
    "yunchang",
    "axolotl-ringmaster",
    "verl",
    "ring-flash-attn",
    "colossalai",
    "transformers",
)
COLUMNS = (
    "contender",
    "ms [25%, 75%]",
    "/ oracle [95% CI]",
    "/ floor [95% CI]",
    "CPU / oracle",
    "max/mean",
    "collectives",
    "MiB sent",
    "/ formula",
    "MiB saved",
)


def progress(text: str) -> None:
    """Say on a terminal what is being checked; the table that follows takes its place."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def show_case(case: Case, rows: Sequence[Row], rounds: int) -> None:
    """Print one case: those that were timed by time, then those that were not, with the reason."""
    progress("")
    console = _console()
    title = f"{case}: fp32, forward + backward, {rounds} interleaved rounds, HP_PREFLIGHT=first"
    table = Table(title=title, caption=_caption(rows), caption_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == COLUMNS[0] else "right", no_wrap=True)
    right = [row for row in rows if row["status"] == "ok"]
    for row in sorted(right, key=lambda row: row["ms"]["p50"] if "ms" in row else 0.0):
        table.add_row(row["impl"], *_times(row), *_counts(row), style="bold" if row["ours"] else "")
    console.print(table)
    for row in rows:
        if row["status"] != "ok":
            console.print(f"  {row['impl']}: {row['status']}: {row['reason']}", markup=False)
        elif "untimed" in row:
            console.print(f"  {row['impl']}: not timed: {row['untimed']}", markup=False)


def _caption(rows: Sequence[Row]) -> str:
    timed = next((row for row in rows if "ms" in row), None)
    if timed is None:
        return "checked and counted, not timed"
    oracle, wire = timed["oracle_ms"]["p50"], timed["wire_ms"]["p50"]
    bare = timed["bare_to_floor"]
    return (
        f"oracle {oracle:.1f} ms: heads already split, nothing sent. floor: the oracle plus "
        f"{wire:.2f} ms, two bare all-to-alls each way of the bytes of Ulysses, in the same round."
        f"\nthose exchanges around the oracle, and nothing else: {bare['median']:.3f} "
        f"[{bare['low']:.3f}, {bare['high']:.3f}] times the floor."
    )


def _times(row: Row) -> tuple[str, ...]:
    if "ms" not in row:
        return ("",) * 5
    ms = row["ms"]
    return (
        f"{ms['p50']:.1f} [{ms['p25']:.1f}, {ms['p75']:.1f}]",
        *(
            f"{row[key]['median']:.3f} [{row[key]['low']:.3f}, {row[key]['high']:.3f}]"
            for key in ("to_oracle", "to_floor")
        ),
        f"{row['cpu_to_oracle']['median']:.3f}",
        f"{row['cpu_max_over_mean']:.2f}",
    )


def _counts(row: Row) -> tuple[str, ...]:
    extra = row["preflight_forward"] + row["preflight_backward"]
    formula = ""
    if row["ours"]:
        formula = f"{row['bytes_ratio_forward']:.2f} / {row['bytes_ratio_backward']:.2f}"
    return (
        f"{row['collectives_forward']} + {row['collectives_backward']}"
        + (f" (+{extra})" if extra else ""),
        f"{row['bytes_forward'] / MIB:.2f} / {row['bytes_backward'] / MIB:.2f}",
        formula,
        f"{row['saved_bytes'] / MIB:.2f}",
    )


def show_verdicts(found: Sequence[Verdict]) -> None:
    """Print each target with pass, MISS or nothing to say, and the figure."""
    words = {True: "pass", False: "MISS", None: "-"}
    table = Table(title="targets")
    table.add_column("target")
    table.add_column("")
    table.add_column("figure (worst row)", overflow="fold")
    for verdict in found:
        table.add_row(verdict.target, words[verdict.passed], verdict.figure)
    _console().print(table)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
