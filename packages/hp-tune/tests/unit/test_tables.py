"""What is printed without rich is what rich would print."""

from __future__ import annotations

import pytest
from rich.console import Console

from hp_tune.printing.tables import PLAIN_WIDTH, Table, new_console, new_table


def filled(width: int) -> Table:
    """A table with numbers and texts, whose widest cell is ``width``."""
    table = new_table("rank", "config", "fwd ms", "memory GiB")
    table.add_row("1", "colossal u=1", "12.5", "3.1")
    table.add_row("10", "x" * width, "7", "")
    return table


@pytest.mark.parametrize("width", [12, 200])
def test_plain_tables_read_as_richs(capsys: pytest.CaptureFixture[str], width: int) -> None:
    """Where all fits; what is wider is folded by rich itself."""
    new_console().print("a title", filled(width))
    plain = capsys.readouterr().out
    Console(width=PLAIN_WIDTH, markup=False, highlight=False).print("a title", filled(width))

    assert plain == capsys.readouterr().out
    assert ("x" * 12 in plain) and "x" * 200 not in plain


@pytest.mark.parametrize("text", ["short", "long " * 40, "not ascii: \u2192", "two\nlines", ""])
def test_plain_text_reads_as_richs(capsys: pytest.CaptureFixture[str], text: str) -> None:
    """Wrapped at the same place, or not at all."""
    for soft_wrap in (None, True):
        new_console().print(text, soft_wrap=soft_wrap)
        plain = capsys.readouterr().out
        Console(width=PLAIN_WIDTH, markup=False, highlight=False).print(text, soft_wrap=soft_wrap)
        assert plain == capsys.readouterr().out
