"""Sequence lengths with their shares: a list, or a histogram in a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from hp_tune.errors import UsageError
from hp_tune.files import load_json, load_yaml

__all__ = ["MOST_LENGTHS", "binned", "read_histogram"]

MOST_LENGTHS = 8
"""A histogram of more distinct lengths is put into bins of a power of two."""

Lengths = list[tuple[int, float]]


def read_histogram(path: Path, option: str = "--seq-hist") -> Lengths:
    """Return the lengths in ``path`` with their shares, ascending; the shares add up to 1.

    A JSON or YAML file (by its ending) is a mapping from length to count; any other text file has
    a length and a count per line, with a space or comma between. What is after ``#`` is left out;
    a line without a count counts once.
    """
    if path.suffix in (".json", ".yaml", ".yml"):
        data = load_json(path) if path.suffix == ".json" else load_yaml(path)[0]
        rows = [(str(path), key, value) for key, value in data.items()]
    else:
        rows = _lines(path)
    counts: dict[int, float] = {}
    for where, length, count in rows:
        number, share = _length(length), _count(count)
        if number is None or share is None:
            raise UsageError(
                f"{option} {where}: a length and a count ({length!r}: {count!r}) must be a whole "
                "number of at least 1 and a positive number",
                "one per line, such as `8192 120`, or a JSON object of them",
            )
        counts[number] = counts.get(number, 0.0) + share
    if not counts:
        raise UsageError(f"{option} {path}: must have a length at least", "such as `8192 120`")
    total = sum(counts.values())
    if total == math.inf or min(counts.values()) / total == 0:
        raise UsageError(
            f"{option} {path}: counts ({min(counts.values()):g} to {max(counts.values()):g}) must "
            "be of sizes that can be added up"
        )
    return [(length, counts[length] / total) for length in sorted(counts)]


def binned(lengths: Sequence[tuple[int, float]], multiple: int) -> Lengths:
    """Return at most one length per power of two, each one that ``multiple`` divides.

    Few lengths stay as they are, rounded up. Many are put into bins above half and up to a power
    of two; each bin stands for its mean length.
    """
    bins: dict[int, list[tuple[int, float]]] = {}
    few = len(lengths) <= MOST_LENGTHS
    for length, share in lengths:
        rounded = -(-length // multiple) * multiple
        bins.setdefault(rounded if few else (length - 1).bit_length(), []).append((length, share))
    found: dict[int, float] = {}
    for members in bins.values():
        share = sum(part for _, part in members)
        mean = sum(length * part for length, part in members) / share
        rounded = max(multiple, math.ceil(mean / multiple - 1e-9) * multiple)
        found[rounded] = found.get(rounded, 0.0) + share
    return sorted(found.items())


def _lines(path: Path) -> list[tuple[str, str, str]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"{path}: cannot be read: {reason}") from None
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].replace(",", " ").split()
        if len(words) > 2:
            raise UsageError(f"{path}:{number}: a line must have a length and a count, not more")
        if words:
            rows.append((f"{path}:{number}", words[0], words[1] if len(words) == 2 else "1"))
    return rows


def _length(value: object) -> int | None:
    text = str(value)
    digits = text.isascii() and text.isdecimal() and len(text) <= 18
    return int(text) if digits and int(text) > 0 else None


def _count(value: object) -> float | None:
    try:
        number = float(str(value))
    except ValueError:
        return None
    return number if 0 < number < math.inf else None
