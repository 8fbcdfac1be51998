"""Run one case after another on a pool of ranks and make rows of what they return."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from hp_mesh.testing import ranks
from peers.adapters.registry import CONTENDERS
from peers.cases import RANKS, Case
from peers.check import check
from peers.contender import Contender
from peers.formulas import bytes_each_way
from peers.oracle import write_oracle
from peers.report import progress
from peers.stats import imbalance, interval, quantiles, ratios
from peers.timing import BARE, ORACLE, WIRE, time_rounds

__all__ = ["Bench", "merge"]

Row = dict[str, Any]
CHECK_SECONDS = 300.0
"""For one contender, the first import of its library included."""


class Bench:
    """The ranks, and what they have to do.

    Args:
        folder: Where the oracles are kept for the time of a case.
        only: Contenders whose name has one of these parts; empty for all.
    """

    def __init__(self, folder: Path, only: Sequence[str]) -> None:
        self.folder = folder
        self.contenders = [
            c for c in CONTENDERS if not only or any(o.lower() in c.name.lower() for o in only)
        ]
        self.pool = ranks(RANKS, backend="processes")

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.pool.close()

    def run(self, case: Case, rounds: int) -> list[Row]:
        """Return a row for each contender; those that are right are timed in ``rounds`` rounds."""
        oracle = self.folder / "oracle.pt"
        self.pool.run(write_oracle, case, oracle, timeout=600.0)
        rows = {c.name: self._check(c, case, oracle) for c in self.contenders}
        names = [name for name, row in rows.items() if row["status"] == "ok"]
        if rounds and names:
            seconds = 120.0 + rounds * len(names) * 30.0
            try:
                measured = self.pool.run(time_rounds, case, names, rounds, timeout=seconds)
            except Exception as problem:  # the next case gets new ranks
                self.pool.close()
                for name in names:
                    rows[name]["untimed"] = _text(problem)
            else:
                for name, times in summarize(measured, names).items():
                    rows[name].update(times)
        return list(rows.values())

    def _check(self, contender: Contender, case: Case, oracle: Path) -> Row:
        progress(f"{case}: {contender.name}")
        row: Row = {
            "bench": "peers",
            "case": str(case),
            "seq": case.seq,
            "heads": f"{case.heads}:{case.kv_heads}",
            "causal": case.causal,
            "impl": contender.name,
            "ours": contender.ours,
            "limit": contender.limit,
            "mode": contender.mode,
        }
        try:
            found = self.pool.run(check, contender.name, case, oracle, timeout=CHECK_SECONDS)
        except Exception as problem:  # a rank that hung or died; the next call gets new ranks
            self.pool.close()
            return {**row, "status": "raises", "reason": _text(problem)}
        merged = merge(found)
        if not merged.pop("alike"):
            self.pool.close()  # some ranks may wait in a collective that the others left out
        row.update(merged)
        if contender.mode is not None and merged["status"] == "ok":
            formula = bytes_each_way(contender.mode, case)
            for way in ("forward", "backward"):
                sent = [one["sent"][way]["bytes"] / formula for one in found]
                row[f"bytes_ratio_{way}"] = max(sent, key=lambda ratio: abs(ratio - 1))
        return row


def _text(problem: Exception) -> str:
    cause = problem.__cause__ or problem
    first = next(iter(str(cause).splitlines()), "")
    return f"{type(cause).__name__}: {first}"[:200]


def merge(found: Sequence[Row]) -> Row:
    """Make one of what the ranks found: the worst status, means of bytes, the first reason.

    ``alike`` says whether all ranks failed in the same way, so that none of them waits.
    """
    order = ("ok", "wrong", "raises", "not run")
    worst = max(found, key=lambda one: order.index(one["status"]))
    merged: Row = {"status": worst["status"], "reason": worst["reason"]}
    if worst["status"] in ("raises", "not run"):
        merged["alike"] = len({(one["status"], one["reason"].split(":")[0]) for one in found}) == 1
        return merged
    merged["alike"] = True
    names = found[0]["off"]
    merged["off"] = {name: max(one["off"][name] for one in found) for name in names}
    for way in ("forward", "backward"):
        merged[f"collectives_{way}"] = found[0]["sent"][way]["count"]
        merged[f"kinds_{way}"] = found[0]["sent"][way]["kinds"]
        merged[f"preflight_{way}"] = found[0]["sent"][way]["preflight"]
        sent = [one["sent"][way]["bytes"] for one in found]
        merged[f"bytes_{way}"] = sum(sent) / len(sent)
    merged["saved_bytes"] = max(one["saved_bytes"] for one in found)
    return merged


def summarize(measured: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, Row]:
    """Return the times of each contender; ``measured`` is what `time_rounds` gave, by rank."""

    def walls(name: str, column: int = 0) -> list[float]:
        by_rank = [[row[column] for row in rank[name]] for rank in measured]
        return [max(times) for times in zip(*by_rank, strict=True)]

    def work(name: str) -> list[float]:
        by_rank = [[row[3] for row in rank[name]] for rank in measured]
        return [sum(times) for times in zip(*by_rank, strict=True)]

    oracle = walls(ORACLE)
    floor = [a + b for a, b in zip(oracle, walls(WIRE), strict=True)]
    rows: dict[str, Row] = {}
    for name in names:
        wall = walls(name)
        if len(wall) < len(oracle):
            floor_ms = 1e3 * statistics.median(floor)
            rows[name] = {
                "untimed": f"one step took {1e3 * wall[0]:.0f} ms, {1e3 * wall[0] / floor_ms:.1f} "
                "times the floor"
            }
            continue
        rows[name] = {
            "ms": quantiles([1e3 * x for x in wall]),
            "forward_ms": quantiles([1e3 * x for x in walls(name, 1)]),
            "oracle_ms": quantiles([1e3 * x for x in oracle]),
            "wire_ms": quantiles([1e3 * x for x in walls(WIRE)]),
            "bare_to_floor": interval(ratios(walls(BARE), floor)).as_dict(),
            "to_oracle": interval(ratios(wall, oracle)).as_dict(),
            "to_floor": interval(ratios(wall, floor)).as_dict(),
            "cpu_ms": quantiles([1e3 * x / len(measured) for x in work(name)]),
            "cpu_to_oracle": interval(ratios(work(name), work(ORACLE))).as_dict(),
            "cpu_max_over_mean": imbalance([[row[2] for row in rank[name]] for rank in measured]),
            "walls_ms": [1e3 * x for x in wall],
        }
    return rows
