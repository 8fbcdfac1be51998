"""The charts of the report: stacked bars, lines over lengths, a scatter with its front, lanes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from hp_tune.cost.predict import Timeline
from hp_tune.cost.schedule import Slot
from hp_tune.report.svg import (
    CHARACTER,
    PALETTE,
    color,
    dot,
    drawing,
    legend,
    line,
    polyline,
    rect,
    text,
    ticks,
)

__all__ = ["front", "lanes", "length_lines", "pareto", "stacked_bars"]

WIDTH = 900.0
BAR, GAP = 18.0, 8.0
TOP = 34.0
"""Room for names above the highest point of a scatter."""
KINDS = {
    name: color(index)
    for index, name in enumerate(("attention", "communication", "projections", "copies"))
}
"""What the pieces of a layer are drawn in, here and in the ranking."""
MOST_LINES = PALETTE
"""Lines in one chart that have a colour of their own."""
MOST_NAMES = 12
"""With more points in a scatter only those on the front are named beside it."""


def stacked_bars(
    rows: Sequence[tuple[str, Mapping[str, float]]],
    unit: str,
    label: str,
    limit: tuple[str, float] | None = None,
) -> str:
    """Draw one horizontal bar per row, stacked from its parts, with the sum behind it.

    Args:
        rows: ``(name, {part: value})``; the same part has the same colour in every row.
        unit: Of the values.
        label: What is shown.
        limit: A named value that is marked by a line across all bars.
    """
    parts = list(dict.fromkeys(part for _, values in rows for part in values))
    fills = {part: color(index) for index, part in enumerate(parts)}
    left = 14 + CHARACTER * max(len(name) for name, _ in rows)
    top = max([sum(values.values()) for _, values in rows] + ([limit[1]] if limit else []))
    top = top or 1.0
    scale = (WIDTH - left - 90) / top
    key, y = legend(left, 2, [(fills[part], part) for part in parts], WIDTH - left)
    y += 14
    start, bars = y, []
    for name, values in rows:
        x = left
        bars.append(text(left - 8, y + 13, name, "end"))
        for part in parts:  # in the same order in every bar
            value = values.get(part, 0.0)
            if not value:
                continue
            said = f"{name}, {part}: {value:.4g} {unit}"
            bars.append(rect(x, y, value * scale, BAR, fills[part], said))
            x += value * scale
        bars.append(text(x + 6, y + 13, f"{sum(values.values()):.4g} {unit}", css="value"))
        y += BAR + GAP
    axis = [line(left, y, WIDTH - 90, y)]
    for tick in ticks(0.0, top):
        x = left + tick * scale
        axis += [line(x, start - 4, x, y, "grid"), text(x, y + 16, f"{tick:g}", "middle", "tick")]
    axis.append(text(WIDTH - 62, y + 16, unit, css="tick"))
    if limit is not None:
        x = left + limit[1] * scale
        bars.append(line(x, start - 4, x, y, "limit"))
        bars.append(text(x - 5, y + 32, f"{limit[0]} {limit[1]:.4g} {unit}", "end", "tick"))
        y += 16
    return drawing(WIDTH, y + 24, key + "".join(axis) + "".join(bars), label)


def length_lines(
    lengths: Sequence[int],
    series: Mapping[str, Sequence[float | None]],
    unit: str,
    label: str,
) -> str:
    """Draw values over sequence lengths, both logarithmic, a line per configuration.

    A configuration that is not valid at a length (None) has a gap there.
    """
    values = [value for row in series.values() for value in row if value]
    low, high = min(values) / 1.05, max(values) * 1.05
    names = [(color(i), name) for i, name in enumerate(series)]
    left, right, height = 70.0, 20.0, 300.0
    key, above = legend(left, 2, names, WIDTH - left - right)
    above += 12
    foot = above + height
    span = math.log(lengths[-1] / lengths[0]) or 1.0

    def place(length: int, value: float) -> tuple[float, float]:
        across = math.log(length / lengths[0]) / span if len(lengths) > 1 else 0.5
        up = math.log(value / low) / math.log(high / low)
        return left + across * (WIDTH - left - right - 20) + 10, above + height * (1 - up)

    body = [line(left, above, left, foot), line(left, foot, WIDTH, foot)]
    for tick in ticks(low, high) if high / low < 10 else _log_ticks(low, high):
        y = place(lengths[0], tick)[1]
        body += [line(left, y, WIDTH, y, "grid"), text(left - 8, y + 4, f"{tick:g}", "end", "tick")]
    body.append(text(left + 6, above + 12, unit, css="tick"))
    for length in lengths:
        x = place(length, low)[0]
        body.append(text(x, foot + 18, short_length(length), "middle", "tick"))
        body.append(line(x, foot, x, foot + 5))
    for index, (name, row) in enumerate(series.items()):
        points: list[tuple[float, float]] = []
        for length, value in (*zip(lengths, row, strict=True), (0, None)):
            if value is None:
                body.append(polyline(points, color(index)) if len(points) > 1 else "")
                points = []
                continue
            points.append(place(length, value))
            body.append(dot(*points[-1], 3.5, color(index), f"{name}: {value:.4g} {unit}"))
    body.append(text((WIDTH + left) / 2, foot + 36, "sequence length", "middle", "tick"))
    return drawing(WIDTH, foot + 44, key + "".join(body), label)


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [part * 10.0**power for power in powers for part in (1, 2, 5)]
    return [tick for tick in found if low <= tick <= high]


def short_length(length: int) -> str:
    """Return 131072 as 128K."""
    for size, letter in ((2**20, "M"), (2**10, "K")):
        if length % size == 0:
            return f"{length // size}{letter}"
    return str(length)


def front(points: Sequence[tuple[str, float, float]]) -> list[str]:
    """Return the names that no other point beats in both coordinates, by the first coordinate."""
    found: list[str] = []
    best = math.inf
    for name, _, y in sorted(points, key=lambda point: (point[1], point[2])):
        if y < best:
            found.append(name)
            best = y
    return found


def pareto(points: Sequence[tuple[str, float, float]], axes: tuple[str, str], label: str) -> str:
    """Draw ``(name, x, y)`` with the points that no other one beats in both, joined by a line.

    Of many points only these are named beside them; all say their name when they are pointed at.
    """
    best = front(points)
    left, below, height = 70.0, 44.0, 300.0
    xs, ys = [x for _, x, _ in points], [y for _, _, y in points]
    x_low, x_span = _padded(xs)
    y_low, y_span = _padded(ys)

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = (x - x_low) / x_span, (y - y_low) / y_span
        return left + across * (WIDTH - left - 20), TOP + height * (1 - up)

    body = [line(left, TOP, left, TOP + height), line(left, TOP + height, WIDTH, TOP + height)]
    for tick in ticks(x_low, x_low + x_span):
        x = place(tick, y_low)[0]
        body.append(line(x, TOP, x, TOP + height, "grid"))
        body.append(text(x, TOP + height + 18, f"{tick:.5g}", "middle", "tick"))
    for tick in ticks(y_low, y_low + y_span):
        y = place(x_low, tick)[1]
        body.append(line(left, y, WIDTH, y, "grid"))
        body.append(text(left - 8, y + 4, f"{tick:.5g}", "end", "tick"))
    at = {name: place(x, y) for name, x, y in points}
    body.append(polyline([at[name] for name in best], "var(--front)", "5 4"))
    taken: list[tuple[float, float, float]] = []
    for name, x, y in sorted(points, key=lambda point: (point[0] in best, point[2])):
        px, py = at[name]
        fill = "var(--front)" if name in best else "var(--c7)"
        said = f"{name}: {x:.4g} {axes[0]}, {y:.4g} {axes[1]}"
        body.append(dot(px, py, 5, fill, said))
        if len(points) <= MOST_NAMES or name in best:
            body.append(_named(name, px, py, taken))
    body.append(text((WIDTH + left) / 2, TOP + height + 36, axes[0], "middle", "tick"))
    body.append(text(left + 6, TOP - 8, axes[1], css="tick"))
    return drawing(WIDTH, TOP + height + below, "".join(body), label)


def _padded(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    return low - room, high - low + 2 * room


def _named(name: str, x: float, y: float, taken: list[tuple[float, float, float]]) -> str:
    """Return a name beside its point, moved up until it covers no other name, or else down."""
    width = CHARACTER * len(name)
    start = x + 5 if x + 5 + width < WIDTH else x - 5 - width

    def is_free(row: float) -> bool:
        return not any(
            abs(row - other) < 14 and start < end and begin < start + width
            for begin, end, other in taken
        )

    above = [y - 9 - 14 * step for step in range(24) if y - 9 - 14 * step > 12]
    below = [y + 18 + 14 * step for step in range(24)]
    row = next(filter(is_free, [*above, *below]), y - 9)
    taken.append((start, start + width, row))
    return text(start, row, name)


def lanes(timeline: Timeline, label: str) -> str:
    """Draw one phase of one kind of layer: a lane per stream, times written below.

    A stretch between two events is as wide as the root of its length.
    """
    left, height = 80.0, 34.0
    key, top = legend(left, 2, [(fill, name) for name, fill in KINDS.items()], WIDTH - left)
    top += 8
    times = sorted({time for slot in timeline.slots for time in (slot.start, slot.end)})
    roots = [math.sqrt(max(b - a, 0.0)) for a, b in pairwise(times)]
    total = sum(roots) or 1.0
    at = {times[0]: left} if times else {}
    for (a, b), root in zip(pairwise(times), roots, strict=True):
        at[b] = at[a] + (WIDTH - left - 10) * root / total
    body = [key]
    for row, resource in enumerate(("compute", "network")):
        y = top + row * (height + 6)
        body.append(text(left - 8, y + 21, resource, "end"))
        body.append(rect(left, y, WIDTH - left - 10, height, "var(--lane)"))
        own = [slot for slot in timeline.slots if slot.resource == resource]
        body += [_slot(slot, at[slot.start], at[slot.end], y, height) for slot in own]
    y, last = top + 2 * height + 6, -math.inf
    for time in times:
        if at[time] - last > 46 and (at[times[-1]] - at[time] > 70 or time == times[-1]):
            body.append(line(at[time], y, at[time], y + 5))
            anchor = "end" if at[time] > WIDTH - 30 else "middle"
            body.append(text(at[time], y + 18, f"{time * 1e3:.4g}", anchor, "tick"))
            last = at[time]
    body.append(text(left - 8, y + 18, "ms", "end", "tick"))
    return drawing(WIDTH, y + 24, "".join(body), label)


def _slot(slot: Slot, start: float, end: float, y: float, height: float) -> str:
    length = (slot.end - slot.start) * 1e3
    said = f"{slot.key}: {length:.4g} ms, {slot.exposed * 1e3:.4g} ms of it exposed"
    hidden = slot.resource == "network" and slot.exposed * 1e3 < 0.5 * length
    fill = _kind_color(slot)
    extra = ' class="slot hidden"' if hidden else ' class="slot"'
    name = slot.key if CHARACTER * len(slot.key) < end - start - 4 else ""
    words = text((start + end) / 2, y + height / 2 + 4, name, "middle", "inside") if name else ""
    return rect(start, y, end - start, height, fill, said, extra) + words


def _kind_color(slot: Slot) -> str:
    if slot.resource == "network":
        return KINDS["communication"]
    if "projection" in slot.key:
        return KINDS["projections"]
    return KINDS["copies" if "copies" in slot.key else "attention"]
