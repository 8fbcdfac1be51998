"""How K and V may be gathered, kept and streamed: what fits which plan; no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_cp.style_arguments import check_cross_attention
from hp_mesh.checks import divisors, require, require_positive

if TYPE_CHECKING:
    from hp_cp.plan import Plan

__all__ = [
    "backward_parts",
    "check_keep_kv",
    "check_kv_chunks",
    "check_streamed_style",
    "check_whole_kv",
    "described_kv_length",
]


def _gathering_degrees(plan: Plan) -> str:
    return " or ".join(map(str, divisors(plan.cp_size)[:-1]))


def check_keep_kv(plan: Plan, keep_kv: bool, *, where: str) -> None:
    """Refuse to gather K and V again in a plan that never gathers them."""
    require(
        keep_kv or plan.mode != "ulysses",
        where,
        f"keep_kv (False) must come with a gather of k and v, which ulysses_degree "
        f"({plan.ulysses_degree}) on {plan.cp_size} ranks does not do",
        f"leave keep_kv out, or use ulysses_degree={_gathering_degrees(plan)}",
    )


def check_kv_chunks(plan: Plan, kv_chunks: int, local_length: int | None, *, where: str) -> None:
    """Refuse parts of K and V that a plan does not gather, or has too few rows for.

    Args:
        plan: The plan.
        kv_chunks: Number of parts.
        local_length: Sequence length of a rank outside the boundary; None if it is not known yet.
        where: Start of an error message.
    """
    require_positive(where, "kv_chunks", kv_chunks)
    if kv_chunks == 1:
        return
    require(
        plan.mode != "ulysses",
        where,
        f"kv_chunks ({kv_chunks}) must come with a gather of k and v, which ulysses_degree "
        f"({plan.ulysses_degree}) on {plan.cp_size} ranks does not do",
        f"leave kv_chunks out, or use ulysses_degree={_gathering_degrees(plan)}",
    )
    require(
        not plan.load_balance,
        where,
        f"kv_chunks ({kv_chunks}) must be 1 with {plan.balance_option}, which calls the module "
        "twice: each call would gather every part again",
        "leave one of them out",
    )
    if local_length is None or plan.colossal_degree == 1:  # one rank gathers nothing
        return
    rows = local_length * plan.ulysses_degree
    require(
        kv_chunks <= rows,
        where,
        f"kv_chunks ({kv_chunks}) must be at most the rows of k that a rank passes on ({rows})",
        f"use kv_chunks={rows} or less",
    )


def check_whole_kv(plan: Plan, *, overlap: bool, where: str) -> None:
    """Refuse k and v that every rank has whole in a style that sends them as soon as they exist."""
    require(
        not overlap or plan.cp_size == 1,
        where,
        "k and v in AsyncContextParallel must be shards, which it sends as soon as they exist, and "
        "not whole (Replicate()) on the CP axis",
        "use ContextParallel, which sends q only, or redistribute them",
    )


def described_kv_length(
    plan: Plan,
    kv_seq_len: int,
    *,
    is_cross: bool,
    is_whole: bool,
    overlap: bool,
    kv_chunks: int,
    sliding_window: int | None,
    head_groups: int,
    where: str,
) -> int:
    """Return how many rows of K and V a rank comes with, or refuse what cannot be described."""
    check_cross_attention(
        where,
        is_cross,
        load_balance=plan.load_balance,
        kv_chunks=kv_chunks,
        sliding_window=sliding_window,
        balance_hybrid=False,  # a plan says both with load_balance
        head_groups=head_groups,
    )
    if not is_whole:
        return plan.split_length(kv_seq_len, where)
    plan.check_whole_kv(overlap=overlap, where=where)
    return require_positive(where, "kv_seq_len", kv_seq_len)


def backward_parts(kv_chunks: int, rows: int) -> int:
    """Return the number of parts of backward, which holds the gradients of K and V as well.

    Two parts of both are as much memory as two parts of K and V in forward.

    Args:
        kv_chunks: Number of parts of forward.
        rows: Rows of k that a rank passes on; no part is empty.
    """
    return min(2 * kv_chunks, rows)


def check_streamed_style(
    kv_chunks: int, *, use_local_input: bool, head_groups: int, overlap: bool, where: str
) -> None:
    """Refuse options of a style that ``kv_chunks`` greater than 1 does not go with."""
    require_positive(where, "kv_chunks", kv_chunks)
    if kv_chunks == 1:
        return
    require(
        not use_local_input,
        where,
        f"kv_chunks ({kv_chunks}) must be 1 with use_local_input=True, which would hand the module "
        "shards of k and v in place of the whole",
        "leave one of them out",
    )
    require(
        not overlap and head_groups == 1,
        where,
        f"kv_chunks ({kv_chunks}) must be 1 in AsyncContextParallel, which gathers k and v before "
        "attention asks for them",
        "use ContextParallel, whose gathers of one part overlap with the attention of another",
    )
