"""One DSA layer on gloo ranks: what it sends, how its work is spread, how long it takes.

- The bytes that it gathers for a token, counted, beside the formula and its limit.
- Pairs of row and visible key that each rank's indexer is handed, the most over the mean, with and
  without balance; CPU time likewise.
- A small layer forward and backward on 1, 2 and 4 ranks: checked against the layer without styles,
  then timed against one rank in the same rounds.
"""

from __future__ import annotations

import statistics
from typing import Any

import dsa_ranks

from hp_dsa import make_plan
from hp_mesh.testing import ranks


def layer_rows(rounds: int) -> list[dict[str, Any]]:
    """Return the rows of a layer on ranks: bytes, the indexer's work, time."""
    pools = {P: ranks(P, backend="processes") for P in (1, 2, 4)}
    try:
        return [*sent_rows(pools[4]), *work_rows(pools[4]), *time_rows(pools, rounds)]
    finally:
        for pool in pools.values():
            pool.close()


def sent_rows(pool: Any, P: int = 4, tokens: int = 64) -> list[dict[str, Any]]:
    """Return what a layer of V3.2's widths gathers for a token in bf16, beside the formula."""
    rows = []
    for cached in (True, False):
        everything = pool.run(dsa_ranks.sent, P, tokens, cached, timeout=600.0)
        plan = make_plan(P).describe(seq_len=P * tokens, shared=cached)
        # each token is sent to the P - 1 others
        measured = {sent["all_gather"][1] / (tokens * (P - 1)) for sent in everything}
        limit = 1408 if cached else 2816
        rows.append(
            {
                "case": f"bytes of a token, {P} ranks, {'cached' if cached else 'no cache'}",
                "measured": max(measured),
                "formula": plan.bytes_per_token,
                "limit": limit,
                "all kinds": all(sent == plan.totals() for sent in everything),
                "checked": measured == {plan.bytes_per_token} == {limit}
                and all(sent == plan.totals() for sent in everything),
            }
        )
    return rows


def work_rows(pool: Any, P: int = 4, length: int = 2048) -> list[dict[str, Any]]:
    """Return the indexer's pairs and CPU time, the most of a rank over the mean of all."""
    rows = []
    for balanced, limit in ((False, 2 - 1 / P), (True, 1.0)):
        found = pool.run(dsa_ranks.indexed, P, length, balanced, timeout=600.0)
        pairs, seconds = zip(*found, strict=True)
        ratio = max(pairs) * P / sum(pairs)
        rows.append(
            {
                "case": f"indexer, {P} ranks, {length} tokens, "
                f"{'balanced' if balanced else 'as it comes'}",
                "max/mean pairs": ratio,
                "formula": limit,
                "max/mean CPU time": max(seconds) * P / sum(seconds),
                "all pairs": sum(pairs) == length * (length + 1) // 2,
                "checked": sum(pairs) == length * (length + 1) // 2 and abs(ratio - limit) < 1e-3,
            }
        )
    return rows


def time_rows(pools: dict[int, Any], rounds: int, length: int = 512) -> list[dict[str, Any]]:
    """Return a small layer's time on each number of ranks over that on one; checked in each."""
    times: dict[int, list[float]] = {P: [] for P in pools}
    for _ in range(rounds):
        for P, pool in pools.items():
            times[P].append(max(pool.run(dsa_ranks.trained, P, length, timeout=600.0)))
    return [
        {
            "case": f"layer both ways, {length} tokens, {P} ranks",
            "ms": 1e3 * statistics.median(taken),
            "ratio to 1 rank": statistics.median(
                a / b for a, b in zip(taken, times[1], strict=True)
            ),
            "checked": True,  # a rank that is not right raises
        }
        for P, taken in times.items()
    ]
