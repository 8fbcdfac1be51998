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
from functools import lru_cache
from typing import Literal

from hp_cp.description import Description, describe
from hp_mesh.checks import divisors, fail, require, require_divisible, require_positive
from hp_mesh.window import AttentionWindow, Range, balanced_rows, contiguous_rows

__all__ = [
    "HeadTable",
    "Mode",
    "Plan",
    "check_style_arguments",
    "make_plan",
    "resolve_dims",
]

Mode = Literal["ulysses", "colossal", "hybrid"]


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
        """What must divide the global sequence length: ``P``, or ``2 P`` when balanced."""
        return 2 * self.cp_size if self.load_balance else self.cp_size

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
        if self.load_balance and local_length % 2:
            length = local_length * self.cp_size
            raise fail(
                where,
                f"local sequence length ({local_length}) must be even under load_balance=True, "
                f"that is, the global length ({length}) a multiple of 2 * cp_size "
                f"({self.length_multiple})",
                f"pad the sequence to {self.next_length(length)} with pad_sequence",
            )

    def split_length(self, global_length: int, where: str = "ContextParallel") -> int:
        """Return the local length of each rank, or refuse a length that does not divide."""
        require_positive(where, "sequence length", global_length)
        multiple = "2 * cp_size" if self.load_balance else "cp_size"
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
            ranges: tuple[Range, ...] = balanced_rows(rank, self.cp_size, seq_len)
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
        u = self.ulysses_degree
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
                self._way_out(num_heads, head_dim),
            )
        require(
            num_kv_heads <= num_heads,
            where,
            f"num_kv_heads ({num_kv_heads}) of k, v must be at most num_heads ({num_heads}) of q",
            "check the order of q, k, v (qkv_indices, qkv_kwarg_names)",
        )
        return _head_table(u, num_heads, num_kv_heads)

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
        require_positive(where, "head_groups", head_groups)
        unit, u = head_groups * self.ulysses_degree, self.ulysses_degree
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

    def check_keep_kv(self, keep_kv: bool, *, where: str = "ContextParallel") -> None:
        """Refuse to gather K and V again in a plan that never gathers them."""
        require(
            keep_kv or self.mode != "ulysses",
            where,
            f"keep_kv (False) must come with a gather of k and v, which ulysses_degree "
            f"({self.ulysses_degree}) on {self.cp_size} ranks does not do",
            f"leave keep_kv out, or use ulysses_degree="
            f"{' or '.join(map(str, divisors(self.cp_size)[:-1]))}",
        )

    def valid_degrees(self, num_heads: int) -> list[int]:
        """Return the Ulysses degrees that ``num_heads`` query heads allow on this many ranks."""
        return [u for u in divisors(self.cp_size) if num_heads % u == 0]

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
        """
        self.check_keep_kv(keep_kv, where="Plan.describe")
        if head_groups != 1:
            self.check_head_groups(head_groups, num_heads, num_kv_heads, where="Plan.describe")
            num_heads, num_kv_heads = num_heads // head_groups, num_kv_heads // head_groups
        return describe(
            self,
            self.heads(num_heads, num_kv_heads, where="Plan.describe"),
            repeat=head_groups,
            num_heads=num_heads,
            local_length=self.split_length(seq_len, "Plan.describe"),
            head_size=head_size,
            v_head_size=head_size if v_head_size is None else v_head_size,
            batch=batch,
            element_size=element_size,
            rank=rank,
            overlap=overlap,
            keep_kv=keep_kv,
        )

    def _way_out(self, num_heads: int, head_dim: int | None) -> str:
        degrees = [str(u) for u in reversed(self.valid_degrees(num_heads)) if u > 1]
        use = (
            f"use ulysses_degree={' or '.join(degrees)}, or 1"
            if degrees
            else "use ulysses_degree=1"
        )
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


def make_plan(
    cp_size: int,
    ulysses_degree: int | None = None,
    load_balance: bool = False,
    *,
    where: str = "ContextParallel",
) -> Plan:
    """Return the plan of a degree on ``cp_size`` ranks, or say which constraint it breaks."""
    require_positive(where, "cp_size", cp_size)
    _check_degree(where, ulysses_degree, load_balance)
    if ulysses_degree is not None:
        require_divisible(
            where,
            "cp_size",
            cp_size,
            "ulysses_degree",
            ulysses_degree,
            f"use a divisor of {cp_size}: {', '.join(map(str, divisors(cp_size)))}",
        )
    return Plan(cp_size, cp_size if ulysses_degree is None else ulysses_degree, load_balance)


def check_style_arguments(
    where: str,
    *,
    ulysses_degree: int | None,
    load_balance: bool,
    seq_dim: int,
    head_dim: int,
) -> None:
    """Refuse what a constructor can know to be wrong, before there is a mesh or a tensor."""
    _check_degree(where, ulysses_degree, load_balance)
    for name, dim in (("seq_dim", seq_dim), ("head_dim", head_dim)):
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise fail(
                where, f"{name} ({dim!r}) must be an integer", "BSHD is seq_dim=1, head_dim=2"
            )
    require(
        seq_dim != head_dim,
        where,
        f"seq_dim ({seq_dim}) must differ from head_dim ({head_dim})",
        "BSHD is seq_dim=1, head_dim=2 and BNSD is seq_dim=2, head_dim=1",
    )
    require(
        seq_dim != -1,
        where,
        "seq_dim (-1) must not be the last dim, which holds the head size",
        "BSHD is seq_dim=1, head_dim=2",
    )
    require(
        head_dim != -1 or ulysses_degree == 1,
        where,
        "head_dim (-1) must not be the last dim, which holds the head size",
        "BSHD is seq_dim=1, head_dim=2; ulysses_degree=1 needs no head dim",
    )


def resolve_dims(
    where: str, ndim: int, seq_dim: int, head_dim: int, *, needs_heads: bool = True
) -> tuple[int, int]:
    """Return ``(seq_dim, head_dim)`` counted from 0 for a tensor of ``ndim`` dims, or refuse them.

    With ``needs_heads=False`` (Colossal on ``[B, S, H*D]``) ``head_dim`` may name anything.
    """
    layouts = "BSHD is seq_dim=1, head_dim=2, BNSD 2, 1, TND 0, 1"
    resolved = []
    for name, dim in (("seq_dim", seq_dim), ("head_dim", head_dim)):
        required = name == "seq_dim" or needs_heads
        require(
            not required or -ndim <= dim < ndim,
            where,
            f"{name} ({dim}) must be a dim of a {ndim}-D tensor",
            layouts,
        )
        index = dim % ndim if -ndim <= dim < ndim else dim
        require(
            not required or index != ndim - 1,
            where,
            f"{name} ({dim}) must not be the last dim ({ndim}-D tensor), which holds the head size",
            layouts,
        )
        resolved.append(index)
    seq, head = resolved
    require(
        not needs_heads or seq != head,
        where,
        f"seq_dim ({seq_dim}) must differ from head_dim ({head_dim}): both are dim {seq} "
        f"of a {ndim}-D tensor",
        layouts,
    )
    return seq, head


def _check_degree(where: str, ulysses_degree: int | None, load_balance: bool) -> None:
    if ulysses_degree is not None:
        require_positive(
            where, "ulysses_degree", ulysses_degree, "use None for Ulysses over all CP ranks"
        )
    require(
        isinstance(load_balance, bool),
        where,
        f"load_balance ({load_balance!r}) must be True or False",
    )
    require(
        not load_balance or ulysses_degree == 1,
        where,
        f"load_balance (True) requires ulysses_degree=1, not ulysses_degree ({ulysses_degree})",
        "set ulysses_degree=1, or leave load_balance off: "
        "Ulysses ranks see the whole sequence and are balanced without it",
    )
