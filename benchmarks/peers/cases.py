"""What is measured: one shape a case, and the order of contenders in a round."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["HEADS", "RANKS", "SEQS", "Case", "cases", "shuffled"]

T = TypeVar("T")

RANKS = 4
SEQS = (2048, 4096, 8192)
HEADS = ("8:8", "8:2", "8:1")
ELEMENT_SIZE = 4
"""Everything is fp32: differences to the oracle are then errors, not rounding."""


@dataclass(frozen=True)
class Case:
    """One shape, sharded over ``ranks`` along the sequence.

    Attributes:
        seq: Global sequence length ``S``.
        heads: Query heads.
        kv_heads: Key and value heads.
        causal: Whether the mask is causal.
        head_size: ``D``.
        batch: ``B``.
        ranks: ``P``.
    """

    seq: int
    heads: int
    kv_heads: int
    causal: bool
    head_size: int = 64
    batch: int = 1
    ranks: int = RANKS

    @property
    def local_seq(self) -> int:
        """Rows of one rank."""
        return self.seq // self.ranks

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of the whole sequence, the ``A`` of the formulas."""
        return self.batch * self.seq * self.head_size * ELEMENT_SIZE

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"S{self.seq}-H{self.heads}:{self.kv_heads}-D{self.head_size}-P{self.ranks}-{mask}"


def cases(
    seqs: Sequence[int] = SEQS,
    heads: Sequence[str] = HEADS,
    causal: Sequence[bool] = (True, False),
) -> Iterator[Case]:
    """Yield every combination; heads as ``"8:2"``, query then key and value heads."""
    for seq in seqs:
        for pair in heads:
            query, _, kv = pair.partition(":")
            for mask in causal:
                yield Case(seq, int(query), int(kv or query), mask)


def shuffled(items: Sequence[T], seed: int) -> list[T]:
    """Return ``items`` in an order drawn by ``seed``, so that no one always follows the same one.

    What ran before leaves its caches and its freed memory; turning the order would not change that.
    """
    return random.Random(seed).sample(items, len(items))
