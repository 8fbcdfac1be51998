"""One call of a model whose attention is context parallel: what it means for the whole sequence.

A rank hands its shard of the tokens to the model. Everything else that depends on position
(positions, padding, packed documents, labels) is a fact about the whole sequence. The hook here
settles these facts once a call, before the model computes anything, and sends them down to every
`core_attention` as the keyword ``hp_cp_call``: transformers passes keywords it does not know
through its layers, so nothing is stored and recomputation sees the same facts.

Sent, on the CP group, in this order: one preflight; one all-gather for an ``attention_mask`` and
one for ``position_ids`` that were given for this rank's shard only. A call with token ids alone
sends nothing but the preflight.
"""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel
from transformers.masking_utils import find_packed_sequence_indices

from hp_comm import gather_seq, preflight
from hp_cp.transformers import _mesh
from hp_mesh.checks import fail, require

__all__ = ["GlobalCall", "enter_model"]

KEYWORD = "hp_cp_call"


@dataclass(frozen=True, eq=False)
class GlobalCall:
    """The facts of one model call that no rank can read off its shard.

    Attributes:
        group: The context-parallel ranks, in sequence order.
        rank: This rank's place in it.
        local_length: Tokens on this rank.
        global_length: Tokens of the whole sequence.
        position_ids: Global positions, ``[1 or B, S]``.
        padding: True where a token is visible, ``[B, S]``; None if all are.
        documents: Index of the packed document of each token, ``[1 or B, S]``; None if there is
            one document.
    """

    group: ProcessGroup
    rank: int
    local_length: int
    global_length: int
    position_ids: Tensor
    padding: Tensor | None
    documents: Tensor | None

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's columns of ``whole``, ``[..., S]`` -> ``[..., S/P]``."""
        return whole.narrow(-1, self.rank * self.local_length, self.local_length)

    def whole(self, given: Tensor) -> Tensor:
        """Return ``[B, S]``, gathering ``given`` if it is this rank's ``[B, S/P]``."""
        if given.shape[-1] == self.global_length:
            return given
        return _gather(given, self.group)


def enter_model(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Settle the global facts of a call and rewrite its arguments (a forward pre-hook).

    Applied to the model and to its base model: the outer one settles the facts, the base model
    gets global ``position_ids`` and a mask of global length. Does nothing while no core attention
    is context parallel.
    """
    cores = _mesh.cores(model)
    found = _mesh.cp_ranks(cores, where=type(model).__name__)
    if found is None:
        return None
    named = _by_name(model, args, kwargs)
    call = named.get(KEYWORD)
    if call is None:
        call = _settle(model, named, found)
        named[KEYWORD] = call
    if model.base_model is model:
        named["position_ids"] = call.cut(call.position_ids)
        mask = named.get("attention_mask")
        if not isinstance(mask, dict) and (mask is None or mask.ndim == 2):
            # a mask of global length makes transformers describe its pattern for all keys
            visible = call.padding
            if visible is None:
                visible = torch.ones_like(call.position_ids[:1], dtype=torch.bool)
            named["attention_mask"] = visible
        named["use_cache"] = False  # the config's default; whoever asks for a cache was refused
    return (), named


def _by_name(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _settle(model: PreTrainedModel, named: dict[str, Any], ranks: _mesh.CpRanks) -> GlobalCall:
    where = type(model).__name__
    problem: ValueError | None = None
    shapes: dict[str, object] = {}
    try:
        shapes = _check(model, named, ranks, where)
    except ValueError as error:
        problem = error
    index: int = vars(model).get("_hp_cp_calls", 0)
    vars(model)["_hp_cp_calls"] = index + 1
    preflight(ranks.group, where, shapes, error=problem, call_index=index)

    tokens = _tokens(named, where)
    local = tokens.shape[1]
    whole = local * ranks.size
    facts = _facts(named, tokens.device, whole, ranks)
    call = GlobalCall(ranks.group, ranks.rank, local, whole, *facts)
    _check_rotary(model, call, where)
    return call


def _tokens(named: dict[str, Any], where: str) -> Tensor:
    tokens: Tensor | None = named.get("input_ids")
    if tokens is None:
        tokens = named.get("inputs_embeds")
    if tokens is None:
        raise fail(where, "input_ids or inputs_embeds must be given by keyword or first argument")
    return tokens


def _facts(
    named: dict[str, Any], device: torch.device, whole: int, ranks: _mesh.CpRanks
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    padding = named.get("attention_mask")
    if isinstance(padding, Tensor) and padding.ndim == 2:
        padding = padding.to(device=device, dtype=torch.bool)
        if padding.shape[1] != whole:
            padding = _gather(padding, ranks.group)
        if bool(padding.all()):
            padding = None
        masked = True
    else:
        masked = padding is not None
        padding = None

    positions = named.get("position_ids")
    if positions is None:
        return torch.arange(whole, device=device)[None], padding, None
    if positions.shape[1] != whole:
        positions = _gather(positions, ranks.group)
        _warn_of_local_positions(positions, ranks.size)
    documents = find_packed_sequence_indices(positions)
    if masked and documents is not None:
        _refuse_packing_under_a_mask(documents, padding, named)
        documents = None
    return positions, padding, documents


def _warn_of_local_positions(positions: Tensor, size: int) -> None:
    """Warn where all ranks gave the same positions: documents, or a rank counting its own shard."""
    shards = positions.unflatten(1, (size, -1))
    if bool((shards == shards[:, :1]).all()):
        warnings.warn(
            f"position_ids: all {size} ranks gave the same ones, which are read as {size} packed "
            "documents or more; if each rank counted its own shard, leave position_ids out",
            stacklevel=2,
        )


def _refuse_packing_under_a_mask(
    documents: Tensor, padding: Tensor | None, named: dict[str, Any]
) -> None:
    """Refuse position ids that restart between two visible tokens where a 2-D mask is given.

    transformers reads documents from ``position_ids`` only without a mask; with one, the documents
    would attend to each other. A restart next to padding is how left padding looks: that is fine.
    """
    if named["attention_mask"].__class__ is dict or named["attention_mask"].ndim != 2:
        return  # a mask of the caller's own says who sees whom
    restarts = documents[:, 1:] != documents[:, :-1]
    if padding is not None:
        restarts = restarts & padding[:, 1:] & padding[:, :-1]
    require(
        not bool(restarts.any()),
        "position_ids",
        "they restart between visible tokens (packed documents) while attention_mask is given, "
        "and must come without one: transformers ignores documents then",
        "drop attention_mask, or pass a 4-D mask that keeps the documents apart",
    )


def _check(
    model: PreTrainedModel, named: dict[str, Any], ranks: _mesh.CpRanks, where: str
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
    tokens = _tokens(named, where)
    batch, local = tokens.shape[:2]
    whole = local * ranks.size
    shapes: dict[str, object] = {"tokens": (batch, local)}
    for key in ("attention_mask", "position_ids", "labels", "shift_labels"):
        given = named.get(key)
        if given is None or isinstance(given, dict):
            shapes[key] = type(given).__name__
            continue
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
    attentions = named.get("output_attentions")
    if attentions is None:
        attentions = getattr(model.config, "output_attentions", False)
    require(
        not attentions,
        where,
        "output_attentions (True) must be False under context parallelism: no rank has all rows",
        "pass output_attentions=False",
    )
    keep = named.get("logits_to_keep", 0)
    require(
        isinstance(keep, int) and keep == 0,
        where,
        f"logits_to_keep ({keep!r}) must be 0 under context parallelism: it would count from the "
        "end of every rank's shard",
        "cut the logits afterwards",
    )
    require(
        named.get("cu_seq_lens_q") is None and named.get("cu_seq_lens_k") is None,
        where,
        "cu_seq_lens_q and cu_seq_lens_k must be None: sdpa and eager attention ignore them",
        "say where documents begin with position_ids that restart",
    )
    layers = set(getattr(model.config, "layer_types", None) or ())
    unknown = sorted(layers - {"full_attention", "sliding_attention", "chunked_attention"})
    require(
        not unknown,
        where,
        f"layer_types ({', '.join(unknown)}) must be attention layers: a layer that carries a "
        "state along the sequence would start anew on every rank",
        "use a model with full, sliding or chunked attention only",
    )


def _check_rotary(model: PreTrainedModel, call: GlobalCall, where: str) -> None:
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
    reach = int(call.position_ids.max()) + 1
    require(
        reach <= limit,
        where,
        f"the sequence length ({reach}) must be at most {limit} with rope_type {kind!r}: its "
        "frequencies depend on the largest position, which every rank sees differently",
        'use a static rope_type ("llama3", "yarn", "linear")',
    )


def _gather(x: Tensor, group: ProcessGroup) -> Tensor:
    return gather_seq(x.detach().contiguous(), group, seq_dim=1)
