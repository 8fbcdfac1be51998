"""A DSA layer in sparse training: indexer, attention on the latent and the indexer's loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hp_dsa.cores import IndexerLoss, SelectKeys, SparseAttention
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
        scale = parts.shape.head_size**-0.5
        self.indexer = SelectKeys(self.layout, parts.shape.index_topk or 1)
        self.attention = SparseAttention(self.layout, scale)
        self.loss = IndexerLoss(self.layout, scale)
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
        ends = [total] if self.layout == "TND" else None

        if shape.has_indexer:
            indices = self.indexer(index_query, index_key, weights, ends)
        else:
            indices = self._given(x, positions)
        out, top, summed = self.attention(
            query, latent, latent, indices, query_rope, key_rope, ends
        )
        loss = None
        if shape.has_indexer:
            loss = self.loss(
                query.detach(), latent.detach(), index_query, index_key, weights, indices,
                top, summed, query_rope.detach(), key_rope.detach(), ends,
            )  # fmt: skip
        v_up = parts.v_up.weight.view(H, shape.v_head_size, parts.latent)
        return parts.o_proj(torch.einsum("...hl,hvl->...hv", out, v_up).flatten(-2)), loss

    def _given(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return what another layer's indexer might have chosen: keys spread over the past."""
        topk = self.parts.shape.index_topk or 1
        seen = positions[:, None] + 1
        step = torch.arange(topk, device=x.device)[None, :]
        chosen = torch.where(seen >= topk, step * seen // topk, step)
        chosen = torch.where(chosen < seen, chosen, -1).to(torch.int32).unsqueeze(1)  # [L, 1, topk]
        return chosen if self.layout == "TND" else chosen.expand(x.shape[0], *chosen.shape)
