"""The few shapes that the charts are drawn with, as SVG text.

Colours are CSS variables of the page and ``currentColor``, so that a chart follows the page from
light to dark and its text can be selected and searched.
"""

from __future__ import annotations

import math
from html import escape

__all__ = [
    "PALETTE",
    "color",
    "dot",
    "drawing",
    "legend",
    "line",
    "polyline",
    "rect",
    "text",
    "ticks",
]

PALETTE = 8
"""How many ``--c0`` ... colours the style sheet has."""
CHARACTER = 7.0
"""Width of an average character at the charts' font size."""


def color(index: int) -> str:
    """Return the fill of the series of that number."""
    return f"var(--c{index % PALETTE})"


def drawing(width: float, height: float, body: str, label: str) -> str:
    """Return an ``<svg>`` that scales with the page; ``label`` is read to who does not see it."""
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}" '
        f'style="max-width:{width:g}px">{body}</svg>'
    )


def rect(
    x: float, y: float, width: float, height: float, fill: str, title: str = "", extra: str = ""
) -> str:
    """Return a rectangle; ``title`` is what hovering over it says."""
    inner = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.5):.2f}" height="{height:.2f}" '
        f'fill="{fill}"{extra}>{inner}</rect>'
    )


def dot(x: float, y: float, radius: float, fill: str, title: str) -> str:
    """Return a filled circle; ``title`` is what hovering over it says."""
    return (
        f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{radius:g}" fill="{fill}">'
        f"<title>{escape(title)}</title></circle>"
    )


def line(x0: float, y0: float, x1: float, y1: float, css: str = "axis") -> str:
    """Return a straight line of a class of the style sheet."""
    return f'<line x1="{x0:.2f}" y1="{y0:.2f}" x2="{x1:.2f}" y2="{y1:.2f}" class="{css}"/>'


def polyline(points: list[tuple[float, float]], stroke: str, dash: str = "") -> str:
    """Return a line through points."""
    at = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{at}" fill="none" stroke="{stroke}" stroke-width="2"{dashes}/>'


def text(x: float, y: float, words: str, anchor: str = "start", css: str = "") -> str:
    """Return words; ``anchor`` is ``start``, ``middle`` or ``end``."""
    kind = f' class="{css}"' if css else ""
    return f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}"{kind}>{escape(words)}</text>'


def legend(x: float, y: float, names: list[tuple[str, str]], width: float) -> tuple[str, float]:
    """Return swatches with names, in as many rows as ``width`` needs, and their height."""
    found, at, row = [], x, 0
    for fill, name in names:
        room = 34 + CHARACTER * len(name)
        if at > x and at + room > x + width:
            at, row = x, row + 1
        found.append(rect(at, y + 18 * row, 11, 11, fill, extra=' rx="2"'))
        found.append(text(at + 16, y + 18 * row + 10, name))
        at += room
    return "".join(found), 18.0 * (row + 1)


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Return at most ``count`` round numbers between ``low`` and ``high``."""
    step = 10.0 ** math.floor(math.log10((high - low) / count))
    step *= next(part for part in (1, 2, 2.5, 5, 10, 20) if (high - low) / (step * part) < count)
    first = math.ceil(low / step - 1e-9)
    return [step * i for i in range(first, math.floor(high / step + 1e-9) + 1)]
