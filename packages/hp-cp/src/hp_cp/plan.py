"""Every constraint of context parallelism, and the table that all modes are read from.

No torch here: `ContextParallel` raises what this file says, and `hp_tune` asks it what is valid.

A plan is a table, not a branch. CP rank ``r`` of ``P = c * u`` ranks sits at Colossal index
``r // u`` and Ulysses index ``r % u``; adjacent ranks form a Ulysses group::

    P = 4, u = 2      Ulysses groups  {0, 1} {2, 3}     exchange heads for sequence
                      Colossal groups {0, 2} {1, 3}     gather K and V

Ulysses (``u = P``), Colossal (``u = 1``) and Hybrid differ only in the rows and heads of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hp_cp.description import Description, describe
from hp_cp.gathers import (
    check_keep_kv,
    check_kv_chunks,
    check_streamed_style,
    check_whole_kv,
    described_kv_length,
)
from hp_cp.halo import check_window, check_window_arguments
from hp_cp.heads import HeadTable, check_groups, cut_heads, degrees_of
from hp_cp.style_arguments import check_degree
from hp_mesh.checks import divisors, fail, require, require_divisible, require_positive
from hp_mesh.window import AttentionWindow, Range, balanced_rows, contiguous_rows

__all__ = ["Mode", "Plan", "make_plan"]

Mode = Literal["ulysses", "colossal", "hybrid"]


@dataclass(frozen=True, slots=True)
class Plan:
    """Who computes which rows and heads; built by `make_plan`, which checks it.

    Attributes:
        cp_size: Number of CP ranks ``P``.
        ulysses_degree: Size ``u`` of a Ulysses group, resolved (never None).
        load_balance: Whether tails of Q are swapped so that causal work is equal on all ranks.
    """

    cp_size: int
    ulysses_degree: int
    load_balance: bool = False

    @property
    def colossal_degree(self) -> int:
        """Size ``c = P / u`` of a Colossal group."""
        return self.cp_size // self.ulysses_degree

    @property
    def mode(self) -> Mode:
        """``"colossal"`` for degree 1 (also on one rank), ``"ulysses"`` for ``P``, else hybrid."""
        if self.ulysses_degree == 1:
            return "colossal"
        return "ulysses" if self.ulysses_degree == self.cp_size else "hybrid"

    @property
    def length_multiple(self) -> int:
        """What must divide the global sequence length: ``P``, or when balanced ``2 P``.

        Halves are those of a Ulysses group's rows: where it has an even number of ranks, ``P`` is
        enough.
        """
        halves = self.load_balance and self.ulysses_degree % 2 == 1
        return 2 * self.cp_size if halves else self.cp_size

    @property
    def balance_option(self) -> str:
        """The option of the style that asks for load balance, as the user typed it."""
        return "balance_hybrid=True" if self.mode == "hybrid" else "load_balance=True"

    def coordinates(self, rank: int) -> tuple[int, int]:
        """Return ``(Colossal index, Ulysses index)`` of CP rank ``rank``."""
        require(0 <= rank < self.cp_size, "Plan", f"rank ({rank}) must be in [0, {self.cp_size})")
        return divmod(rank, self.ulysses_degree)

    def next_length(self, global_length: int) -> int:
        """Return the shortest valid global length of at least ``global_length``."""
        return -(-global_length // self.length_multiple) * self.length_multiple

    def check_length(self, local_length: int, where: str = "ContextParallel") -> None:
        """Refuse a local sequence length that this plan cannot cut further."""
        require_positive(where, "local sequence length", local_length)
        if local_length * self.cp_size % self.length_multiple:
            length = local_length * self.cp_size
            raise fail(
                where,
                f"local sequence length ({local_length}) must be even under {self.balance_option}, "
                f"that is, the global length ({length}) a multiple of 2 * cp_size "
                f"({self.length_multiple})",
                f"pad the sequence to {self.next_length(length)} with pad_sequence",
            )

    def split_length(self, global_length: int, where: str = "ContextParallel") -> int:
        """Return the local length of each rank, or refuse a length that does not divide."""
        require_positive(where, "sequence length", global_length)
        multiple = "cp_size" if self.length_multiple == self.cp_size else "2 * cp_size"
        require_divisible(
            where,
            "sequence length",
            global_length,
            multiple,
            self.length_multiple,
            f"pad the sequence to {self.next_length(global_length)} with pad_sequence",
        )
        return global_length // self.cp_size

    def rows(self, rank: int, seq_len: int) -> tuple[AttentionWindow, ...]:
        """Return what ``rank`` computes, one window per attention call (two when balanced)."""
        self.split_length(seq_len, "Plan")
        c, _ = self.coordinates(rank)
        if self.load_balance:
            ranges: tuple[Range, ...] = balanced_rows(c, self.colossal_degree, seq_len)
        else:
            ranges = (contiguous_rows(c, self.colossal_degree, seq_len),)
        return tuple(AttentionWindow(a, b - a, seq_len, seq_len) for a, b in ranges)

    def heads(
        self,
        num_heads: int,
        num_kv_heads: int,
        *,
        where: str = "ContextParallel",
        head_dim: int | None = None,
        shape: Sequence[int] | None = None,
        tp_size: int = 1,
    ) -> HeadTable:
        """Return the heads of every Ulysses rank, or refuse a count that does not divide.

        Query head ``h`` uses KV head ``h * num_kv_heads // num_heads``, so any number of KV heads
        works: where there are fewer than ranks, neighbours receive the same ones.

        Args:
            num_heads: Query heads that reach the CP exchange (after TP).
            num_kv_heads: Heads of K and of V (after TP).
            where: Start of an error message.
            head_dim: Dim that the counts were read from; named in the error.
            shape: Local shape of q; shown in the error, it makes a mixed-up layout visible.
            tp_size: Only for the error: how many TP ranks share the model's heads.
        """
        return cut_heads(
            self.cp_size,
            self.ulysses_degree,
            num_heads,
            num_kv_heads,
            where=where,
            head_dim=head_dim,
            shape=shape,
            tp_size=tp_size,
        )

    def check_head_groups(
        self,
        head_groups: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        where: str = "AsyncContextParallel",
    ) -> None:
        """Refuse a number of head groups that would part a query head from its KV head.

        Each group must hold whole runs of query heads with their KV heads, and as many query heads
        on each Ulysses rank.
        """
        check_groups(head_groups, self.ulysses_degree, num_heads, num_kv_heads, where=where)

    def check_keep_kv(self, keep_kv: bool, *, where: str = "ContextParallel") -> None:
        """Refuse to gather K and V again in a plan that never gathers them."""
        check_keep_kv(self, keep_kv, where=where)

    def check_kv_chunks(
        self, kv_chunks: int, local_length: int | None = None, *, where: str = "ContextParallel"
    ) -> None:
        """Refuse to gather K and V in parts where nothing is gathered, or in more than fit.

        Args:
            kv_chunks: Number of parts; they need not be equal.
            local_length: Sequence length of a rank, if it is known: no part may be empty.
            where: Start of an error message.
        """
        check_kv_chunks(self, kv_chunks, local_length, where=where)

    def check_whole_kv(self, *, overlap: bool, where: str = "ContextParallel") -> None:
        """Refuse K and V that every rank has whole where they are sent ahead (``overlap``)."""
        check_whole_kv(self, overlap=overlap, where=where)

    def check_window(
        self,
        sliding_window: int | None,
        sink_tokens: int = 0,
        *,
        where: str = "ContextParallel",
    ) -> None:
        """Refuse a window, of which only the keys are fetched, in a plan that gathers nothing."""
        check_window(self, sliding_window, sink_tokens, where=where)

    def valid_degrees(self, num_heads: int) -> list[int]:
        """Return the Ulysses degrees that ``num_heads`` query heads allow on this many ranks."""
        return degrees_of(self.cp_size, num_heads)

    def describe(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        seq_len: int,
        head_size: int,
        v_head_size: int | None = None,
        batch: int = 1,
        element_size: int = 2,
        rank: int = 0,
        overlap: bool = False,
        head_groups: int = 1,
        keep_kv: bool = True,
        kv_chunks: int = 1,
        sliding_window: int | None = None,
        sink_tokens: int = 0,
        kv_seq_len: int | None = None,
        kv_is_whole: bool = False,
    ) -> Description:
        """Return the collectives and bytes of one forward and backward on ``rank``.

        Args:
            num_heads: Query heads (after TP).
            num_kv_heads: Heads of K and of V (after TP).
            seq_len: Global sequence length ``S``, in tokens.
            head_size: Size ``D`` of a head of q and k.
            v_head_size: Size of a head of v and of the output; None means ``head_size``.
            batch: Number of sequences ``B``.
            element_size: Bytes of one element of q, k and v (one dtype).
            rank: CP rank; bytes differ between ranks where KV heads are shared unevenly.
            overlap: Count as `AsyncContextParallel` sends: q, k and v in a collective of their own.
            head_groups: Number of groups of heads that are exchanged and computed one by one.
            keep_kv: Whether the gathered K and V are kept for backward, or gathered again there.
            kv_chunks: Number of parts in which K and V are gathered while attention runs, forward
                and again in backward; then nothing gathered is kept.
            sliding_window: Keys that a query sees, its own included, where only those are fetched.
            sink_tokens: First keys that it sees as well.
            kv_seq_len: Length of the sequence of K and V, in tokens, if it is another one (cross
                attention); None means ``seq_len``.
            kv_is_whole: Whether every rank has all of K and V already (cross attention to
                ``Replicate()`` DTensors): they are not sent, and any length will do.
        """
        self.check_keep_kv(keep_kv, where="Plan.describe")
        self.check_window(sliding_window, sink_tokens, where="Plan.describe")
        check_window_arguments(
            "Plan.describe",
            sliding_window,
            sink_tokens,
            keep_kv=keep_kv,
            kv_chunks=kv_chunks,
            overlap=overlap or head_groups > 1,
        )
        self.check_kv_chunks(
            kv_chunks, self.split_length(seq_len, "Plan.describe"), where="Plan.describe"
        )
        check_streamed_style(
            kv_chunks,
            use_local_input=False,
            head_groups=head_groups,
            overlap=overlap,
            where="Plan.describe",
        )
        kv_length = described_kv_length(
            self,
            seq_len if kv_seq_len is None else kv_seq_len,
            is_cross=kv_seq_len is not None or kv_is_whole,
            is_whole=kv_is_whole,
            overlap=overlap,
            kv_chunks=kv_chunks,
            sliding_window=sliding_window,
            head_groups=head_groups,
            where="Plan.describe",
        )
        if head_groups != 1:
            self.check_head_groups(head_groups, num_heads, num_kv_heads, where="Plan.describe")
            num_heads, num_kv_heads = num_heads // head_groups, num_kv_heads // head_groups
        return describe(
            self,
            self.heads(num_heads, num_kv_heads, where="Plan.describe"),
            repeat=head_groups,
            num_heads=num_heads,
            local_length=self.split_length(seq_len, "Plan.describe"),
            kv_length=kv_length,
            kv_is_whole=kv_is_whole,
            head_size=head_size,
            v_head_size=head_size if v_head_size is None else v_head_size,
            batch=batch,
            element_size=element_size,
            rank=rank,
            overlap=overlap,
            keep_kv=keep_kv,
            kv_chunks=kv_chunks,
            sliding_window=sliding_window,
            sink_tokens=sink_tokens,
        )


def make_plan(
    cp_size: int,
    ulysses_degree: int | None = None,
    load_balance: bool = False,
    *,
    balance_hybrid: bool = False,
    where: str = "ContextParallel",
) -> Plan:
    """Return the plan of a degree on ``cp_size`` ranks, or say which constraint it breaks."""
    require_positive(where, "cp_size", cp_size)
    check_degree(where, ulysses_degree, load_balance, balance_hybrid)
    if ulysses_degree is not None:
        require_divisible(
            where,
            "cp_size",
            cp_size,
            "ulysses_degree",
            ulysses_degree,
            f"use a divisor of {cp_size}: {', '.join(map(str, divisors(cp_size)))}",
        )
    degree = cp_size if ulysses_degree is None else ulysses_degree
    require(
        not balance_hybrid or degree < cp_size,
        where,
        f"balance_hybrid (True) requires ulysses_degree ({degree}) below cp_size ({cp_size})",
        "leave balance_hybrid out: Ulysses ranks see the whole sequence and are balanced without",
    )
    return Plan(cp_size, degree, load_balance or balance_hybrid)
