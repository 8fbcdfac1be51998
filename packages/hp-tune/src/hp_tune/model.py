"""What the tuner knows of a model: one attention description per layer, and a few sizes.

Build one with `hp_tune.read_model`, from a Hugging Face ``config.json``, a folder or a preset.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Attention", "LayerKind", "Model"]

LayerKind = Literal["full", "sliding", "linear"]


class Attention(BaseModel):
    """The attention of one layer.

    Attributes:
        kind: ``"linear"`` layers have no K/V to exchange; context parallelism does not touch them.
        num_heads: Query heads, before tensor parallelism.
        num_kv_heads: Heads of K and V as attention sees them (MLA: after the up-projection).
        head_size: Size of a head of q and k.
        v_head_size: Size of a head of v and of the output.
        window: Tokens that a sliding layer sees, its own included.
        latent_size: MLA: features per token that K and V are computed from.
        index_topk: DSA: keys that the indexer selects per query.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: LayerKind = "full"
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_size: int = Field(ge=1)
    v_head_size: int = Field(ge=1)
    window: int | None = Field(default=None, ge=1)
    latent_size: int | None = Field(default=None, ge=1)
    index_topk: int | None = Field(default=None, ge=1)


class Model(BaseModel):
    """A model as the cost model needs it.

    Attributes:
        layers: One `Attention` per layer, prediction heads (MTP) last.
        mlp_size: Width of the MLP, or what all experts of a layer sum up to.
        active_mlp_size: Width that one token meets; differs from ``mlp_size`` with experts.
        max_length: Longest sequence that the model was made for, after rope scaling.
        qk_norm: Whether q and k are normalised after their projections; then the norm, not the
            projection, is what an asynchronous exchange may start from.
        config_path: Where in the JSON the text model was found, ``""`` for the root.
        notes: What was assumed while reading, one sentence each.
        digest: sha256 of the configuration that was read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    model_type: str
    hidden_size: int = Field(ge=1)
    layers: tuple[Attention, ...] = Field(min_length=1)
    mlp_size: int | None = None
    active_mlp_size: int | None = None
    vocab_size: int | None = None
    tied_embeddings: bool = False
    causal: bool = True
    qk_norm: bool = False
    max_length: int | None = None
    dtype: Literal["bf16", "fp16", "fp32", "fp64"] = "bf16"
    config_path: str = ""
    notes: tuple[str, ...] = ()
    digest: str = ""

    @property
    def layer_groups(self) -> tuple[tuple[Attention, int], ...]:
        """Each distinct layer with how often it occurs, in order of first occurrence."""
        return tuple(Counter(self.layers).items())

    @property
    def parameters(self) -> int | None:
        """Estimate of the number of parameters; None when the MLP or vocabulary is unknown."""
        if self.mlp_size is None or self.vocab_size is None:
            return None
        total = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        for layer in self.layers:
            heads = layer.num_heads * (layer.head_size + layer.v_head_size)
            kv = layer.num_kv_heads * (layer.head_size + layer.v_head_size)
            if layer.latent_size is not None:
                kv = layer.latent_size
            total += self.hidden_size * (heads + kv + 3 * self.mlp_size)
        return total
