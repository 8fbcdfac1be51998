"""One call of a model whose attention is context parallel: what it means for the whole sequence.

A rank hands its shard of the tokens to the model. Everything else that depends on position
(positions, padding, packed documents, labels) is a fact about the whole sequence. The hook here
settles these facts once a call, before the model computes anything, and sends them down to every
`core_attention` as the keyword ``hp_cp_call``: transformers passes keywords it does not know
through its layers, so nothing is stored and recomputation sees the same facts.

Documents are told by ``position_ids`` that restart, or by the ``cu_seq_lens_q`` that collators for
flash attention add.

Sent, on the CP group, in this order: one preflight; one all-gather for an ``attention_mask`` and
one for ``position_ids`` that were given for this rank's shard only. A call with token ids alone
sends nothing but the preflight.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel
from transformers.masking_utils import find_packed_sequence_indices

from hp_comm import gather_seq, preflight
from hp_comm.model_call import arguments_by_name, read_cu_seq_lens, tokens_of
from hp_cp.transformers import _mesh
from hp_cp.transformers._refusals import check_call, check_rotary
from hp_cp.transformers.documents import bounds_of, check_same
from hp_mesh.checks import require
from hp_mesh.sequence import position_ids

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
    cu_seqlens: tuple[int, ...] | None = None

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's columns of ``whole``, ``[..., S]`` -> ``[..., S/P]``."""
        return whole.narrow(-1, self.rank * self.local_length, self.local_length)

    def whole(self, given: Tensor) -> Tensor:
        """Return ``[B, S]``, gathering ``given`` if it is this rank's ``[B, S/P]``."""
        if given.shape[-1] == self.global_length:
            return given
        return _gather(given, self.group)

    def targets(self, labels: Tensor, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
        """Return the next token of each of this rank's, ``[B, S/P]``, for the loss."""
        if shift_labels is None:
            shifted = F.pad(self.whole(labels), (0, 1), value=ignore_index)[:, 1:]
            return self.cut(shifted)
        if shift_labels.shape[-1] == self.global_length:
            return self.cut(shift_labels)
        return shift_labels


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
    named = arguments_by_name(model, args, kwargs)
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
                batch = len(tokens_of(named, type(model).__name__))
                visible = torch.ones_like(call.position_ids[:1], dtype=torch.bool)
                visible = visible.expand(batch, -1)
            named["attention_mask"] = visible
        named["use_cache"] = False  # the config's default; whoever asks for a cache was refused
    return (), named


def _settle(model: PreTrainedModel, named: dict[str, Any], ranks: _mesh.CpRanks) -> GlobalCall:
    where = type(model).__name__
    problem: Exception | None = None
    shapes: dict[str, object] = {}
    try:
        shapes = check_call(model, named, ranks.size, where)
    except Exception as error:  # whatever it is, the others would wait for this rank
        problem = error
    index: int = vars(model).get("_hp_cp_calls", 0)
    vars(model)["_hp_cp_calls"] = index + 1
    preflight(ranks.group, where, shapes, error=problem, call_index=index)

    tokens = tokens_of(named, where)
    local = tokens.shape[1]
    whole = local * ranks.size
    facts = _facts(named, tokens, whole, ranks)
    bounds = None if facts[2] is None else bounds_of(facts[2])
    call = GlobalCall(ranks.group, ranks.rank, local, whole, *facts, bounds)
    check_rotary(model, call.position_ids, where)
    return call


def _facts(
    named: dict[str, Any], tokens: Tensor, whole: int, ranks: _mesh.CpRanks
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    device = tokens.device
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

    bounds = read_cu_seq_lens(named, len(tokens), whole, "cu_seq_lens_q")
    positions = named.get("position_ids")
    if positions is None and bounds is not None:
        alone = position_ids((0, 1), global_length=whole, cu_seqlens=bounds, device=device)
        positions = alone[None]
    if positions is None:
        return torch.arange(whole, device=device)[None], padding, None
    if positions.shape[1] != whole:
        positions = _gather(positions, ranks.group)
        _warn_of_local_positions(positions, ranks.size)
    documents = find_packed_sequence_indices(positions)
    if bounds is not None:
        check_same(bounds, documents, whole)
    if masked and documents is not None:
        _refuse_packing_under_a_mask(documents, padding, named)
        documents = None
    return positions, padding, documents


def _warn_of_local_positions(positions: Tensor, size: int) -> None:
    """Warn where all ranks gave the same positions: documents, or a rank counting its own shard."""
    shards = positions.reshape(len(positions), size, -1)
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


def _gather(x: Tensor, group: ProcessGroup) -> Tensor:
    return gather_seq(x.detach().contiguous(), group, seq_dim=1)
