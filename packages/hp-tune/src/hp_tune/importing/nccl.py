"""Logs of nccl-tests (and rccl-tests, which print the same).

Rows stand under a head of three lines; out-of-place and in-place have four columns each::

    #       size         count      type   redop    root     time   algbw   busbw #wrong  ...
    #        (B)    (elements)                               (us)  (GB/s)  (GB/s)         ...
         1048576         32768     float    none      -1    47.31   22.16   19.39      0  ...

``size`` is the whole buffer of a rank, and algbw is size / time; busbw is algbw (n - 1) / n, and
for send-receive algbw itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hp_tune.importing.log import Log, Row, find_kind, number, wrong

__all__ = ["is_nccl", "read_nccl"]

DEVICE = re.compile(r"^#\s+Rank\s+(\d+).*?\bon\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*)$")
TOLERANCE = 0.05
"""Of algbw: it has two digits behind the point."""


def is_nccl(lines: Sequence[str]) -> bool:
    """Return whether there is the head of such a table."""
    return any(_is_head(line) for line in lines)


def _is_head(line: str) -> bool:
    words = line.lstrip("# ").split()
    return line.lstrip().startswith("#") and words[:2] == ["size", "count"] and "algbw" in words


def read_nccl(path: Path, lines: Sequence[str], *, in_place: bool = False) -> Log:
    """Return what a log says.

    Args:
        path: For messages, and for the name of the collective where the log has none.
        lines: Of the file.
        in_place: Take these columns instead of out-of-place ones.

    Raises:
        UsageError: A row is cut, not a number, in another unit, or has wrong results.
    """
    ranks: dict[int, str] = {}
    device = ""
    rows: list[Row] = []
    columns: list[str] | None = None
    kind = find_kind(path, lines, "perf")
    for index, line in enumerate(lines, start=1):
        found = DEVICE.match(line)
        if found:
            ranks[int(found[1])] = found[2]
            device = found[3].strip()
        elif _is_head(line):
            columns = line.lstrip("# ").split()
        elif columns is not None and re.match(r"\s*\d+\s+\d+\s", line):
            row = _row(path, index, line, columns, in_place=in_place)
            if row.size:
                rows.append(row)
    if not rows:
        raise wrong(path, max(1, len(lines)), "the table of nccl-tests has no row")
    return Log(
        path, "nccl-tests", kind, len(ranks) or None, len(set(ranks.values())) or None, device,
        tuple(rows),
    )  # fmt: skip


def _row(path: Path, index: int, line: str, columns: list[str], *, in_place: bool) -> Row:
    words = line.split()
    times = [at for at, name in enumerate(columns) if name == "time"]
    if len(words) != len(columns):
        raise wrong(
            path, index, f"a row must have {len(columns)} columns and has {len(words)}",
            "the log may be cut here",
        )  # fmt: skip
    if in_place and len(times) < 2:
        raise wrong(path, index, "the table has no in-place columns", "leave --in-place out")
    at = times[1 if in_place else 0]
    size = int(number(path, index, words[0], "size"))
    us = number(path, index, words[at], "time")
    algbw = number(path, index, words[at + 1], "algbw")
    broken = words[at + 3] if at + 3 < len(words) else "N/A"
    if broken != "N/A" and number(path, index, broken, "#wrong") > 0:
        raise wrong(path, index, f"{broken} elements are wrong: times of wrong results say nothing")
    if us and abs(size / us / 1e3 - algbw) > max(0.011, TOLERANCE * algbw):
        raise wrong(
            path, index,
            f"algbw ({algbw:g}) must be size / time ({size / us / 1e3:.4g} GB/s if in us)",
            "the columns are not those of nccl-tests",
        )  # fmt: skip
    return Row(index, size, us)
