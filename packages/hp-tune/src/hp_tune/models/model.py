"""What the tuner knows of a model: one attention description per layer, and a few sizes.

Build one with `hp_tune.read_model`, from a Hugging Face ``config.json``, a folder or a preset.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Attention", "LayerKind", "Model"]

LayerKind = Literal["full", "sliding", "chunked", "compressed", "linear", "none"]


class Attention(BaseModel):
    """The attention of one layer.

    Attributes:
        kind: ``"sliding"``: a token sees the last ``window``; ``"chunked"``: those of its own
            block of ``window``; ``"compressed"``: a window, and summaries of ``compression`` tokens
            each. ``"linear"`` layers have no K/V to exchange and ``"none"`` no attention: context
            parallelism does not touch either.
        num_heads: Query heads, before tensor parallelism.
        num_kv_heads: Heads of K and V as attention sees them (MLA: after the up-projection).
        head_size: Size of a head of q and k.
        v_head_size: Size of a head of v and of the output.
        window: Tokens that a sliding layer sees, its own included, or size of a chunk.
        sink_tokens: First tokens of the sequence that a sliding layer sees beside its window.
        compression: Tokens behind one compressed key.
        latent_size: MLA: features per token that K and V are computed from, the rope part included.
        rope_size: MLA: features of the latent that carry the position and are shared by all heads.
        q_latent_size: MLA: features that q is computed from; None for one projection.
        index_topk: DSA: keys that the indexer selects per query.
        index_heads: DSA: query heads of the indexer.
        index_head_size: DSA: size of these, and of the one index key.
        has_indexer: DSA: False where the layer takes the selection of an earlier one.
        output_gate: Whether attention's output is multiplied by a gate, projected like q.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: LayerKind = "full"
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_size: int = Field(ge=1)
    v_head_size: int = Field(ge=1)
    window: int | None = Field(default=None, ge=1)
    sink_tokens: int = Field(default=0, ge=0)
    compression: int | None = Field(default=None, ge=1)
    latent_size: int | None = Field(default=None, ge=1)
    rope_size: int = Field(default=0, ge=0)
    q_latent_size: int | None = Field(default=None, ge=1)
    index_topk: int | None = Field(default=None, ge=1)
    index_heads: int | None = Field(default=None, ge=1)
    index_head_size: int | None = Field(default=None, ge=1)
    has_indexer: bool = True
    output_gate: bool = False

    @property
    def exchanges(self) -> bool:
        """Whether context parallelism has anything to do in this layer."""
        return self.kind not in ("linear", "none")

    @property
    def slides(self) -> bool:
        """Whether a token sees the keys of a window, which a style can fetch without a gather."""
        return self.kind == "sliding" and self.window is not None

    @property
    def is_sparse(self) -> bool:
        """Whether this is DSA: the styles of hp_dsa apply, not those of hp_cp."""
        return self.index_topk is not None and self.latent_size is not None

    def describe(self) -> str:
        """Return the layer in one line, such as ``full: 32 heads, 8 KV heads, head size 128``."""
        if not self.exchanges:
            return f"{self.kind}: not touched by context parallelism"
        size = f"{self.head_size}"
        if self.v_head_size != self.head_size:
            size += f" (v {self.v_head_size})"
        words = [
            f"{self.kind}: {self.num_heads} heads",
            f"{self.num_kv_heads} KV heads",
            f"head size {size}",
        ]
        words += [f"window {self.window}"] if self.window else []
        words += [f"{self.sink_tokens} sink tokens"] if self.sink_tokens else []
        words += [f"one key per {self.compression} tokens"] if self.compression else []
        words += [f"latent {self.latent_size}"] if self.latent_size else []
        if self.index_topk:
            own = f"{self.index_heads} index heads" if self.has_indexer else "indices of another"
            words.append(f"top {self.index_topk} of {own}")
        return ", ".join(words)

    def parameters(self, hidden: int) -> int:
        """Return the parameters of the projections, for a model of width ``hidden``."""
        heads, size, v = self.num_heads, self.head_size, self.v_head_size
        if self.kind == "none":
            return 0
        q = hidden * heads * size
        if self.q_latent_size is not None:
            q = self.q_latent_size * (hidden + heads * size)
        kv = hidden * self.num_kv_heads * (size + v)
        if self.latent_size is not None:
            latent = self.latent_size - self.rope_size
            kv = hidden * self.latent_size + latent * heads * (size - self.rope_size + v)
        gate = hidden * heads * v if self.output_gate else 0
        index = 0
        if self.is_sparse and self.has_indexer and self.index_heads and self.index_head_size:
            source = self.q_latent_size or hidden
            index = source * self.index_heads * self.index_head_size
            index += hidden * (self.index_head_size + self.index_heads)
        return q + kv + gate + index + hidden * heads * v


class Model(BaseModel):
    """A model as the cost model needs it.

    Attributes:
        layers: One `Attention` per layer, prediction heads (MTP) last.
        mlp_size: Width of the MLP, or what all experts of a layer sum up to.
        active_mlp_size: Width that one token meets; differs from ``mlp_size`` with experts.
        dense_mlp_size: Width in the layers of a model of experts that have none.
        num_dense_layers: How many these are.
        max_length: Longest sequence that the model was made for, after rope scaling.
        qk_norm: Whether q and k are normalised after their projections; then the norm, not the
            projection, is what an asynchronous exchange may start from.
        num_prediction_layers: How many of ``layers`` are prediction heads (MTP).
        config_path: Where in the JSON the text model was found, ``""`` for the root.
        notes: What was assumed while reading, one sentence each.
        source: Where a preset's numbers were read.
        digest: sha256 of the configuration that was read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    model_type: str
    hidden_size: int = Field(ge=1)
    layers: tuple[Attention, ...] = Field(min_length=1)
    mlp_size: int | None = None
    active_mlp_size: int | None = None
    dense_mlp_size: int | None = None
    num_dense_layers: int = 0
    vocab_size: int | None = None
    tied_embeddings: bool = False
    causal: bool = True
    qk_norm: bool = False
    max_length: int | None = None
    dtype: Literal["bf16", "fp16", "fp32", "fp64"] = "bf16"
    num_prediction_layers: int = 0
    config_path: str = ""
    notes: tuple[str, ...] = ()
    source: str = ""
    digest: str = ""

    @property
    def layer_groups(self) -> tuple[tuple[Attention, int], ...]:
        """Each distinct layer with how often it occurs, in order of first occurrence."""
        objects = {id(layer): layer for layer in self.layers}  # few: equal layers are often one
        found: dict[Attention, int] = {}
        for key, count in Counter(map(id, self.layers)).items():
            found[objects[key]] = found.get(objects[key], 0) + count
        return tuple(found.items())

    @property
    def parameters(self) -> int | None:
        """Estimate of the number of parameters; None when the MLP or vocabulary is unknown."""
        if self.mlp_size is None or self.vocab_size is None:
            return None
        total = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        total += sum(n * a.parameters(self.hidden_size) for a, n in self.layer_groups)
        blocks = len(self.layers) - self.num_dense_layers
        dense = self.num_dense_layers * (self.dense_mlp_size or self.mlp_size)
        return total + 3 * self.hidden_size * (blocks * self.mlp_size + dense)
