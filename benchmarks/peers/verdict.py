"""The targets, and whether the rows meet them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from peers.stats import interval, ratios

__all__ = ["OURS", "Verdict", "failures_of_ours", "verdicts"]

Row = dict[str, Any]

OURS = "ours: Ulysses, local tensors"
"""The contender that is held against the floor and the peers: plain tensors, as theirs are."""
BALANCED = "colossal balanced"
BYTES_SLACK = 0.005
"""A ratio of bytes that is printed as 1.00."""


@dataclass(frozen=True)
class Verdict:
    """One target.

    Attributes:
        target: In words.
        passed: None if no row of this run says anything about it.
        figure: The rows that decide it, the worst one first.
    """

    target: str
    passed: bool | None
    figure: str


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Return every target with what the rows say about it."""
    return [
        _largest(
            "ours <= 1.03 x floor at S 4096 and 8192",
            1.03,
            _timed(rows, lambda row: row["impl"] == OURS and row["seq"] in (4096, 8192)),
            "to_floor",
        ),
        _largest(
            "ours <= 1.05 x oracle at S 8192",
            1.05,
            _timed(rows, lambda row: row["impl"] == OURS and row["seq"] == 8192),
            "to_oracle",
        ),
        _to_limit(rows),
        _below_peers(
            "ours (Ulysses) below every peer in every row",
            rows,
            _timed(rows, lambda row: row["impl"] == OURS),
        ),
        _below_peers("our fastest mode below every peer in every row", rows, _fastest(rows)),
        _bytes(rows),
        _two_and_two(rows),
        _balance(rows),
    ]


def failures_of_ours(rows: Iterable[Row]) -> list[str]:
    """Say which of our rows are not right: not equal to the oracle, or other bytes than planned."""
    failed = []
    for row in rows:
        at = f"{row['case']} {row['impl']}"
        if row["ours"] and row["status"] != "ok":
            failed.append(f"{at}: {row['status']}, {row['reason']}")
        elif row["ours"]:
            failed += [
                f"{at}: sends {ratio:.4f} of the formula's bytes" for ratio in _off_formula(row)
            ]
    return failed


def _timed(rows: Iterable[Row], wanted: Callable[[Row], bool]) -> list[Row]:
    return [row for row in rows if "ms" in row and wanted(row)]


def _largest(target: str, limit: float, rows: Sequence[Row], key: str) -> Verdict:
    if not rows:
        return Verdict(target, None, "no such row")
    worst = max(rows, key=lambda row: row[key]["median"])
    over = sum(row[key]["median"] > limit for row in rows)
    value = worst[key]
    figure = f"{value['median']:.3f} [{value['low']:.3f}, {value['high']:.3f}] in {worst['case']}"
    return Verdict(target, not over, f"{figure}; over in {over} of {len(rows)} rows")


def _fastest(rows: Sequence[Row]) -> list[Row]:
    """Return the fastest of our rows in each case."""
    best: dict[str, Row] = {}
    for row in _timed(rows, lambda row: row["ours"]):
        other = best.get(row["case"])
        if other is None or row["to_oracle"]["median"] < other["to_oracle"]["median"]:
            best[row["case"]] = row
    return list(best.values())


def _to_limit(rows: Sequence[Row]) -> Verdict:
    """Say how far ours is from what no library can beat, which says what the floor is worth."""
    pairs = [
        (interval(ratios(ours["walls_ms"], limit["walls_ms"])), ours["case"])
        for ours in _timed(rows, lambda row: row["impl"] == OURS)
        for limit in _timed(rows, lambda row: row["limit"])
        if limit["case"] == ours["case"]
    ]
    target = "ours / Ulysses written out by hand (no target)"
    if not pairs:
        return Verdict(target, None, "not timed beside it")
    worst, case = max(pairs, key=lambda pair: pair[0].median)
    return Verdict(target, None, f"{worst} in {case}, the largest of {len(pairs)} rows")


def _below_peers(target: str, rows: Sequence[Row], chosen: Sequence[Row]) -> Verdict:
    pairs = []
    for ours in chosen:
        for peer in _timed(rows, lambda row: not (row["ours"] or row["limit"])):
            if peer["case"] == ours["case"]:
                ratio = interval(ratios(ours["walls_ms"], peer["walls_ms"]))
                pairs.append((ratio, f"{peer['impl']} in {peer['case']}"))
    if not pairs:
        return Verdict(target, None, "no peer was timed")
    closest, name = max(pairs, key=lambda pair: pair[0].median)
    behind = sum(ratio.median >= 1 for ratio, _ in pairs)
    unsure = sum(ratio.median < 1 <= ratio.high for ratio, _ in pairs)
    figure = (
        f"{closest} of {name}; not below in {behind} of {len(pairs)} pairs, "
        f"below but within the noise in {unsure}"
    )
    return Verdict(target, not behind, figure)


def _off_formula(row: Row) -> list[float]:
    found = [row[f"bytes_ratio_{way}"] for way in ("forward", "backward")]
    return [ratio for ratio in found if abs(ratio - 1) > BYTES_SLACK]


def _bytes(rows: Sequence[Row]) -> Verdict:
    target = "bytes / formula = 1.00 in all our modes, kv heads < P included"
    ours = [row for row in rows if row["ours"] and row["status"] == "ok"]
    if not ours:
        return Verdict(target, None, "no such row")
    found = [row[f"bytes_ratio_{way}"] for row in ours for way in ("forward", "backward")]
    right = not any(_off_formula(row) for row in ours)
    return Verdict(target, right, f"{min(found):.4f} to {max(found):.4f} in {len(ours)} rows")


def _two_and_two(rows: Sequence[Row]) -> Verdict:
    target = "2 + 2 collectives for Ulysses"
    ours = [row for row in rows if row["impl"] == OURS and row["status"] == "ok"]
    if not ours:
        return Verdict(target, None, "no such row")
    found = {(row["collectives_forward"], row["collectives_backward"]) for row in ours}
    figure = ", ".join(f"{forward} + {backward}" for forward, backward in sorted(found))
    return Verdict(target, found == {(2, 2)}, f"{figure} in {len(ours)} rows")


def _balance(rows: Sequence[Row]) -> Verdict:
    target = "balanced Colossal, causal: CPU max / mean <= 1.10"
    ours = _timed(rows, lambda row: row["mode"] == BALANCED and row["causal"])
    if not ours:
        return Verdict(target, None, "no such row")
    worst = max(ours, key=lambda row: row["cpu_max_over_mean"])
    value = worst["cpu_max_over_mean"]
    return Verdict(target, value <= 1.10, f"{value:.3f} in {worst['case']}, {len(ours)} rows")
