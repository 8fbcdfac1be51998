"""Which kind of attention each layer has, in the many ways in which configurations say it.

The order of precedence: a list per layer (``layer_types`` and its spellings), a list of blocks, the
numbers of the full layers, an interval, and last a window for all layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hp_tune.errors import UsageError
from hp_tune.models.hf_fields import Fields
from hp_tune.models.model import Attention, LayerKind

__all__ = ["layer_list", "listed_layers", "prediction_layer"]

WINDOW_OFF_BY_DEFAULT = ("qwen2", "qwen3")
LISTS = ("layer_types", "layers_block_type", "hybrid_layer_pattern")
KINDS: dict[str, LayerKind] = {
    "full_attention": "full",
    "attention": "full",
    "hybrid": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "linear",
    "recurrent": "linear",
    "mamba": "linear",
    "conv": "linear",
    "moe": "none",
    "mlp": "none",
}
LETTERS: dict[str, LayerKind] = {"*": "full", "M": "linear", "-": "none", "E": "none"}


def listed_layers(text: Mapping[str, Any]) -> int | None:
    """Return the number of layers as the length of a list, where one is given."""
    for key in (*LISTS, "block_configs", "hybrid_override_pattern"):
        if isinstance(text.get(key), list | str):
            return len(text[key])
    return None


def layer_list(fields: Fields, family: str, layers: int, base: Attention) -> list[Attention]:
    """Return the attention of each layer; ``base`` is that of a full one."""
    window = _window(fields, family)
    blocks = fields.listed("block_configs")
    if blocks is not None:
        _check_length(fields, "block_configs", blocks, layers)
        return [_block(fields, base, block) for block in blocks[:layers]]
    ratios = fields.listed("compress_ratios")
    if ratios is not None:
        _check_length(fields, "compress_ratios", ratios, layers)
        found = [fields.whole("compress_ratios", ratio) for ratio in ratios[:layers]]
        return [_compressed(base, ratio, window) for ratio in found]
    kinds = _kinds(fields, family, layers, window)
    return _shared_indexers(fields, [_of_kind(fields, base, kind, window) for kind in kinds])


def prediction_layer(fields: Fields, layers: Sequence[Attention], base: Attention) -> Attention:
    """Return the attention of a prediction head (MTP): that of a full layer, unless listed."""
    ratios = fields.listed("compress_ratios")
    if ratios is not None:
        own = ratios[len(layers)] if len(ratios) > len(layers) else 0
        return _compressed(base, fields.whole("compress_ratios", own), layers[-1].window)
    return next((layer for layer in reversed(layers) if layer.kind == "full"), base)


def _window(fields: Fields, family: str) -> int | None:
    slides = fields.config.get("use_sliding_window")
    if slides is None:
        slides = not family.startswith(WINDOW_OFF_BY_DEFAULT)
    if not isinstance(slides, bool):
        raise UsageError(f"{fields.name}: use_sliding_window ({slides!r}) must be true or false")
    if not slides:
        return None
    return fields.optional(("sliding_window", "sliding_window_size", "attention_chunk_size"))


def _kinds(fields: Fields, family: str, layers: int, window: int | None) -> list[LayerKind]:
    for key in LISTS:
        named = fields.listed(key)
        if named is not None:
            _check_length(fields, key, named, layers)
            return [_named_kind(fields, entry) for entry in named[:layers]]
    letters = fields.listed("hybrid_override_pattern", (str, list))
    if letters is not None:
        _check_length(fields, "hybrid_override_pattern", letters, layers)
        return [_letter(fields, letter) for letter in letters[:layers]]
    linear = fields.group("linear_attn_config") or {}
    numbers = linear.get("full_attn_layers")
    if numbers is not None:
        key = "linear_attn_config.full_attn_layers"
        if not isinstance(numbers, list):
            raise UsageError(f"{fields.name}: {key} ({numbers!r}) must be a list")
        full = {fields.whole(key, number, 1) for number in numbers}  # counted from 1
        return ["full" if index + 1 in full else "linear" for index in range(layers)]
    types = fields.listed("attn_type_list")
    if types is not None:  # MiniMax-01: 1 is softmax attention
        _check_length(fields, "attn_type_list", types, layers)
        return ["full" if entry == 1 else "linear" for entry in types[:layers]]
    interval = fields.optional(("full_attention_interval",))
    if interval:
        return ["linear" if (i + 1) % interval else "full" for i in range(layers)]
    every = fields.optional(("attn_layer_period",))  # Jamba: attention in every n-th layer
    if every:
        offset = fields.optional(("attn_layer_offset",)) or 0
        return ["full" if i % every == offset else "linear" for i in range(layers)]
    if family.startswith("llama4") and window:
        return _llama4(fields, layers)
    return _windowed(fields, family, layers, window)


def _llama4(fields: Fields, layers: int) -> list[LayerKind]:
    listed = fields.listed("no_rope_layers") or []
    every = fields.optional(("no_rope_layer_interval",)) or 4
    rope = listed if len(listed) >= layers else [(i + 1) % every for i in range(layers)]
    return ["chunked" if entry else "full" for entry in rope[:layers]]


def _windowed(fields: Fields, family: str, layers: int, window: int | None) -> list[LayerKind]:
    # every n-th layer is full in gemma's and cohere's pattern; qwen2's first ones are
    period = fields.optional(("sliding_window_pattern",))
    period = 2 if period is None and family == "gemma2" else period
    first = fields.optional(("max_window_layers",)) or 0
    return [
        "sliding" if window and (not period or (i + 1) % period) and i >= first else "full"
        for i in range(layers)
    ]


def _named_kind(fields: Fields, entry: object) -> LayerKind:
    if entry in (0, 1):
        return "sliding" if entry else "full"
    kind = KINDS.get(str(entry))
    if kind is None:
        raise UsageError(
            f"{fields.name}: layer type ({entry!r}) is unknown", f"known: {', '.join(KINDS)}"
        )
    return kind


def _letter(fields: Fields, letter: object) -> LayerKind:
    kind = LETTERS.get(str(letter))
    if kind is None:
        raise UsageError(
            f"{fields.name}: letter {letter!r} of hybrid_override_pattern is unknown",
            f"known: {' '.join(LETTERS)}",
        )
    return kind


def _of_kind(fields: Fields, base: Attention, kind: LayerKind, window: int | None) -> Attention:
    if kind in ("sliding", "chunked"):
        if not window:
            return base
        sinks = fields.optional(("sink_tokens",)) if kind == "sliding" else None
        own = {"window": window, "sink_tokens": sinks or 0, **_swa(fields)}
        return base.model_copy(update={"kind": kind, **own})
    if kind == "full":  # gemma4: full layers have heads of their own
        other = {
            "head_size": fields.optional(("global_head_dim",)),
            "v_head_size": fields.optional(("global_head_dim",)),
            "num_kv_heads": fields.optional(("num_global_key_value_heads",)),
        }
        return base.model_copy(update={key: size for key, size in other.items() if size})
    return base.model_copy(update={"kind": kind})


def _swa(fields: Fields) -> dict[str, int]:
    """Return what sliding layers have of their own (MiMo-V2's ``swa_`` fields)."""
    found = {
        "num_heads": fields.optional(("swa_num_attention_heads",)),
        "num_kv_heads": fields.optional(("swa_num_key_value_heads",)),
        "head_size": fields.optional(("swa_head_dim",)),
        "v_head_size": fields.optional(("swa_v_head_dim", "swa_head_dim")),
    }
    return {key: size for key, size in found.items() if size}


def _block(fields: Fields, base: Attention, block: object) -> Attention:
    """Read one entry of a searched architecture (Nemotron NAS): group size, or no attention."""
    found = block.get("attention") or {} if isinstance(block, Mapping) else None
    if not isinstance(found, Mapping):
        raise UsageError(
            f"{fields.name}: entries of block_configs ({block!r}) must be objects, and what "
            "they say of attention too"
        )
    if found.get("no_op"):
        return base.model_copy(update={"kind": "none"})
    if found.get("replace_with_linear"):
        return base.model_copy(update={"kind": "linear"})
    changes: dict[str, Any] = {}
    group = fields.whole("n_heads_in_group", found.get("n_heads_in_group") or 0)
    if group:
        if base.num_heads % group:
            raise UsageError(
                f"{fields.name}: heads ({base.num_heads}) must be divisible by "
                f"n_heads_in_group ({group})"
            )
        changes["num_kv_heads"] = base.num_heads // group
    window = fields.whole("window_length", found.get("window_length") or 0)
    if window:
        changes |= {"kind": "sliding", "window": window}
    return base.model_copy(update=changes)


def _compressed(base: Attention, ratio: int, window: int | None) -> Attention:
    """Describe a layer of DeepSeek-V4: a window, and keys that stand for ``ratio`` tokens each."""
    if ratio == 0:
        plain = {"index_topk": None, "index_heads": None, "index_head_size": None}
        kind = "sliding" if window else "full"
        return base.model_copy(update={"kind": kind, "window": window, **plain})
    return base.model_copy(update={"kind": "compressed", "compression": ratio, "window": window})


def _shared_indexers(fields: Fields, layers: list[Attention]) -> list[Attention]:
    """Mark the layers that take the selection of an earlier one (GLM-5.2)."""
    types = fields.listed("indexer_types")
    if types is None:
        return layers
    return [
        layer.model_copy(update={"has_indexer": kind != "shared"})
        for layer, kind in zip(layers, [*types, *["full"] * len(layers)], strict=False)
    ]


def _check_length(fields: Fields, key: str, listed: Sequence[object], layers: int) -> None:
    if len(listed) < layers:
        raise UsageError(f"{fields.name}: {key} has {len(listed)} entries for {layers} layers")
