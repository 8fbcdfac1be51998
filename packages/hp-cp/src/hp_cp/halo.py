"""Keys that a sliding window needs: which rows of K and V a rank fetches, and what that sends.

No torch here. Query ``i`` sees keys ``i - w + 1`` to ``i`` and the first ``n``, the *sinks*. A rank
of a Colossal group therefore needs the ``w - 1`` keys before its own rows, which may lie several
ranks back, and the sinks::

    c = 4, 6 rows a rank, w = 8, n = 2
    rank 0   keys 0-5
    rank 1   keys 0-11                                    7 before 6: all of rank 0
    rank 2   keys 0-1, 5-17                               from rank 0 and rank 1
    rank 3   keys 0-1, 11-23                              from rank 0, 1 and 2

Attention under ``sliding_window=w`` fetches these by point-to-point messages (`hp_comm.fetch_rows`)
in place of an all-gather of everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_mesh.checks import divisors, require, require_positive
from hp_mesh.window import Range

if TYPE_CHECKING:
    from hp_cp.plan import Plan

__all__ = ["check_window", "check_window_arguments", "fetched_by", "halo_rows", "passed_rows"]


def check_window_arguments(
    where: str,
    sliding_window: int | None,
    sink_tokens: int,
    *,
    balance: str | None = None,
    keep_kv: bool = True,
    kv_chunks: int = 1,
    use_local_input: bool = False,
    overlap: bool = False,
) -> None:
    """Refuse options of a style that a window does not go with.

    Args:
        where: Start of an error message.
        sliding_window: How many keys a query sees, its own included; None where all are gathered.
        sink_tokens: How many first keys it sees beside them.
        balance: The option that shares causal work equally, as the user typed it; None without.
        keep_kv: As in `ContextParallel`, like the others.
        kv_chunks: As there.
        use_local_input: As there.
        overlap: Whether k and v are sent ahead of the module.
    """
    sinks_are_counted = isinstance(sink_tokens, int) and not isinstance(sink_tokens, bool)
    require(
        sinks_are_counted and sink_tokens >= 0,
        where,
        f"sink_tokens ({sink_tokens!r}) must be an integer of at least 0",
    )
    if sliding_window is None:
        require(
            sink_tokens == 0,
            where,
            f"sink_tokens ({sink_tokens}) must come with sliding_window: without one every key is "
            "gathered",
            "leave it out (learned sink logits are not meant: they need no option)",
        )
        return
    require_positive(where, "sliding_window", sliding_window, "it counts the query's own key")
    option = f"sliding_window ({sliding_window})"
    require(
        balance is None,
        where,
        f"{option} must be None with {balance}: "
        "within a window every rank has the same work already",
        "leave one of them out",
    )
    require(
        keep_kv,
        where,
        f"{option} must be None with keep_kv=False: beside its own keys a rank holds those of one "
        "window only",
        "leave keep_kv out",
    )
    require(
        kv_chunks == 1,
        where,
        f"{option} must be None with kv_chunks ({kv_chunks}): keys of a window are not gathered",
        "leave one of them out",
    )
    require(
        not use_local_input,
        where,
        f"{option} must be None with use_local_input=True, which would hand the module shards of k "
        "and v in place of the whole",
        "leave one of them out",
    )
    require(
        not overlap,
        where,
        f"{option} must be None in AsyncContextParallel, "
        "which sends k and v before attention asks for the keys of its window",
        "use ContextParallel: what is sent is small",
    )


def check_window(
    plan: Plan, sliding_window: int | None, sink_tokens: int = 0, *, where: str
) -> None:
    """Refuse a window in a plan that gathers nothing, or that is balanced."""
    balance = plan.balance_option if plan.load_balance else None
    check_window_arguments(where, sliding_window, sink_tokens, balance=balance)
    degrees = " or ".join(map(str, divisors(plan.cp_size)[:-1]))
    require(
        sliding_window is None or plan.mode != "ulysses",
        where,
        f"sliding_window ({sliding_window}) must come with a gather of k and v, which "
        f"ulysses_degree ({plan.ulysses_degree}) on {plan.cp_size} ranks does not do",
        f"leave it out (the module computes its window all the same), or use "
        f"ulysses_degree={degrees}",
    )


def fetched_by(rank: int, shard: int, window: int, sinks: int) -> tuple[Range, ...]:
    """Return the keys that Colossal rank ``rank`` holds for its rows, its own among them.

    Args:
        rank: Colossal index of the rank.
        shard: Rows of a rank of the group (``u`` times its rows outside the boundary).
        window: Number of keys that a query sees, its own included.
        sinks: Number of first keys that every query sees.
    """
    start, stop = rank * shard, (rank + 1) * shard
    first = max(start - window + 1, 0)
    if not sinks or not first:
        return ((first, stop),)
    return ((0, stop),) if sinks >= first else ((0, sinks), (first, stop))


def halo_rows(ranks: int, shard: int, window: int, sinks: int) -> tuple[tuple[Range, ...], ...]:
    """Return `fetched_by` of every rank of a Colossal group: the table of `hp_comm.fetch_rows`."""
    return tuple(fetched_by(rank, shard, window, sinks) for rank in range(ranks))


def passed_rows(
    rank: int, ranks: int, shard: int, window: int, sinks: int
) -> tuple[list[int], list[int]]:
    """Return how many rows ``rank`` sends to each peer, and how many it fetches from each.

    Peers with none are left out: the lengths are the numbers of messages.
    """
    table = halo_rows(ranks, shard, window, sinks)

    def shared(owner: int, asker: int) -> int:
        low, high = owner * shard, (owner + 1) * shard
        return sum(max(0, min(b, high) - max(a, low)) for a, b in table[asker])

    peers = [peer for peer in range(ranks) if peer != rank]
    sent = [shared(rank, peer) for peer in peers]
    fetched = [shared(peer, rank) for peer in peers]
    return [n for n in sent if n], [n for n in fetched if n]
