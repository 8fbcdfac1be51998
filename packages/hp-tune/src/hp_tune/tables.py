"""What every command prints with: a console, plain tables, milliseconds, JSON."""

from __future__ import annotations

import json
import os
import sys

from rich.console import Console
from rich.table import Table

__all__ = ["PLAIN_WIDTH", "milliseconds", "new_console", "new_table", "print_json"]

PLAIN_WIDTH = 120
"""Columns where the output is no terminal, so that a log and a test read the same everywhere."""


def new_console() -> Console:
    """Return a console on stdout that colours and interprets nothing."""
    width = None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", PLAIN_WIDTH))
    return Console(width=width, markup=False, highlight=False, soft_wrap=False, emoji=False)


def new_table(*headers: str) -> Table:
    """Return a table without lines; columns of numbers are set right."""
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for header in headers:
        numeric = header in _NUMERIC or header[-3:] in (" ms", "GiB")
        found.add_column(header, justify="right" if numeric else "left", overflow="fold")
    return found


_NUMERIC = ("rank", "value", "trial", "ms", "MiB", "GB/s", "of peak")


def milliseconds(value: float) -> str:
    """Return four digits, and never a power of ten."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def print_json(value: object) -> None:
    """Print one JSON object."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")
