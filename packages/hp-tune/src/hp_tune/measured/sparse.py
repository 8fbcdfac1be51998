"""A DSA layer in sparse training: indexer, attention on the latent and the indexer's loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hp_dsa import ops
from hp_mesh.handoff import Handoff
from hp_tune.measured.dense import linear
from hp_tune.measured.request import LayerShape

__all__ = ["SparseLayer", "SparseParts"]


class SparseParts(nn.Module):
    """The projections of a layer, with K's and V's absorbed into those of q and the output."""

    def __init__(self, hidden: int, shape: LayerShape, like: Tensor) -> None:
        super().__init__()
        self.shape = shape
        assert shape.latent_size is not None, "a sparse layer has latent keys"
        H, source = shape.num_heads, shape.q_latent_size
        self.latent = shape.latent_size - shape.rope_size
        self.q_down = linear(hidden, source, like) if source else None
        self.q_proj = linear(source or hidden, H * shape.head_size, like)
        self.kv_down = linear(hidden, shape.latent_size, like)
        # one matrix per head: [latent, nope] and [latent, v]
        self.k_up = linear(shape.nope_size * H, self.latent, like)
        self.v_up = linear(self.latent, H * shape.v_head_size, like)
        self.o_proj = linear(H * shape.v_head_size, hidden, like)
        self.index_key = linear(hidden, shape.index_head_size, like)
        self.index_query = linear(source or hidden, shape.index_heads * shape.index_head_size, like)
        self.index_weights = linear(hidden, shape.index_heads, like)


class _Indexer(nn.Module):
    def __init__(self, shape: LayerShape, layout: str) -> None:
        super().__init__()
        self.shape, self.layout = shape, layout

    def forward(self, query: Tensor, key: Tensor, weights: Tensor, **lengths: Any) -> Any:
        indices, _ = ops.lightning_indexer(
            query, key, weights, layout_query=self.layout, layout_key=self.layout,
            sparse_count=self.shape.index_topk or 1, **lengths,
        )  # fmt: skip
        return indices


class _Attention(nn.Module):
    def __init__(self, shape: LayerShape, layout: str) -> None:
        super().__init__()
        self.shape, self.layout = shape, layout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        topk_indices: Tensor,
        query_rope: Tensor,
        key_rope: Tensor,
        **lengths: Any,
    ) -> Any:
        return ops.sparse_flash_attention(
            query, key, value, topk_indices, self.shape.head_size**-0.5,
            query_rope=query_rope, key_rope=key_rope, layout_query=self.layout,
            layout_kv=self.layout, attention_mode=2, return_softmax_lse=True, **lengths,
        )  # fmt: skip


class _Loss(nn.Module):
    def __init__(self, shape: LayerShape, layout: str) -> None:
        super().__init__()
        self.shape, self.layout = shape, layout

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
        **lengths: Any,
    ) -> Any:
        return ops.sparse_lightning_indexer_kl_loss(
            query, key, query_index, key_index, weights, topk_indices, softmax_max, softmax_sum,
            self.shape.head_size**-0.5, query_rope=query_rope, key_rope=key_rope,
            layout=self.layout, **lengths,
        )  # fmt: skip


class SparseLayer(nn.Module):
    """One layer under one configuration.

    Attributes:
        indexer, attention, loss: What the three styles are put on.
        handoffs: Where the latent, its rotary part and the index key are final.
    """

    def __init__(self, parts: SparseParts, layout: str) -> None:
        super().__init__()
        self.parts = parts
        self.layout = "TND" if layout == "TND" else "BSND"
        self.indexer = _Indexer(parts.shape, self.layout)
        self.attention = _Attention(parts.shape, self.layout)
        self.loss = _Loss(parts.shape, self.layout)
        names = ("latent", "rope", "index_key")
        self.handoffs = nn.ModuleDict({name: Handoff() for name in names})

    def forward(self, x: Tensor, positions: Tensor, total: int) -> tuple[Tensor, Tensor | None]:
        """Return output and the indexer's loss of ``[B, L, hidden]`` or ``[T, hidden]``.

        Args:
            x: This rank's rows.
            positions: Where they lie in the sequence, ``[L]``.
            total: Tokens of the whole sequence.
        """
        parts, shape = self.parts, self.parts.shape
        H, nope, rope = shape.num_heads, shape.nope_size, shape.rope_size
        source = x if parts.q_down is None else parts.q_down(x)
        hidden = x.detach()  # the indexer learns from its own loss alone
        index_key = self.handoffs["index_key"](parts.index_key(hidden).unsqueeze(-2))
        latent, key_rope = parts.kv_down(x).unsqueeze(-2).split([parts.latent, rope], -1)
        latent = self.handoffs["latent"](latent)
        key_rope = self.handoffs["rope"](key_rope)
        q, query_rope = parts.q_proj(source).unflatten(-1, (H, nope + rope)).split([nope, rope], -1)
        k_up = parts.k_up.weight.view(parts.latent, H, nope)
        query = torch.einsum("...hn,lhn->...hl", q, k_up)
        index_query = parts.index_query(source.detach()).unflatten(-1, (shape.index_heads, -1))
        weights = parts.index_weights(hidden)

        if shape.has_indexer:
            lengths = self._lengths("actual_seq_lengths_query", "actual_seq_lengths_key", total, x)
            indices = self.indexer(index_query, index_key, weights, **lengths)
        else:
            indices = self._given(x, positions)
        lengths = self._lengths("actual_seq_lengths_query", "actual_seq_lengths_kv", total, x)
        out, top, summed = self.attention(
            query, latent, latent, indices, query_rope, key_rope, **lengths
        )
        loss = None
        if shape.has_indexer:
            lengths = self._lengths("actual_seq_qlen", "actual_seq_klen", total, x)
            loss = self.loss(
                query.detach(), latent.detach(), index_query, index_key, weights, indices,
                top, summed, query_rope=query_rope.detach(), key_rope=key_rope.detach(), **lengths,
            )  # fmt: skip
        v_up = parts.v_up.weight.view(H, shape.v_head_size, parts.latent)
        return parts.o_proj(torch.einsum("...hl,hvl->...hv", out, v_up).flatten(-2)), loss

    def _lengths(self, query: str, key: str, total: int, x: Tensor) -> dict[str, Any]:
        if self.layout != "TND":
            return {}
        return {query: [total], key: torch.tensor([total], dtype=torch.int32, device=x.device)}

    def _given(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return what another layer's indexer might have chosen: keys spread over the past."""
        topk = self.parts.shape.index_topk or 1
        seen = positions[:, None] + 1
        step = torch.arange(topk, device=x.device)[None, :]
        chosen = torch.where(seen >= topk, step * seen // topk, step)
        chosen = torch.where(chosen < seen, chosen, -1).to(torch.int32).unsqueeze(1)  # [L, 1, topk]
        return chosen if self.layout == "TND" else chosen.expand(x.shape[0], *chosen.shape)
