"""Run a benchmark: correct first, then timed, then recorded.

    python benchmarks/run.py cp_modes [--rounds 5] [--record FILE.jsonl]
    python benchmarks/run.py dsa [--device cuda]

A case is a module of ``benchmarks/cases`` with ``run(rounds) -> list[Record]``, or with
``run(rounds, device)`` if it can run on something else than the CPU. Records are printed
as a table; ``--record`` appends them as JSON lines with versions and commit.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from provenance import provenance
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent
CASES = sorted(path.stem for path in (ROOT / "cases").glob("*.py"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one case; exit code 1 if a row of it did not pass its check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds, interleaved")
    parser.add_argument("--device", default="cpu", help="for cases that can run on another one")
    parser.add_argument("--record", type=Path, help="append the rows to this file as JSON lines")
    options = parser.parse_args(argv)
    sys.path.insert(0, str(ROOT / "cases"))
    run = importlib.import_module(options.case).run
    takes_device = "device" in inspect.signature(run).parameters
    if options.device != "cpu" and not takes_device:
        parser.error(f"case {options.case} runs on cpu alone, not on {options.device!r}")
    rows: list[dict[str, Any]] = (
        run(options.rounds, options.device) if takes_device else run(options.rounds)
    )
    show(options.case, rows)
    if options.record is not None:
        with options.record.open("a") as file:
            for row in rows:
                file.write(
                    json.dumps({"bench": options.case, **row, **provenance(options.device)}) + "\n"
                )
    failed = [row["case"] for row in rows if not row["checked"]]
    if failed:
        print(f"did not pass: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows as a table, one column for each key; a table for each set of keys."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    for keys, of_table in itertools.groupby(rows, key=tuple):
        table = Table(title=title)
        for key in keys:
            table.add_column(key, justify="left" if key == "case" else "right")
        for row in of_table:
            table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
        console.print(table)


if __name__ == "__main__":
    sys.exit(main())
