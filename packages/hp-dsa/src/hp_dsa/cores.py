"""The three boundaries of a DSA layer, as modules that a style can be applied to.

No parameters and no state: each calls its operator as one does on one device. ``ends`` are the
cumulative ends of packed documents (``"TND"``) in the whole sequence, None for ``"BSND"``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from hp_dsa import ops

__all__ = ["DenseIndexerLoss", "IndexerLoss", "SelectKeys", "SparseAttention"]

Ends = Sequence[int] | None


class _Core(nn.Module):
    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout

    def extra_repr(self) -> str:
        return f"layout={self.layout!r}"


class SelectKeys(_Core):
    """Which keys each query attends to, given what the indexer has projected."""

    def __init__(self, layout: str, count: int) -> None:
        super().__init__(layout)
        self.count = count

    def forward(self, query: Tensor, key: Tensor, weights: Tensor, ends: Ends = None) -> Tensor:
        """Return int32 indices ``[.., 1, K]``.

        Args:
            query: The indexer's, ``[.., N, D]``.
            key: The indexer's, ``[.., 1, D]``.
            weights: The indexer's, ``[.., N]``.
            ends: Of packed documents.
        """
        indices, _ = ops.lightning_indexer(
            query,
            key,
            weights,
            layout_query=self.layout,
            layout_key=self.layout,
            actual_seq_lengths_query=ends,
            actual_seq_lengths_key=ends,
            sparse_count=self.count,
        )
        return indices


class SparseAttention(_Core):
    """Attention in the latent, over the selected keys, or over all that a row sees (``dense``)."""

    def __init__(self, layout: str, scale: float, dense: bool = False) -> None:
        super().__init__(layout)
        self.scale, self.dense = scale, dense

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        topk_indices: Tensor,
        query_rope: Tensor,
        key_rope: Tensor,
        ends: Ends = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output ``[.., H, R]`` and the softmax statistics, maximum and sum.

        Args:
            query: In the latent, ``[.., H, R]``.
            key: The latent, ``[.., 1, R]``.
            value: The latent once more.
            topk_indices: int32 ``[.., 1, K]``. With ``dense``, zeros ``[.., 1, 1]``: the one block
                of all keys.
            query_rope: ``[.., H, Dr]``.
            key_rope: ``[.., 1, Dr]``.
            ends: Of packed documents.
        """
        return ops.sparse_flash_attention(
            query,
            key,
            value,
            topk_indices,
            self.scale,
            query_rope=query_rope,
            key_rope=key_rope,
            actual_seq_lengths_query=ends,
            actual_seq_lengths_kv=ends,
            sparse_block_size=key.shape[-3] if self.dense else 1,
            layout_query=self.layout,
            layout_kv=self.layout,
            attention_mode=2,
            return_softmax_lse=True,
        )


class IndexerLoss(_Core):
    """The KL divergence of the indexer from attention, over the selected keys."""

    def __init__(self, layout: str, scale: float) -> None:
        super().__init__(layout)
        self.scale = scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        query_index: Tensor,
        key_index: Tensor,
        weights: Tensor,
        topk_indices: Tensor,
        softmax_max: Tensor,
        softmax_sum: Tensor,
        query_rope: Tensor,
        key_rope: Tensor,
        ends: Ends = None,
    ) -> Tensor:
        """Return ``[1]``, a sum over rows; the arguments are those of the two other cores."""
        return ops.sparse_lightning_indexer_kl_loss(
            query,
            key,
            query_index,
            key_index,
            weights,
            topk_indices,
            softmax_max,
            softmax_sum,
            self.scale,
            query_rope=query_rope,
            key_rope=key_rope,
            actual_seq_qlen=ends,
            actual_seq_klen=ends,
            layout=self.layout,
        )


class DenseIndexerLoss(IndexerLoss):
    """The KL divergence of the indexer from attention, over all visible keys."""

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        query_index: Tensor,
        key_index: Tensor,
        weights: Tensor,
        softmax_max: Tensor,
        softmax_sum: Tensor,
        *,
        query_rope: Tensor,
        key_rope: Tensor,
        ends: Ends = None,
    ) -> Tensor:
        """Return ``[1]``, a sum over rows; as `IndexerLoss`, without indices."""
        index = (query_index, key_index, weights)
        statistics = ops.dense_lightning_indexer_softmax_lse(
            *index, layout=self.layout, actual_seq_qlen=ends, actual_seq_klen=ends
        )
        return ops.dense_lightning_indexer_kl_loss(
            query,
            key,
            *index,
            softmax_max,
            softmax_sum,
            *statistics,
            self.scale,
            query_rope=query_rope,
            key_rope=key_rope,
            actual_seq_qlen=ends,
            actual_seq_klen=ends,
            layout=self.layout,
        )
