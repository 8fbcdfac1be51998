"""Transformers' attention layers in the absorbed (latent) form, over the three boundaries.

transformers expands the latent to a key and a value of each head and masks what is not selected.
Here the expansion is moved to the other side of each product, so that all heads share one key::

    q . (W_uk c)  =  (W_uk^T q) . c            sum p (W_uv c)  =  W_uv (sum p c)

Parameters, projections, norms and rotary embeddings are transformers' own; only the order of the
products differs. `prepare_model` gives a layer these classes by ``__class__``, so that copies and
pickles of it know them by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

from hp_dsa.transformers.call import ModelCall
from hp_mesh.checks import fail

__all__ = [
    "AbsorbedAttention",
    "DeepseekV32AbsorbedAttention",
    "DeepseekV32IndexInputs",
    "GlmMoeDsaAbsorbedAttention",
    "GlmMoeDsaIndexInputs",
]

Rotary = tuple[Tensor, Tensor]
Rotate = Callable[..., tuple[Tensor, Tensor]]


def _rotated(rotate: Rotate, x: Tensor, rotary: Rotary) -> Tensor:
    """Return ``x`` ``[B, S, H, D]`` rotated by the model's own function, which takes two tensors.

    The second is empty, so that a key is ready before there is a query. In ``x``'s dtype: under
    autocast the angles are float32, and what is gathered should not be.
    """
    return rotate(x, x[:, :, :0], *rotary, unsqueeze_dim=2)[0].to(x.dtype)


class _IndexInputs(nn.Module):
    """An indexer that returns what it would score with, instead of scoring."""

    rotate: ClassVar[Rotate]
    wq_b: nn.Linear
    wk: nn.Linear
    k_norm: nn.LayerNorm
    weights_proj: nn.Linear
    n_heads: int
    head_dim: int
    qk_rope_head_dim: int
    softmax_scale: float

    def forward(
        self, hidden_states: Tensor, q_resid: Tensor, rotary: Rotary
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query ``[B, S, N, D]``, key ``[B, S, 1, D]`` and scaled weights ``[B, S, N]``."""
        projected = self.wk(hidden_states)
        key = self._rotated(self.k_norm(projected).unsqueeze(2), rotary).to(projected.dtype)
        query = self._rotated(self.wq_b(q_resid).unflatten(-1, (-1, self.head_dim)), rotary)
        weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype))
        weights = weights if weights.dtype == torch.float64 else weights.float()
        return query, key, weights * (self.n_heads**-0.5 * self.softmax_scale)

    def _rotated(self, x: Tensor, rotary: Rotary) -> Tensor:
        size = self.qk_rope_head_dim
        rotated = _rotated(type(self).rotate, x[..., :size], rotary)
        return torch.cat([rotated, x[..., size:]], dim=-1)


class AbsorbedAttention(nn.Module):
    """What the attention of both models has in common.

    The children that `prepare_model` adds: ``select_keys`` and ``indexer_loss`` (None in a layer
    that shares the selection of another), ``sparse_attention``; ``latent_ready``,
    ``key_rope_ready`` and ``key_index_ready``, behind which gathers may start.
    """

    hands_on_selection: ClassVar[bool]
    rotate: ClassVar[Rotate] = staticmethod(deepseek.apply_rotary_pos_emb_interleave)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Rotary,
        attention_mask: Tensor | None = None,
        *,
        prev_topk_indices: Tensor | None = None,
        hp_dsa_call: ModelCall | None = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Return ``(output [B, S, hidden], None)``, in GLM also the selection for the next layer.

        Args:
            hidden_states: This rank's rows, ``[B, S/P, hidden]``.
            position_embeddings: Cosine and sine of their positions, ``[1 or B, S/P, D]``.
            attention_mask: Not used: causality and documents are the operators' business.
            prev_topk_indices: The selection of the layer before, ``[.., 1, K]``.
            hp_dsa_call: The facts of the model call.
            **options: What else transformers passes down.
        """
        if hp_dsa_call is None:
            raise fail(
                type(self).__name__,
                "a prepared layer was called by itself and must be called by its model",
                "call the model that prepare_model returned",
            )
        layer: Any = self  # transformers' attributes
        # keys first: what follows overlaps with their gathers
        latent, key_rope = self._keys(hidden_states, position_embeddings)
        q_resid = layer.q_a_layernorm(layer.q_a_proj(hidden_states))
        index = self._index_inputs(hidden_states, q_resid, position_embeddings)
        up_key, up_value = self._up_projections()
        query, query_rope = self._queries(q_resid, position_embeddings, up_key)

        call, packed = hp_dsa_call, hp_dsa_call.packed
        topk = self._select(index, prev_topk_indices, query, call)
        attended, *statistics = layer.sparse_attention(
            *packed(query, latent, latent), topk, *packed(query_rope, key_rope), ends=call.ends
        )
        if index is not None and layer.indexer_loss is not None:
            detached = [x.detach() for x in packed(query, latent, query_rope, key_rope)]
            self._add_loss(detached, packed(*index), topk, statistics, call)
        output = torch.einsum("bshr,hvr->bshv", call.unpacked(attended), up_value)
        output = layer.o_proj(output.flatten(2))
        return (output, None, topk) if self.hands_on_selection else (output, None)

    def _keys(self, hidden_states: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        layer: Any = self
        sizes = [layer.kv_lora_rank, layer.qk_rope_head_dim]
        latent, key_rope = layer.kv_a_proj_with_mqa(hidden_states).split(sizes, dim=-1)
        normed = layer.kv_a_layernorm(latent).to(latent.dtype)  # float32 under autocast
        latent = layer.latent_ready(normed.unsqueeze(2))  # [B, S, 1, R]
        key_rope = _rotated(type(self).rotate, key_rope.unsqueeze(2), rotary)  # [B, S, 1, Dr]
        return latent, layer.key_rope_ready(key_rope)

    def _queries(self, q_resid: Tensor, rotary: Rotary, up_key: Tensor) -> tuple[Tensor, Tensor]:
        layer: Any = self
        heads = layer.q_b_proj(q_resid).unflatten(-1, (-1, layer.qk_head_dim))
        nope, rope = heads.split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], dim=-1)
        query = torch.einsum("bshd,hdr->bshr", nope, up_key)
        return query, _rotated(type(self).rotate, rope, rotary)

    def _up_projections(self) -> tuple[Tensor, Tensor]:
        """Return ``W_uk [H, D, R]`` and ``W_uv [H, Dv, R]``: views of ``kv_b_proj``'s weight."""
        layer: Any = self
        projection, weight = layer.kv_b_proj, layer.kv_b_proj.weight
        if type(projection) is not nn.Linear or isinstance(weight, DTensor):
            shown = "DTensor" if isinstance(weight, DTensor) else type(weight).__name__
            raise fail(
                type(self).__name__,
                f"kv_b_proj ({type(projection).__name__} with a {shown} weight) must be a "
                "torch.nn.Linear with a plain weight: its weight is multiplied into the queries",
                "apply fully_shard to the decoder layer, not to kv_b_proj; merge adapters, and "
                "leave tensor parallelism of attention off",
            )
        sizes = [layer.qk_nope_head_dim, layer.v_head_dim]
        up_key, up_value = weight.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)
        return up_key, up_value

    def _index_inputs(
        self, hidden_states: Tensor, q_resid: Tensor, rotary: Rotary
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the indexer's inputs, or None where a layer has none.

        Detached: the indexer learns from its own loss alone, the model from its own alone.
        """
        layer: Any = self
        if layer.indexer is None or (layer.select_keys is None and layer.indexer_loss is None):
            return None
        with torch.set_grad_enabled(torch.is_grad_enabled() and layer.indexer_loss is not None):
            query, key, weights = layer.indexer(hidden_states.detach(), q_resid.detach(), rotary)
            return query, layer.key_index_ready(key), weights

    def _select(
        self,
        index: tuple[Tensor, Tensor, Tensor] | None,
        previous: Tensor | None,
        query: Tensor,
        call: ModelCall,
    ) -> Tensor:
        """Return this layer's selection, ``[.., 1, K]``."""
        layer: Any = self
        if layer.sparse_attention.dense:
            (rows,) = call.packed(query)
            return torch.zeros((*rows.shape[:-2], 1, 1), dtype=torch.int32, device=query.device)
        if layer.select_keys is not None:
            assert index is not None, "a layer that selects has an indexer"
            return cast(Tensor, layer.select_keys(*call.packed(*index), ends=call.ends))
        if previous is None:
            raise fail(
                type(self).__name__,
                f"layer {layer.layer_idx} shares the selection of the layer before, which must "
                "have one",
                'let indexer_types begin with "full"',
            )
        return previous

    def _add_loss(
        self,
        attention: list[Tensor],
        index: tuple[Tensor, ...],
        topk: Tensor,
        statistics: list[Tensor],
        call: ModelCall,
    ) -> None:
        layer: Any = self
        query, key, query_rope, key_rope = attention
        selection = () if layer.sparse_attention.dense else (topk,)
        loss = layer.indexer_loss(
            query,
            key,
            *index,
            *selection,
            *statistics,
            query_rope=query_rope,
            key_rope=key_rope,
            ends=call.ends,
        )
        call.add(layer.layer_idx, loss)


class DeepseekV32IndexInputs(_IndexInputs, deepseek.DeepseekV32Indexer):
    """Rotates halves, unlike the attention that it belongs to."""

    rotate = staticmethod(deepseek.apply_rotary_pos_emb)


class GlmMoeDsaIndexInputs(_IndexInputs, glm.GlmMoeDsaIndexer):
    """Rotates pairs, as the attention that it belongs to does."""

    rotate = staticmethod(glm.apply_rotary_pos_emb_interleave)


class DeepseekV32AbsorbedAttention(AbsorbedAttention, deepseek.DeepseekV32Attention):
    """Every layer has an indexer."""

    hands_on_selection = False


class GlmMoeDsaAbsorbedAttention(AbsorbedAttention, glm.GlmMoeDsaAttention):
    """``indexer_types`` says which layers have an indexer; the others share its selection."""

    hands_on_selection = True
    rotate = staticmethod(glm.apply_rotary_pos_emb_interleave)
