"""What an implementation of the operators offers, and what it is handed: checked arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hp_dsa.ops.rows import Rows

__all__ = ["AttentionInputs", "Gradients", "LossInputs", "Operators"]

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
"""``d_query_index, d_key_index, d_weights`` and the loss ``[1]``."""


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """What attention is given, on the rows of one call.

    Attributes:
        query: ``[.., N1, D]``.
        key: ``[.., 1, D]``.
        value: ``[.., 1, Dv]``; None where it is the key.
        sparse_indices: ``[.., 1, K]``.
        scale: Factor on the scores.
        rows: What the rows see.
        query_rope: ``[.., N1, Dr]``, or None.
        key_rope: ``[.., 1, Dr]``, or None.
        block_size: Keys that one index stands for.
    """

    query: Tensor
    key: Tensor
    value: Tensor | None
    sparse_indices: Tensor
    scale: float
    rows: Rows
    query_rope: Tensor | None
    key_rope: Tensor | None
    block_size: int


@dataclass(frozen=True, eq=False)
class LossInputs:
    """What both losses are given, on the rows of one call.

    Attributes:
        query: Attention's, ``[.., N1, D]``.
        key: Attention's, ``[.., N2, D]``; ``N2`` is 1 in the sparse loss.
        query_index: The indexer's, ``[.., N1i, Di]``.
        key_index: The indexer's, ``[.., 1, Di]``.
        weights: The indexer's, ``[.., N1i]``.
        softmax_max: Attention's statistics, ``[B, N2, S1, N1 / N2]`` or ``[N2, T1, N1 / N2]``.
        softmax_sum: As ``softmax_max``.
        scale: Attention's.
        rows: What the rows see.
        query_rope: Attention's, ``[.., N1, Dr]``, or None.
        key_rope: Attention's, ``[.., N2, Dr]``, or None.
    """

    query: Tensor
    key: Tensor
    query_index: Tensor
    key_index: Tensor
    weights: Tensor
    softmax_max: Tensor
    softmax_sum: Tensor
    scale: float
    rows: Rows
    query_rope: Tensor | None
    key_rope: Tensor | None

    @property
    def of_index(self) -> tuple[Tensor, Tensor, Tensor]:
        """What has a gradient: the indexer's query, key and weights."""
        return self.query_index, self.key_index, self.weights


class Operators(Protocol):
    """What an implementation offers, arguments checked before; `reference` says what each means."""

    def lightning_indexer(
        self,
        query: Tensor,
        key: Tensor,
        weights: Tensor,
        rows: Rows,
        sparse_count: int,
        return_value: bool,
    ) -> tuple[Tensor, Tensor]:
        """See `reference.lightning_indexer`."""

    def sparse_flash_attention(
        self, given: AttentionInputs, return_softmax_lse: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `reference.sparse_flash_attention`."""

    def sparse_kl_loss(
        self, given: LossInputs, sparse_indices: Tensor, gradients: bool
    ) -> Gradients:
        """See `reference.sparse_kl_loss`."""

    def dense_softmax_lse(
        self, query_index: Tensor, key_index: Tensor, weights: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """See `reference.dense_softmax_lse`."""

    def dense_kl_loss(
        self, given: LossInputs, index_statistics: tuple[Tensor, Tensor], gradients: bool
    ) -> Gradients:
        """See `reference.dense_kl_loss`."""
