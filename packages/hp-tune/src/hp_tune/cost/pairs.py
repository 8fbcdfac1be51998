"""How many (query, key) pairs each rank computes: the work of attention, and its imbalance."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache

from hp_cp.halo import fetched_by
from hp_cp.plan import Plan
from hp_mesh.window import Range
from hp_tune.models.model import Attention
from hp_tune.workload import Workload

__all__ = ["causal_pairs", "document_ends", "seen_pairs", "tiled_pairs", "work_shares"]


def causal_pairs(start: int, stop: int, window: int | None = None, sinks: int = 0) -> int:
    """Return how many (query, key) pairs the query rows ``[start, stop)`` see.

    A row sees itself and all earlier ones, or only the last ``window`` of these and the first
    ``sinks``.
    """

    def below(rows: int) -> int:  # pairs of the first rows
        full = rows if window is None else min(rows, window)
        beyond = rows - full  # these see a key less of the window, and up to all sinks
        few = min(beyond, sinks)
        seen = few * (few + 1) // 2 + (beyond - few) * sinks
        return full * (full + 1) // 2 + beyond * (window or 0) + seen

    return below(stop) - below(start)


def tiled_pairs(rows: int, tile: int) -> int:
    """Return the pairs that a causal kernel computes of ``rows`` on as many keys.

    A row takes its own key and all before it, up to the end of the tile of keys::

        tile 2, 5 rows    x x . . .
                          x x . . .
                          x x x x .
                          x x x x .
                          x x x x x
    """
    whole, rest = divmod(rows, tile)
    return tile * tile * whole * (whole + 1) // 2 + rest * rows


@lru_cache(maxsize=64)
def document_ends(seq_len: int, documents: tuple[tuple[int, float], ...]) -> tuple[int, ...]:
    """Return the ends of documents that fill ``seq_len`` tokens, lengths mixed as in a histogram.

    Each next document is of the length that is furthest behind its share, so that the mix is even
    from the first token to the last. The last one is cut where the sequence ends.
    """
    total = sum(weight for _, weight in documents)
    placed = [0] * len(documents)
    ends: list[int] = []
    at = 0
    while at < seq_len:
        count = len(ends) + 1
        behind = [
            weight / total * count - done
            for (_, weight), done in zip(documents, placed, strict=True)
        ]
        index = max(range(len(documents)), key=behind.__getitem__)
        placed[index] += 1
        at = min(seq_len, at + documents[index][0])
        ends.append(at)
    return tuple(ends)


def seen_pairs(
    rows: Range,
    layer: Attention,
    workload: Workload,
    *,
    window: int | None = None,
    tile: int = 1,
) -> int:
    """Return the pairs that the kernel computes for ``rows``; ``window`` replaces the layer's.

    A kernel that does not skip masked blocks computes all of them. One that skips leaves out whole
    tiles of keys, counted from the first of ``rows``: all keys before it are seen by every row.
    """
    start, stop = rows
    S = workload.seq_len
    if not workload.skips_masked:
        return (stop - start) * S
    ends: Sequence[int] = (S,)
    if workload.documents is not None:
        ends = document_ends(S, workload.documents)
    limit = window if window is not None else layer.window
    if layer.kind == "chunked" and layer.window:
        chunks = range(layer.window, S, layer.window)
        ends, limit = sorted({*ends, *chunks, S}), None
    pairs = 0
    at = bisect_right(ends, start)  # the document of the first row
    first = ends[at - 1] if at else 0
    while first < stop and at < len(ends):
        end = ends[at]
        a, b = max(first, start), min(end, stop)
        if workload.causal and limit is None:
            pairs += (b - a) * (a - first) + tiled_pairs(b - a, tile)
        elif workload.causal:
            pairs += causal_pairs(a - first, b - first, limit, layer.sink_tokens)
        else:
            pairs += (b - a) * (end - first)
        at, first = at + 1, end
    return pairs


def work_shares(
    plan: Plan, layer: Attention, workload: Workload, tile: int = 1, *, fetched: bool = False
) -> list[int]:
    """Return the (query, key) pairs of each Colossal index, read from the plan's rows.

    ``tile`` is that of the kernel, see `seen_pairs`. Where the keys of a window are ``fetched`` a
    rank has no others, and a kernel that does not skip computes those.
    """
    if fetched and not workload.skips_masked:
        assert layer.window is not None, "only sliding layers fetch a window"
        rows = workload.seq_len // plan.colossal_degree
        facts = (rows, layer.window, layer.sink_tokens)
        held = (fetched_by(rank, *facts) for rank in range(plan.colossal_degree))
        return [rows * sum(stop - start for start, stop in ranges) for ranges in held]
    return [
        _all(
            ((rows.query_start, rows.query_end) for rows in plan.rows(rank, workload.seq_len)),
            layer,
            workload,
            tile,
        )
        for rank in range(0, plan.cp_size, plan.ulysses_degree)
    ]


def _all(ranges: Iterable[Range], layer: Attention, workload: Workload, tile: int) -> int:
    return sum(seen_pairs(rows, layer, workload, tile=tile) for rows in ranges)
