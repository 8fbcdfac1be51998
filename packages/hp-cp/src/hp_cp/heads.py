"""Which heads each rank of a Ulysses group computes, and which counts cannot be cut; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from hp_mesh.checks import divisors, fail, require, require_positive
from hp_mesh.window import Range

__all__ = ["HeadTable", "check_groups", "cut_heads", "degrees_of"]


@dataclass(frozen=True, slots=True)
class HeadTable:
    """Which heads each rank of a Ulysses group computes; index ``d`` is the Ulysses rank.

    Attributes:
        query: Half-open range of query heads of rank ``d``.
        kv_sent: Sorted KV heads that rank ``d`` receives: those its query heads need, each once.
            Neighbours may receive the same head; its gradients are summed at the owner.
        kv_expand: None when, on every rank, the received KV heads serve equal runs of query heads
            (what GQA attention expects). Otherwise, for each local query head of rank ``d``, the
            index of its KV head in what was received: K and V then enter attention with one head
            per query head.
    """

    query: tuple[Range, ...]
    kv_sent: tuple[tuple[int, ...], ...]
    kv_expand: tuple[tuple[int, ...], ...] | None


def degrees_of(cp_size: int, num_heads: int) -> list[int]:
    """Return the Ulysses degrees that ``num_heads`` query heads allow on ``cp_size`` ranks."""
    return [u for u in divisors(cp_size) if num_heads % u == 0]


def cut_heads(
    cp_size: int,
    u: int,
    num_heads: int,
    num_kv_heads: int,
    *,
    where: str,
    head_dim: int | None = None,
    shape: Sequence[int] | None = None,
    tp_size: int = 1,
) -> HeadTable:
    """Return the heads of every rank of a Ulysses group of ``u``; see `Plan.heads`."""
    require_positive(where, "num_heads of q", num_heads)
    require_positive(where, "num_kv_heads of k and v", num_kv_heads)
    if u == 1:
        return HeadTable(((0, num_heads),), (tuple(range(num_kv_heads)),), None)
    if num_heads % u:
        q = "q" if shape is None else f"q {list(shape)}"
        dim = "" if head_dim is None else f" in dim {head_dim}"
        tp = "" if tp_size == 1 else f" on each of {tp_size} TP ranks"
        raise fail(
            where,
            f"num_heads ({num_heads}) must be divisible by ulysses_degree ({u}): "
            f"{q} has {num_heads} heads{dim}{tp} (k and v have {num_kv_heads})",
            _way_out(cp_size, num_heads, head_dim),
        )
    require(
        num_kv_heads <= num_heads,
        where,
        f"num_kv_heads ({num_kv_heads}) of k, v must be at most num_heads ({num_heads}) of q",
        "check the order of q, k, v (qkv_indices, qkv_kwarg_names)",
    )
    return _head_table(u, num_heads, num_kv_heads)


def check_groups(
    head_groups: int, u: int, num_heads: int, num_kv_heads: int, *, where: str
) -> None:
    """Refuse head groups that part query heads from their KV head; see `Plan.check_head_groups`."""
    require_positive(where, "head_groups", head_groups)
    unit = head_groups * u
    good = [
        h
        for h in divisors(num_kv_heads)
        if num_heads % (h * u) == 0 and num_heads % num_kv_heads == 0
    ]
    way_out = f"use head_groups={' or '.join(map(str, good))}" if good else "use head_groups=1"
    require(
        num_heads % unit == 0,
        where,
        f"num_heads ({num_heads}) must be divisible by head_groups * ulysses_degree "
        f"({head_groups} * {u})",
        way_out,
    )
    require(
        num_kv_heads % head_groups == 0 and num_heads % num_kv_heads == 0,
        where,
        f"num_kv_heads ({num_kv_heads}) of k, v must be divisible by head_groups "
        f"({head_groups}) and divide num_heads ({num_heads}), so that no group parts query "
        "heads from their KV head",
        way_out,
    )


def _way_out(cp_size: int, num_heads: int, head_dim: int | None) -> str:
    degrees = [str(u) for u in reversed(degrees_of(cp_size, num_heads)) if u > 1]
    use = f"use ulysses_degree={' or '.join(degrees)}, or 1" if degrees else "use ulysses_degree=1"
    layout = (
        ""
        if head_dim is None
        else f" (if dim {head_dim} is not the heads, seq_dim and head_dim name another layout: "
        "BSHD is 1, 2 and BNSD is 2, 1)"
    )
    return f"{use} for Colossal, which has no such limit{layout}"


@lru_cache(maxsize=256)
def _head_table(u: int, num_heads: int, num_kv_heads: int) -> HeadTable:
    """Give each of ``u`` Ulysses ranks its query heads and the KV heads that these need."""
    local = num_heads // u
    needed = [
        [h * num_kv_heads // num_heads for h in range(d * local, (d + 1) * local)] for d in range(u)
    ]
    sent = tuple(tuple(sorted(set(heads))) for heads in needed)
    index = tuple(
        tuple(received.index(h) for h in heads)
        for heads, received in zip(needed, sent, strict=True)
    )
    even = {len(received) for received in sent} == {len(sent[0])} and all(
        i * len(sent[0]) // local == j for row in index for i, j in enumerate(row)
    )
    shared_evenly = even and local % len(sent[0]) == 0
    return HeadTable(
        query=tuple((d * local, (d + 1) * local) for d in range(u)),
        kv_sent=sent,
        kv_expand=None if shared_evenly else index,
    )
