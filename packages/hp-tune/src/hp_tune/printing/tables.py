"""What every command prints with: a console, plain tables, milliseconds, JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import rich.table

__all__ = [
    "PLAIN_WIDTH",
    "Printer",
    "Table",
    "milliseconds",
    "new_console",
    "new_table",
    "print_json",
]

PLAIN_WIDTH = 120
"""Columns where the output is no terminal, so that a log and a test read the same everywhere."""
GAP = "  "


class Printer(Protocol):
    """What `new_console` returns: a console of rich, or what stands for it."""

    def print(self, *objects: str | Table, soft_wrap: bool | None = None) -> None:
        """Print lines and tables one below the other; ``soft_wrap`` leaves long lines whole."""
        ...


class Table:
    """A table without lines; rich prints it, and what is no terminal gets it without rich."""

    def __init__(self, headers: Sequence[str], numeric: Sequence[bool]) -> None:
        self._numeric = list(numeric)
        self._rows: list[tuple[str, ...]] = [tuple(headers)]

    def add_row(self, *cells: str) -> None:
        """Add a row, as many cells as there are columns."""
        self._rows.append(cells)

    def lines(self) -> list[str]:
        """Return the rows as text, every column as wide as its widest cell."""
        widths = [max(map(len, column)) for column in zip(*self._rows, strict=True)]
        return [
            GAP.join(
                cell.rjust(width) if numeric else cell.ljust(width)
                for cell, width, numeric in zip(row, widths, self._numeric, strict=True)
            )
            for row in self._rows
        ]

    def __rich__(self) -> rich.table.Table:
        """Return it as rich's."""
        from rich.table import Table as RichTable

        found = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for header, numeric in zip(self._rows[0], self._numeric, strict=True):
            found.add_column(header, justify="right" if numeric else "left", overflow="fold")
        for row in self._rows[1:]:
            found.add_row(*row)
        return found


class _Plain:
    """Prints what fits as it is, without importing rich, and leaves the rest to rich."""

    def __init__(self, width: int) -> None:
        self._width = width

    def print(self, *objects: str | Table, soft_wrap: bool | None = None) -> None:
        lines: list[str] = []
        for one in objects:
            lines += one.lines() if isinstance(one, Table) else one.split("\n")
        plain = all(line.isascii() and line.isprintable() for line in lines)
        fits = soft_wrap or all(len(line) <= self._width for line in lines)
        if plain and fits and (len(objects) == 1 or not _two_texts(objects)):
            sys.stdout.write("".join(f"{line}\n" for line in lines))
        else:
            _rich_console(self._width).print(*objects, soft_wrap=soft_wrap)


def _two_texts(objects: Sequence[str | Table]) -> bool:
    """Return whether two texts follow each other, which rich puts into one line."""
    texts = [isinstance(one, str) for one in objects]
    return any(a and b for a, b in pairwise(texts))


def _rich_console(width: int | None) -> Printer:
    from rich.console import Console

    class Quiet(Console):
        """Of a reader that has gone the caller is told; rich would end the program itself."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    console: Printer = Quiet(
        width=width, markup=False, highlight=False, soft_wrap=False, emoji=False
    )
    return console


def new_console() -> Printer:
    """Return a console on stdout that colours and interprets nothing."""
    if sys.stdout.isatty():
        return _rich_console(None)
    columns = os.environ.get("COLUMNS", "")
    return _Plain(int(columns) if columns.isdecimal() and int(columns) else PLAIN_WIDTH)


def new_table(*headers: str) -> Table:
    """Return a table without lines; columns of numbers are set right."""
    return Table(headers, [_is_numeric(header) for header in headers])


def _is_numeric(header: str) -> bool:
    return header in _NUMERIC or header[-3:] in (" ms", "GiB")


_NUMERIC = ("rank", "value", "trial", "ms", "MiB", "GB/s", "of peak")


def milliseconds(value: float) -> str:
    """Return four digits, and never a power of ten."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def print_json(value: object) -> None:
    """Print one JSON object."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")
