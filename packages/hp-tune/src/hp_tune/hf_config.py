"""Read a Hugging Face ``config.json`` without transformers, weights or network.

Families spell the same thing in many ways; each field below has its list of aliases in the order
they are tried. Keys are never searched recursively: a vision tower has heads too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from hp_mesh.checks import nearest
from hp_tune.errors import UsageError
from hp_tune.files import load_json, sha256
from hp_tune.model import Attention, LayerKind, Model
from hp_tune.workload import Dtype

__all__ = ["model_from_config", "model_presets", "read_model"]

NESTED = (
    ("text_config",),
    ("llm_config",),
    ("language_config",),
    ("thinker_config", "text_config"),
)
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEAD_SIZE = ("head_dim", "kv_channels", "attention_head_dim")
MLP = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim")
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
QK_NORM_FAMILIES = ("qwen3", "gemma3", "gemma4", "olmo2", "olmo3")
WINDOW_OFF_BY_DEFAULT = ("qwen2", "qwen3")
ENCODERS = ("bert", "roberta", "modernbert", "vit", "siglip")
DTYPES: dict[str, Dtype] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
}
LAYER_TYPES: dict[str, LayerKind] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "sliding",
    "linear_attention": "linear",
    "mamba": "linear",
}


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
    text, where = _text_config(config)
    fields = _Fields(text, name)
    family = str(text.get("model_type", config.get("model_type", "unknown")))
    heads = fields.integer("query heads", HEADS)
    hidden = fields.integer("hidden size", HIDDEN)
    layers = fields.integer("layers", LAYERS, default=_listed_layers(text))
    fields.stop_if_missing(family)
    assert heads is not None
    assert hidden is not None
    assert layers is not None
    base = _attention(fields, text, heads, hidden)
    kinds = list(_layer_kinds(fields, text, family, layers))
    specs = [_with_kind(base, kind, window) for kind, window in kinds]
    extra = fields.integer("prediction heads", ("num_nextn_predict_layers",), default=0) or 0
    specs += [base] * extra
    if text.get("is_encoder_decoder"):
        fields.notes.append("encoder-decoder: only the decoder's self-attention is described")
    mlp, active = _mlp(fields, text)
    return Model(
        name=name,
        model_type=family,
        hidden_size=hidden,
        layers=tuple(specs),
        mlp_size=mlp,
        active_mlp_size=active,
        vocab_size=fields.integer("vocabulary", ("vocab_size",), default=None, optional=True),
        tied_embeddings=bool(text.get("tie_word_embeddings", False)),
        causal=not (family in ENCODERS or text.get("is_causal") is False),
        qk_norm=bool(text.get("use_qk_norm", family.startswith(QK_NORM_FAMILIES))),
        max_length=_max_length(fields, text),
        dtype=DTYPES.get(str(text.get("dtype") or text.get("torch_dtype")), "bf16"),
        config_path=where,
        notes=tuple(fields.notes),
        digest=sha256(config),
    )


class _Fields:
    """Look up a field by its aliases; remember what was missing and what was assumed."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config = config
        self.name = name
        self.missing: list[str] = []
        self.notes: list[str] = []

    def integer(
        self,
        what: str,
        aliases: tuple[str, ...],
        *,
        default: int | None = None,
        optional: bool = False,
    ) -> int | None:
        """Return the first alias that is set, as an integer (``28.0`` is 28)."""
        for alias in aliases:
            value = self.config.get(alias)
            if value is None:
                continue
            whole = isinstance(value, int | float) and not isinstance(value, bool)
            if not whole or value != int(value) or value < 0:
                raise UsageError(f"{self.name}: {alias} ({value!r}) must be a whole number")
            return int(value)
        if default is None and not optional:
            self.missing.append(f"{what} (tried {', '.join(aliases)})")
        return default

    def stop_if_missing(self, family: str) -> None:
        """Raise one error that lists every missing field with the aliases tried."""
        if self.missing:
            raise UsageError(
                f"{self.name}: model_type {family!r} lacks {'; '.join(self.missing)}",
                "add the field to the config.json, or use one of a known family",
            )


def _text_config(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    if config.get("num_attention_heads") is None:
        for path in NESTED:
            inner: Any = config
            for key in path:
                inner = inner.get(key) if isinstance(inner, Mapping) else None
            if isinstance(inner, Mapping):
                return inner, ".".join(path)
    return config, ""


def _listed_layers(text: Mapping[str, Any]) -> int | None:
    for key in ("layer_types", "block_configs"):
        if isinstance(text.get(key), list):
            return len(text[key])
    return None


def _attention(fields: _Fields, text: Mapping[str, Any], heads: int, hidden: int) -> Attention:
    if text.get("kv_lora_rank") is not None:  # MLA: head_dim, where present, is the rope part
        nope = fields.integer("no-position head size", ("qk_nope_head_dim",))
        rope = fields.integer("rope head size", ("qk_rope_head_dim",))
        v = fields.integer("value head size", ("v_head_dim",))
        latent = fields.integer("latent size", ("kv_lora_rank",))
        fields.stop_if_missing("MLA")
        topk = fields.integer("index_topk", ("index_topk",), optional=True)
        assert None not in (nope, rope, v, latent)
        return Attention(
            num_heads=heads,
            num_kv_heads=heads,
            head_size=(nope or 0) + (rope or 0),
            v_head_size=v or 0,
            latent_size=(latent or 0) + (rope or 0),
            index_topk=topk,
        )
    size = fields.integer("head size", HEAD_SIZE, optional=True)
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
        v_head_size=fields.integer("value head size", ("v_head_dim",), default=size) or size,
    )


def _kv_heads(fields: _Fields, text: Mapping[str, Any], heads: int) -> int:
    kv = fields.integer("KV heads", KV_HEADS, optional=True)
    if kv is None and text.get("multi_query_attention"):  # ChatGLM
        kv = fields.integer("KV heads", ("multi_query_group_num",), default=1)
    if kv is None and text.get("multi_query"):  # Falcon, StarCoder
        kv = 1
    if not kv:
        fields.notes.append(f"no number of KV heads is given: {heads} assumed (MHA)")
        return heads
    if kv > heads or heads % kv:
        raise UsageError(f"{fields.name}: heads ({heads}) must be divisible by KV heads ({kv})")
    return kv


def _layer_kinds(
    fields: _Fields, text: Mapping[str, Any], family: str, layers: int
) -> Iterator[tuple[LayerKind, int | None]]:
    off = family.startswith(WINDOW_OFF_BY_DEFAULT)
    uses_window = text.get("use_sliding_window", not off) is not False
    window = (
        fields.integer("window", ("sliding_window", "attention_chunk_size"), optional=True)
        if uses_window
        else None
    )
    listed = text.get("layer_types") or text.get("hybrid_layer_pattern")
    if listed is not None and len(listed) < layers:
        raise UsageError(
            f"{fields.name}: layer_types has {len(listed)} entries for {layers} layers"
        )
    # every n-th layer is full: gemma's pattern for windows, qwen3-next's interval for linear layers
    period = fields.integer("pattern", ("sliding_window_pattern",), optional=True)
    period = 2 if period is None and family == "gemma2" else period
    interval = fields.integer("interval", ("full_attention_interval",), optional=True)
    first_window = fields.integer("window layers", ("max_window_layers",), default=0) or 0
    for index in range(layers):
        kind: LayerKind = "full"
        if listed is not None:
            kind = _named_kind(fields, listed[index])
        elif interval:
            kind = "full" if (index + 1) % interval == 0 else "linear"
        elif window and (period is None or (index + 1) % period):
            kind = "sliding" if index >= first_window else "full"
        if kind == "sliding" and not window:
            kind = "full"
        yield kind, window if kind == "sliding" else None


def _named_kind(fields: _Fields, entry: object) -> LayerKind:
    if entry in (0, 1):
        return "sliding" if entry else "full"
    kind = LAYER_TYPES.get(str(entry))
    if kind is None:
        raise UsageError(
            f"{fields.name}: layer type ({entry!r}) is unknown", f"known: {', '.join(LAYER_TYPES)}"
        )
    return kind


def _with_kind(base: Attention, kind: LayerKind, window: int | None) -> Attention:
    return base if kind == "full" else base.model_copy(update={"kind": kind, "window": window})


def _mlp(fields: _Fields, text: Mapping[str, Any]) -> tuple[int | None, int | None]:
    dense = fields.integer("MLP", MLP, optional=True)
    experts = fields.integer("experts", EXPERTS, optional=True)
    if not experts:
        return dense, dense
    each = fields.integer("expert MLP", ("moe_intermediate_size",), default=dense) or dense
    active = fields.integer("active experts", ("num_experts_per_tok",), default=1) or 1
    fields.notes.append("experts: every layer is taken to have all of them (parameter estimate)")
    return (None, None) if each is None else (each * experts, each * active)


def _max_length(fields: _Fields, text: Mapping[str, Any]) -> int | None:
    longest = fields.integer(
        "longest sequence", ("max_position_embeddings", "seq_length", "n_positions"), optional=True
    )
    scaling = text.get("rope_scaling") or text.get("rope_parameters")
    if longest is None or not isinstance(scaling, Mapping):
        return longest
    factor = scaling.get("factor")
    if not isinstance(factor, int | float):
        return longest
    original = scaling.get("original_max_position_embeddings")
    return max(longest, int((original or longest) * factor))
