"""Read a Hugging Face ``config.json`` without transformers, weights or network.

`hf_fields` has the aliases of each field, `hf_layers` says of which kind a layer is.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from hp_mesh.checks import nearest
from hp_tune.errors import TuneError, UsageError
from hp_tune.files import load_json, sha256
from hp_tune.models.hf_fields import (
    ACTIVE_EXPERTS,
    EXPERTS,
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    LONGEST,
    MLP,
    MOST,
    PREDICTION,
    Fields,
    text_config,
)
from hp_tune.models.hf_layers import layer_list, listed_layers, prediction_layer
from hp_tune.models.model import Attention, Model
from hp_tune.workload import Dtype

__all__ = ["model_from_config", "model_presets", "read_model"]

QK_NORM_FAMILIES = ("qwen3", "gemma3", "gemma4", "olmo2", "olmo3")
ENCODERS = ("bert", "roberta", "modernbert", "vit", "siglip")
DTYPES: dict[str, Dtype] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "float64": "fp64",
}
MOST_LAYERS = 10_000
SOURCE_KEY = "_source"
"""In presets only: where the numbers were read."""


def model_presets() -> dict[str, Path]:
    """Return the embedded configurations by name."""
    folder = Path(str(files("hp_tune") / "presets" / "models"))
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def read_model(source: str | Path) -> Model:
    """Return the model described by a preset name, a ``config.json`` or a folder that has one."""
    presets = {name.lower(): path for name, path in model_presets().items()}
    path = Path(source)
    if not path.exists():
        preset = presets.get(str(source).lower())
        if preset is None:
            close = nearest(str(source).lower(), presets)
            names = ", ".join(model_presets())
            raise UsageError(
                f"--model ({source}) must be a config.json, a folder with one, or a preset",
                f"did you mean {presets[close].stem}? presets: {names}" if close
                else f"presets: {names}",
            )  # fmt: skip
        return model_from_config(load_json(preset), preset.stem)
    if path.is_dir():
        folder, path = path, path / "config.json"
        if not path.exists():
            raise UsageError(f"--model ({folder}) must hold a config.json")
        return model_from_config(load_json(path), folder.resolve().name)
    return model_from_config(load_json(path), path.resolve().parent.name or path.stem)


def model_from_config(config: Mapping[str, Any], name: str) -> Model:
    """Return the model that ``config`` (a parsed ``config.json``) describes."""
    try:
        return _described(dict(config), name)
    except TuneError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, OverflowError) as error:
        # a list where others have a number, say: no family that is known writes it so
        said = str(error).strip().replace("\n", " ")
        raise UsageError(
            f"{name}: a field of its config.json must have a form that is known: {said}",
            "compare it with `hp-tune presets`, or with a model of its family",
        ) from None


def _described(config: dict[str, Any], name: str) -> Model:
    source = str(config.pop(SOURCE_KEY, ""))
    text, where = text_config(config)
    fields = Fields(text, name)
    family = str(text.get("model_type", config.get("model_type", "unknown")))
    heads = fields.required("query heads", HEADS)
    hidden = fields.required("hidden size", HIDDEN)
    layers = fields.required("layers", LAYERS, listed_layers(text))
    extra = fields.optional(PREDICTION) or 0
    fields.stop_if_missing(family)
    if layers + extra > MOST_LAYERS:
        raise UsageError(f"{name}: layers ({layers + extra}) must be at most {MOST_LAYERS}")
    base = _attention(fields, text, heads, hidden)
    specs = layer_list(fields, family, layers, base)
    specs += [prediction_layer(fields, specs, base)] * extra
    unique: dict[Attention, Attention] = {}
    specs = [unique.setdefault(layer, layer) for layer in specs]  # equal layers are one object
    for layer in unique:
        _check_heads(fields, layer.num_heads, layer.num_kv_heads)
    if text.get("is_encoder_decoder"):
        fields.notes.append("encoder-decoder: only the decoder's self-attention is described")
    if text.get("sparse_attention_config"):
        fields.notes.append("block-sparse attention is described as full")
    return Model(
        name=name,
        model_type=family,
        hidden_size=hidden,
        layers=tuple(specs),
        **_mlp(fields, text, layers),
        vocab_size=fields.optional(("vocab_size", "padded_vocab_size")),
        tied_embeddings=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings"))),
        causal=not (family in ENCODERS or text.get("is_causal") is False),
        qk_norm=_qk_norm(text, family),
        max_length=_max_length(fields, text),
        dtype=_dtype(text, config),
        num_prediction_layers=extra,
        config_path=where,
        notes=tuple(fields.notes),
        source=source,
        digest=sha256(config),
    )


def _attention(fields: Fields, text: Mapping[str, Any], heads: int, hidden: int) -> Attention:
    index: dict[str, Any] = {
        "index_topk": fields.size(("index_topk",)),
        "index_heads": fields.size(("index_n_heads",)),
        "index_head_size": fields.size(("index_head_dim",)),
    }
    gate = text.get("attn_output_gate") is True or text.get("mla_use_output_gate") is True
    if text.get("kv_lora_rank") is not None:  # MLA: head_dim, where present, is the rope part
        nope = fields.required("no-position head size", ("qk_nope_head_dim",))
        rope = fields.required("rope head size", ("qk_rope_head_dim",))
        v = fields.required("value head size", ("v_head_dim",))
        latent = fields.required("latent size", ("kv_lora_rank",))
        if index["index_topk"] is not None:
            fields.required("indexer heads", ("index_n_heads",))
            fields.required("indexer head size", ("index_head_dim",))
        fields.stop_if_missing("MLA")
        return Attention(
            num_heads=heads,
            num_kv_heads=heads,
            head_size=nope + rope,
            v_head_size=v,
            latent_size=latent + rope,
            rope_size=rope,
            q_latent_size=fields.optional(("q_lora_rank",)) or None,
            output_gate=gate,
            **index,
        )
    size = fields.size(HEAD_SIZE)
    if size is None:
        if hidden % heads:
            raise UsageError(
                f"{fields.name}: hidden size ({hidden}) must be divisible by heads ({heads}) "
                f"when no head size is given",
                f"set one of {', '.join(HEAD_SIZE)}",
            )
        size = hidden // heads
    return Attention(
        num_heads=heads,
        num_kv_heads=_kv_heads(fields, text, heads),
        head_size=size,
        v_head_size=fields.optional(("v_head_dim",)) or size,
        q_latent_size=fields.optional(("q_lora_rank",)) or None,
        output_gate=gate,
        **index,
    )


def _kv_heads(fields: Fields, text: Mapping[str, Any], heads: int) -> int:
    kv = fields.optional(KV_HEADS)
    if kv is None and text.get("multi_query_attention"):  # ChatGLM
        kv = fields.optional(("multi_query_group_num",)) or 1
    if kv is None and text.get("multi_query"):  # Falcon, StarCoder
        kv = 1
    if not kv:
        if not isinstance(text.get("block_configs"), list):
            fields.notes.append(f"no number of KV heads is given: {heads} assumed (MHA)")
        return heads
    _check_heads(fields, heads, kv)
    return kv


def _check_heads(fields: Fields, heads: int, kv: int) -> None:
    if heads % kv:
        raise UsageError(f"{fields.name}: heads ({heads}) must be divisible by KV heads ({kv})")


def _qk_norm(text: Mapping[str, Any], family: str) -> bool:
    said = [text[key] for key in ("use_qk_norm", "qk_layernorm", "qk_norm") if key in text]
    return bool(said[0]) if said else family.startswith(QK_NORM_FAMILIES)


def _dtype(text: Mapping[str, Any], config: Mapping[str, Any]) -> Dtype:
    for where in (text, config):
        said = where.get("dtype") or where.get("torch_dtype")
        if said is not None:
            return DTYPES.get(str(said).removeprefix("torch."), "bf16")
    return "bf16"


def _mlp(fields: Fields, text: Mapping[str, Any], layers: int) -> dict[str, Any]:
    dense = fields.optional(MLP)
    experts = fields.optional(EXPERTS)
    if not experts:
        return {"mlp_size": dense, "active_mlp_size": dense}
    each = fields.optional(("moe_intermediate_size", "expert_intermediate_size")) or dense
    if each is None:
        return {}
    active = fields.optional(ACTIVE_EXPERTS) or 1
    shared = (fields.optional(("n_shared_experts", "num_shared_experts")) or 0) * each
    shared = fields.optional(("shared_expert_intermediate_size",)) or shared
    if any(text.get(key) for key in ("moe_latent_size", "routed_expert_hidden_size")):
        fields.notes.append("experts work in a latent space: parameters are not estimated")
        return {"active_mlp_size": each * active + shared}
    first = fields.optional(("first_k_dense_replace",)) or 0
    every = text.get("moe_layer_freq")
    if isinstance(every, list):
        first = sum(not entry for entry in every[:layers])
    return {
        "mlp_size": each * experts + shared,
        "active_mlp_size": each * active + shared,
        "dense_mlp_size": fields.optional(("dense_intermediate_size",)) or dense,
        "num_dense_layers": min(first, layers),
    }


def _max_length(fields: Fields, text: Mapping[str, Any]) -> int | None:
    longest = fields.optional(LONGEST)
    scaling = text.get("rope_scaling") or text.get("rope_parameters")
    if longest is None or not isinstance(scaling, Mapping):
        return longest
    if isinstance(scaling.get("full_attention"), Mapping):  # one entry per kind of layer
        scaling = scaling["full_attention"]
    factor = scaling.get("factor")
    if factor is None:
        return longest
    if not isinstance(factor, int | float) or isinstance(factor, bool) or not 0 < factor < MOST:
        raise UsageError(
            f"{fields.name}: factor ({factor!r}) of the rope must be a positive number"
        )
    key = "original_max_position_embeddings"
    original = fields.whole(key, scaling.get(key) or longest)
    return max(longest, int(original * factor))
