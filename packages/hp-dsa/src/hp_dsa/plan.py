"""What a DSA style asks of its mesh and its data, and which rows each rank computes. No torch.

Queries stay where they are and keys are gathered ("colossal"). Three orders of the work::

    contiguous data                 rank r computes the rows it holds; a causal indexer then has
                                    2 - 1/P times the mean work on the last rank
    head-tail data, balanced        rank r holds and computes chunks r and 2P-1-r of 2P
    contiguous data, balanced       the indexer alone: rank r computes chunks 2r and 2(P-1-r)+1; the
                                    tail halves of its queries travel to the mirror rank and back
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from hp_dsa.description import Description, describe
from hp_mesh.checks import fail, nearest, require, require_divisible, require_positive
from hp_mesh.window import Range, balanced_rows, contiguous_rows, head_tail_rows

__all__ = ["DSAPlan", "Layout", "LossVariant", "Order", "make_plan"]

Layout = Literal["BSND", "TND"]
LossVariant = Literal["sparse", "dense"]
Order = Literal["contiguous", "head_tail"]

_SEQ_DIM = {"BSND": 1, "TND": 0}
_STATISTICS_DIM = {"BSND": 2, "TND": 1}  # [B, N2, S, G] and [N2, T, G]


@dataclass(frozen=True, slots=True)
class DSAPlan:
    """The resolved configuration of one style on one mesh.

    Attributes:
        cp_size: Number of CP ranks, ``P``.
        layout: ``"BSND"`` or ``"TND"``.
        load_balance: Whether each rank computes two chunks of equal causal work.
        order: How the data lies on the ranks.
    """

    cp_size: int
    layout: Layout = "BSND"
    load_balance: bool = False
    order: Order = "contiguous"

    @property
    def seq_dim(self) -> int:
        """Sequence dim of queries and keys."""
        return _SEQ_DIM[self.layout]

    @property
    def statistics_dim(self) -> int:
        """Sequence dim of the softmax statistics."""
        return _STATISTICS_DIM[self.layout]

    @property
    def ndim(self) -> int:
        """Number of dims of queries and keys."""
        return len(self.layout)

    @property
    def swaps_tails(self) -> bool:
        """Whether queries travel to the mirror rank: balance of data in natural order."""
        return self.load_balance and self.order == "contiguous"

    def rows(self, rank: int, length: int) -> tuple[Range, ...]:
        """Return the rows of the whole sequence that ``rank`` computes, one window each."""
        if not self.load_balance:
            return (contiguous_rows(rank, self.cp_size, length),)
        if self.order == "head_tail":
            return head_tail_rows(rank, self.cp_size, length)
        return balanced_rows(rank, self.cp_size, length)

    def multiple(self) -> int:
        """Return what the length of the whole sequence must be a multiple of."""
        return self.cp_size * (2 if self.load_balance else 1)

    def next_length(self, global_length: int) -> int:
        """Return the shortest valid length of a whole sequence of at least ``global_length``."""
        return -(-global_length // self.multiple()) * self.multiple()

    def check_length(self, local_length: int, where: str) -> None:
        """Refuse a shard that cannot be halved; all ranks have one length here."""
        total = local_length * self.cp_size
        require(
            not self.load_balance or local_length % 2 == 0,
            where,
            f"local sequence length ({local_length}) must be even with load_balance=True, which "
            "cuts it into a head and a tail",
            f"pad the sequence to {self.next_length(total)} with pad_sequence before it is cut",
        )

    def describe(
        self,
        *,
        seq_len: int,
        batch: int = 1,
        element_size: int = 2,
        latent: int = 512,
        rope: int = 64,
        index_dim: int = 128,
        index_heads: int = 64,
        topk: int = 2048,
        shared: bool = True,
        keep_keys: bool = True,
        rank: int = 0,
    ) -> Description:
        """Predict what one layer (indexer, attention and sparse loss) sends on one rank.

        Args:
            seq_len: Length of the whole sequence, ``S`` or ``T``.
            batch: Batch size; 1 for TND.
            element_size: Bytes of an element.
            latent: Size of key, which is value.
            rope: Size of ``key_rope``; 0 if there is none.
            index_dim: Size of an index key.
            index_heads: Heads of the indexer's query: what balance of natural-order data moves.
            topk: Entries of a row of indices, for the same.
            shared: Whether a `DSAGatherCache` is applied around the three.
            keep_keys: As in the styles.
            rank: CP rank.

        Raises:
            ValueError: If such a sequence cannot be cut for these ranks.
        """
        where = "DSAPlan.describe"
        require_positive(where, "seq_len", seq_len)
        require_divisible(
            where, "seq_len", seq_len, "what a rank's data is cut by", self.multiple()
        )
        require(
            rank in range(self.cp_size),
            where,
            f"rank ({rank}) must be one of {self.cp_size} CP ranks",
        )
        return describe(
            self,
            seq_len=seq_len,
            batch=batch,
            element_size=element_size,
            latent=latent,
            rope=rope,
            index_dim=index_dim,
            index_heads=index_heads,
            topk=topk,
            shared=shared,
            keep_keys=keep_keys,
            rank=rank,
        )


def make_plan(
    cp_size: int,
    *,
    layout: str = "BSND",
    mode: str = "colossal",
    load_balance: bool = False,
    order: str | None = None,
    where: str = "make_plan",
) -> DSAPlan:
    """Check a configuration and return its plan; ``where`` names who asks.

    Args:
        cp_size: Number of CP ranks.
        layout: ``"BSND"`` or ``"TND"``, in either case.
        mode: ``"colossal"``, the only one.
        load_balance: Whether to balance causal work.
        order: How the data lies. Default: ``"head_tail"`` with ``load_balance``, else
            ``"contiguous"``.
    """
    require_positive(where, "cp_size", cp_size)
    known = layout.upper() if isinstance(layout, str) else ""
    if known not in _SEQ_DIM:
        close = nearest(known, _SEQ_DIM)
        raise fail(
            where,
            f"layout ({layout!r}) must be 'BSND' or 'TND'",
            f"use {close!r}, or transpose to sequence before heads" if close else "",
        )
    require(
        mode == "colossal",
        where,
        f"mode ({mode!r}) must be 'colossal', the only mode of DSA: queries stay local and keys "
        "are gathered",
        "heads are few and share one key, so there is nothing to trade as Ulysses does",
    )
    require(
        isinstance(load_balance, bool),
        where,
        f"load_balance ({load_balance!r}) must be True or False",
    )
    if order is None:
        order = "head_tail" if load_balance else "contiguous"
    require(
        order in ("contiguous", "head_tail"),
        where,
        f"order ({order!r}) must be 'contiguous' or 'head_tail'",
    )
    require(
        load_balance or order == "contiguous",
        where,
        f"order ({order!r}) must be 'contiguous' without load_balance: a rank's rows would not be "
        "one window",
        "set load_balance=True, or shard the data with shard_sequence(order='contiguous')",
    )
    return DSAPlan(cp_size, cast(Layout, known), load_balance, cast(Order, order))
