"""What a call of a context-parallel model can't mean: refused by name, before any data moves."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hp_comm.model_call import (
    asks_for_attentions,
    check_logits_to_keep,
    read_cu_seq_lens,
    tokens_of,
)
from hp_mesh.checks import fail, require, require_type

__all__ = ["check_call", "check_rotary"]


def check_call(
    model: PreTrainedModel, named: dict[str, Any], cp_size: int, where: str
) -> dict[str, object]:
    """Refuse what has no meaning for a shard; return the shapes that must agree on all ranks."""
    name = str(model.config._attn_implementation)
    require(
        name.startswith("hp_cp_"),
        where,
        f"the attention implementation ({name}) must be one of hp_cp_sdpa, hp_cp_eager: core_"
        "attention would not be called",
        f'model.set_attn_implementation("hp_cp_{name}")',
    )
    _check_unsupported(model, named, where)
    tokens = tokens_of(named, where)
    batch, local = tokens.shape[:2]
    whole = local * cp_size
    shapes: dict[str, object] = {"tokens": (batch, local)}
    bounds = read_cu_seq_lens(named, batch, whole, where)
    require(
        bounds is None or named.get("attention_mask") is None,
        where,
        "cu_seq_lens_q must come without attention_mask, which says who sees whom itself",
        "leave one of the two out",
    )
    shapes["cu_seq_lens_q"] = bounds
    for key in ("attention_mask", "position_ids", "labels", "shift_labels"):
        given = named.get(key)
        if given is None or isinstance(given, dict):
            shapes[key] = type(given).__name__
            continue
        require_type(where, key, given, Tensor, "a tensor")
        shapes[key] = tuple(given.shape) if given.ndim == 2 else f"{given.ndim}-D"
        if key == "attention_mask" and given.ndim == 4:
            continue  # core_attention checks it against its window
        require(
            given.ndim == 2 and given.shape[1] in (local, whole),
            where,
            f"{key} (shape {tuple(given.shape)}) must be [batch, {local}] (this rank's shard) or "
            f"[batch, {whole}] (the whole sequence)",
            "cut it as the tokens were cut, or pass it whole",
        )
    return shapes


def _check_unsupported(model: PreTrainedModel, named: dict[str, Any], where: str) -> None:
    cache = named.get("cache", named.get("past_key_values"))
    if cache is not None:
        held = cache.get_seq_length()
        raise fail(
            where,
            f"cache (a KV cache holding {held} tokens) must be None under context parallelism: it "
            "would hold this rank's keys only",
            "decode with a model without context parallelism",
        )
    require(
        not named.get("use_cache"),
        where,
        "use_cache (True) must be False under context parallelism: a KV cache would hold this "
        "rank's keys only",
        "pass use_cache=False",
    )
    require(
        not asks_for_attentions(model.config, named),
        where,
        "output_attentions (True) must be False under context parallelism: no rank has all rows",
        "pass output_attentions=False",
    )
    check_logits_to_keep(named, where)
    layers = set(getattr(model.config, "layer_types", None) or ())
    unknown = sorted(layers - {"full_attention", "sliding_attention", "chunked_attention"})
    require(
        not unknown,
        where,
        f"layer_types ({', '.join(unknown)}) must be attention layers: a layer that carries a "
        "state along the sequence would start anew on every rank",
        "use a model with full, sliding or chunked attention only",
    )


def check_rotary(model: PreTrainedModel, position_ids: Tensor, where: str) -> None:
    """Refuse rotary scalings that look at the largest position, which differs between ranks."""
    rotary = getattr(model.config, "rope_parameters", None) or {}
    if "rope_type" not in rotary:
        return
    kind = rotary["rope_type"]
    if kind != "longrope" and "dynamic" not in kind:
        return
    limit = rotary.get("original_max_position_embeddings")
    if kind != "longrope" or limit is None:
        limit = model.config.max_position_embeddings
    reach = int(position_ids.max()) + 1
    require(
        reach <= limit,
        where,
        f"the sequence length ({reach}) must be at most {limit} with rope_type {kind!r}: its "
        "frequencies depend on the largest position, which every rank sees differently",
        'use a static rope_type ("llama3", "yarn", "linear")',
    )
