"""Tables and paragraphs of the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["Cell", "badge", "cards", "escape", "figure", "number", "paragraph", "section", "table"]


class Cell(str):
    """HTML that is written as it is; plain text is escaped."""

    __slots__ = ()


def number(value: float, places: int | None = None) -> Cell:
    """Return a value set right: four digits, or so many ``places`` after the point."""
    words = f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return Cell(f"<!--n-->{words if places is None else f'{value:.{places}f}'}")


def badge(source: str) -> Cell:
    """Return where a number is from, as a coloured word."""
    return Cell(f'<span class="{escape(source)}">{escape(source)}</span>')


def table(
    headers: Sequence[str], rows: Iterable[Sequence[str | float]], best: int | None = None
) -> str:
    """Return a table that scrolls sideways where the window is narrow.

    Args:
        headers: Names of the columns.
        rows: Text is escaped, floats and `number` are set right.
        best: Index of a row that stands out.
    """
    body, right = [], set()
    for index, row in enumerate(rows):
        cells = []
        for column, value in enumerate(row):
            cell = number(value) if isinstance(value, int | float) else value
            numeric = cell.startswith("<!--n-->")
            right |= {column} if numeric else set()
            words = cell.removeprefix("<!--n-->") if isinstance(cell, Cell) else escape(cell)
            css = ' class="n"' if numeric else ""
            css = ' class="formula"' if headers[column] == "formula" else css
            cells.append(f"<td{css}>{words}</td>")
        kind = ' class="best"' if index == best else ""
        body.append(f"<tr{kind}>{''.join(cells)}</tr>")
    heads = [
        f"<th{' class=n' if i in right else ''}>{escape(h)}</th>" for i, h in enumerate(headers)
    ]
    return (
        f'<div class="scroll"><table><thead><tr>{"".join(heads)}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def section(anchor: str, title: str, *parts: str) -> str:
    """Return a part of the page that the contents lead to."""
    return f'<section><h2 id="{anchor}">{escape(title)}</h2>{"".join(parts)}</section>'


def figure(drawing: str, caption: str) -> str:
    """Return a drawing with what it shows below it."""
    return f"<figure>{drawing}<figcaption>{escape(caption)}</figcaption></figure>"


def paragraph(words: str, css: str = "") -> str:
    """Return a paragraph of plain text."""
    kind = f' class="{css}"' if css else ""
    return f"<p{kind}>{escape(words)}</p>"


def cards(pairs: Iterable[tuple[str, str]]) -> str:
    """Return small boxes of (value, what it is)."""
    boxes = (
        f'<div class="card"><b>{escape(value)}</b><span>{escape(what)}</span></div>'
        for value, what in pairs
    )
    return f'<div class="cards">{"".join(boxes)}</div>'
