"""Logs of hccl_test, the HCCL performance tester of CANN.

Its versions name the columns with their units or without, with ``|`` between them or blanks::

    data_size(Bytes): | aveg_time(us): | alg_bandwidth(GB/s): | check_result:
    1048576           | 58.21          | 18.01368             | success

``alg_bandwidth`` is the whole buffer over the time. ``data_size`` is that buffer as well, or in
some versions a rank's part of it: the bandwidth tells which. A log does not say how many ranks ran,
unless the command stands in it (``mpirun -n 8 ... -p 8``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hp_tune.importing.log import Log, Row, find_kind, number, wrong

__all__ = ["is_hccl", "read_hccl"]

TO_US = {"us": 1.0, "ms": 1e3, "s": 1e6}
TO_BYTES = {"bytes": 1, "b": 1, "kb": 1024, "mb": 2**20}
COMMAND = re.compile(r"mpirun\b.*?\s-np?\s+(\d+)\b(.*)")
TOLERANCE = 0.03
SMALL = 64 * 1024
"""Below it buffers are rounded up so much that size and bandwidth need not agree."""


def is_hccl(lines: Sequence[str]) -> bool:
    """Return whether there is the head of such a table."""
    return any(_head(line) for line in lines)


def _head(line: str) -> list[tuple[str, str]]:
    """Return name and unit of each column if this is the head."""
    found = re.findall(r"([a-z_]+)\s*(?:\(([^)]*)\))?\s*:?", line.lower())
    names = [name for name, _ in found]
    if "data_size" in names and "alg_bandwidth" in names:
        return [(name.replace("aveg", "avg"), unit.strip()) for name, unit in found]
    return []


def read_hccl(path: Path, lines: Sequence[str], *, num_ranks: int | None = None) -> Log:
    """Return what a log says.

    Args:
        path: For messages, and for the name of the collective where the log has none.
        lines: Of the file.
        num_ranks: Where the log does not say.

    Raises:
        UsageError: A row is cut, not a number, in another unit, or has wrong results.
    """
    kind = find_kind(path, lines, "test")
    columns: list[tuple[str, str]] = []
    nodes = None
    rows: list[Row] = []
    for index, line in enumerate(lines, start=1):
        command = COMMAND.search(line)
        if command:
            num_ranks = int(command[1])
            each = re.search(r"\s-p\s+(\d+)\b", command[2])
            nodes = num_ranks // int(each[1]) if each and int(each[1]) else None
        elif _head(line):
            columns = _head(line)
        elif columns and re.match(r"\s*\d+\s*(\||\s)", line):
            words = [word for word in re.split(r"[|\s]+", line.strip()) if word]
            rows.append(_row(path, index, words, columns, num_ranks))
    if not rows:
        raise wrong(path, max(1, len(lines)), "the table of hccl_test has no row")
    return Log(path, "hccl_test", kind, num_ranks, nodes, "", tuple(rows))


def _row(
    path: Path, index: int, words: list[str], columns: list[tuple[str, str]], num_ranks: int | None
) -> Row:
    if len(words) != len(columns):
        raise wrong(
            path, index, f"a row must have {len(columns)} columns and has {len(words)}",
            "the log may be cut here",
        )  # fmt: skip
    values = {name: (text, unit) for text, (name, unit) in zip(words, columns, strict=True)}
    text, unit = values["data_size"]
    size = int(number(path, index, text, "data_size") * TO_BYTES.get(unit, 1))
    text, unit = values.get("avg_time", ("", ""))
    us = number(path, index, text, "aveg_time") * TO_US.get(unit, 1.0)
    rate = number(path, index, values["alg_bandwidth"][0], "alg_bandwidth")
    verdict = values.get("check_result", ("NULL", ""))[0]
    if verdict.lower() not in ("success", "null"):
        raise wrong(path, index, f"check_result is {verdict}: times of wrong results say nothing")
    if us <= 0:
        raise wrong(path, index, f"aveg_time ({text}) must be above 0")
    times = rate * us * 1e3 / size if size else 1.0
    if num_ranks and abs(times / num_ranks - 1) < TOLERANCE:
        return Row(index, size * num_ranks, us)  # a rank's part
    if size >= SMALL and abs(times - 1) > TOLERANCE:
        raise wrong(
            path, index,
            f"alg_bandwidth ({rate:g} GB/s) must be data_size / aveg_time "
            f"({size / us / 1e3:.4g} GB/s), or as many times that as there are ranks",
            "give --ranks as they were" if not num_ranks else "the columns are in other units",
        )  # fmt: skip
    return Row(index, size, us)
