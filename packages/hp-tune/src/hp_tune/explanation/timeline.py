"""A layer's two streams as text: what runs when, and under what a collective hides.

The columns are not to scale, or attention would leave nothing to see: a stretch between two events
is as wide as the square root of its length, and at least one column.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from string import ascii_letters

from hp_tune.cost.predict import Timeline
from hp_tune.cost.schedule import Slot

__all__ = ["timeline_lines"]

WIDTH = 72
IDLE = "."


def timeline_lines(timeline: Timeline, width: int = WIDTH) -> list[str]:
    """Return one phase of one kind of layer: a strip per stream, and what its letters are.

    ::

        forward of a layer, 28 x full: 28 heads, ...: 41.5 ms (columns are not to scale)
          compute  aabcd.....efffffffffffg
          network  ..hhiijjjj.............
            a  q projection     0.000 ..  1.019 ms
    """
    slots = timeline.slots
    letters = _letters(slots)
    columns = _columns(slots, width)
    end = max((slot.end for slot in slots), default=0.0)
    found = [
        f"{timeline.phase} of a layer, {timeline.count} x {timeline.layer.describe()}: "
        f"{end * 1e3:.4g} ms (columns are not to scale)"
    ]
    for resource in ("compute", "network"):
        own = [slot for slot in slots if slot.resource == resource]
        found.append(f"  {resource}  {''.join(_cells(own, letters, columns))}".rstrip())
    longest = max((len(slot.key) for slot in slots), default=0)
    for slot in sorted(slots, key=lambda slot: (slot.start, slot.resource)):
        hidden = slot.end - slot.start - slot.exposed
        tail = f"  {slot.exposed * 1e3:.4g} ms of it exposed" if _is_hidden(slot, hidden) else ""
        found.append(
            f"    {letters[slot.key]}  {slot.key:<{longest}}  "
            f"{slot.start * 1e3:9.3f} .. {slot.end * 1e3:9.3f} ms{tail}"
        )
    return found


def _is_hidden(slot: Slot, hidden: float) -> bool:
    return slot.resource == "network" and hidden > 1e-3 * (slot.end - slot.start)


def _letters(slots: Sequence[Slot]) -> dict[str, str]:
    """Return one letter per slot; more than 52 of them (head groups) begin anew."""
    return {slot.key: ascii_letters[i % len(ascii_letters)] for i, slot in enumerate(slots)}


def _columns(slots: Sequence[Slot], width: int) -> list[tuple[float, float]]:
    """Return the (start, end) of each column."""
    times = sorted({time for slot in slots for time in (slot.start, slot.end)})
    spans = [(a, b) for a, b in pairwise(times) if b - a > 1e-12]
    roots = [math.sqrt(b - a) for a, b in spans]
    total = sum(roots)
    return [
        span
        for span, root in zip(spans, roots, strict=True)
        for _ in range(max(1, round(width * root / total)))
    ]


def _cells(
    slots: Sequence[Slot], letters: dict[str, str], columns: Sequence[tuple[float, float]]
) -> Iterator[str]:
    for start, end in columns:
        middle = (start + end) / 2
        yield next((letters[s.key] for s in slots if s.start <= middle < s.end), IDLE)
