"""Make the table and the verdicts of what the ranks found."""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from schedule import simulate, step

sys.path.append(str(Path(__file__).resolve().parents[1]))

from provenance import provenance

TARGET = 0.25
WORTH = 0.1  # below this part of all transfers there is nothing to hide, and a share means nothing


def report(found: list[dict[str, Any]], *, timeline: bool, record: Path | None) -> int:
    """Print tables and verdicts; return the exit code."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    rows = [derive(one) for one in found]
    for family in dict.fromkeys(row["family"] for row in rows):
        console.print(table(family, [row for row in rows if row["family"] == family]))
    if timeline:
        for one in found:
            console.print(times(one))
    if record is not None:
        with record.open("a") as file:
            for row, one in zip(rows, found, strict=True):
                line = {"bench": "overlap", **row, **one, **provenance()}
                file.write(json.dumps(line) + "\n")
    failed = False
    for row in rows:
        case = f"{row['family']} {row['name']} at {row['rate']:g} mbit"
        if not row["checked"]:
            failed = True
            print(f"FAIL {case}: bytes are not those of Plan.describe")
        elif row["share"] is not None:
            good = row["share"] <= TARGET
            failed |= not good
            print(
                f"{'pass' if good else 'MISS'} {case}: {row['share']:.0%} of what can be hidden "
                f"is exposed, at most {TARGET:.0%}"
            )
    return 1 if failed else 0


def derive(one: dict[str, Any]) -> dict[str, Any]:
    """Return one row: medians, the bound, and what is exposed of what can be hidden."""
    best = simulate(step(one["family"], one["kind"], one["groups"], one["pieces"]))
    wall, alone = statistics.median(one["walls"]), statistics.median(one["alone"])
    exposed = statistics.median(w - a for w, a in zip(one["walls"], one["alone"], strict=True))
    cpu = {name: one["wire_cpu"].get(name, 0.0) for name in one["pieces"]}
    busy = simulate(step(one["family"], one["kind"], one["groups"], cpu)).transfers
    measures = one["kind"] != "sync" and best.hideable > WORTH * best.transfers
    return {
        "family": one["family"],
        "rate": one["rate"],
        "name": one["name"],
        "wall": wall,
        "compute only": alone,
        "transfers": best.transfers,
        "wire cpu": busy / (os.cpu_count() or 1),
        "bound": best.exposed,
        "exposed": exposed,
        "share": (exposed - best.exposed) / best.hideable if measures else None,
        "checked": one["checked"],
    }


def table(family: str, rows: list[dict[str, Any]]) -> Table:
    """Return the table of one family."""
    made = Table(title=f"{family}: exposed communication, ms")
    numbers = ("wall", "compute only", "transfers", "wire cpu", "bound", "exposed")
    for head in ("mbit", "mode", *numbers, "share"):
        made.add_column(head, justify="left" if head == "mode" else "right")
    for row in rows:
        cells = [f"{row[key]:.0f}" for key in numbers]
        share = "" if row["share"] is None else f"{row['share']:.0%}"
        made.add_row(f"{row['rate']:g}", row["name"], *cells, share)
    return made


def times(one: dict[str, Any]) -> Table:
    """Return when each exchange of one step was launched, done and waited for."""
    made = Table(title=f"{one['family']} {one['name']} at {one['rate']:g} mbit, rank 0, ms")
    for head in ("exchange", "MB", "launch", "done", "wait", "waited"):
        made.add_column(head, justify="left" if head == "exchange" else "right")
    for row in one["timeline"]:
        moments = [f"{row[key]:.0f}" for key in ("launch", "done", "wait")]
        waited = f"{row['end'] - row['wait']:.0f}"
        made.add_row(row["kind"], f"{row['bytes'] / 1e6:.2f}", *moments, waited)
    return made
