"""One call of a prepared model: the facts that no layer can read off its shard.

Two hooks on the model settle them before anything is computed and send them down to the layers as
the keyword ``hp_dsa_call``: transformers passes keywords it does not know through its layers, so
that nothing of a call is stored in a layer, and recomputation sees the same facts.

Sent, on the CP group: one preflight. No mask is made, neither of the whole sequence nor of a shard.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from hp_comm import preflight
from hp_comm.model_call import arguments_by_name, tokens_of
from hp_dsa.boundary import DSABoundary
from hp_dsa.cores import SparseAttention
from hp_dsa.transformers import _refusals
from hp_mesh.boundary import boundary_of
from hp_mesh.checks import fail
from hp_mesh.sequence import Order, next_token_labels, position_ids, shard_sequence

__all__ = ["DIVISOR", "KEYWORD", "ModelCall", "enter_model", "last_call", "leave_model"]

KEYWORD = "hp_dsa_call"
DIVISOR = "_hp_dsa_gradient_divisor"
"""Attribute of a prepared model; absent where it is the number of ranks."""

_OF_LOSS = ("labels", "shift_labels", "num_items_in_batch")

_calls: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
_last: weakref.WeakKeyDictionary[nn.Module, ModelCall] = weakref.WeakKeyDictionary()
# beside the models and not in them: a copy or a pickle of a model has no calls behind it


class ModelCall:
    """The facts of one call, and the losses that its layers add.

    No dataclass: FSDP copies dataclasses among a layer's arguments that hold tensors with gradient,
    and a loss that is added to a copy is lost.

    Attributes:
        owner: ``id`` of the model that was called.
        layout: ``"BSND"`` or ``"TND"``.
        order: How the data lies on the ranks.
        group: The context-parallel ranks in sequence order; None on one device.
        rank: This rank's place among them.
        cp_size: Their number.
        gradient_divisor: By how much the reduction of gradients divides, as `prepare_model` heard.
        batch: ``B``.
        global_length: ``S``.
        ends: Cumulative ends of the packed documents in the whole sequence; None for ``"BSND"``.
        records: Whether the caller records gradients.
        losses: The indexers' summed losses by layer.
        is_open: Whether the call is under way.
    """

    def __init__(self, owner: nn.Module, layout: str, boundary: DSABoundary | None) -> None:
        self.owner = id(owner)
        self.layout = layout
        self.order: Order = "contiguous"
        self.group: ProcessGroup | None = None
        self.rank, self.cp_size = 0, 1
        if boundary is not None:
            self.order = boundary.plan.order
            self.group = boundary.group
            self.rank, self.cp_size = boundary.rank, boundary.plan.cp_size
        self.gradient_divisor: int = vars(owner).get(DIVISOR, self.cp_size)
        self.batch = self.global_length = 0
        self.ends: list[int] | None = None
        self.records = torch.is_grad_enabled()
        self.losses: dict[int, Tensor] = {}
        self.is_open = True

    def add(self, layer: int, loss: Tensor) -> None:
        """Keep a layer's loss; what recomputation computes again is not another one."""
        if self.is_open:
            self.losses[layer] = loss

    def packed(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return ``[B, S, ...]`` in the layout of the operators."""
        return tensors if self.layout == "BSND" else tuple(x.squeeze(0) for x in tensors)

    def unpacked(self, x: Tensor) -> Tensor:
        """Return a tensor of the operators' layout as ``[B, S, ...]``."""
        return x if self.layout == "BSND" else x.unsqueeze(0)

    def positions(self, device: torch.device) -> Tensor:
        """Return the positions of this rank's tokens in their documents, ``[1, S/P]``."""
        starts = None if self.ends is None else [0, *self.ends]
        cp = (self.rank, self.cp_size)
        found = position_ids(
            cp,
            global_length=self.global_length,
            order=self.order,
            cu_seqlens=starts,
            device=device,
        )
        return found[None]

    def targets(self, labels: Tensor, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
        """Return the next token of each of this rank's, ``[B, S/P]``, for the loss."""
        cp = (self.rank, self.cp_size)
        if shift_labels is None:
            return next_token_labels(labels, cp, ignore_index=ignore_index, order=self.order)
        if shift_labels.shape[-1] == self.global_length:
            return shard_sequence(shift_labels, cp, order=self.order)
        return shift_labels


def last_call(model: nn.Module) -> ModelCall | None:
    """Return the facts of the last call of ``model`` that came to its end."""
    return _last.get(model)


def enter_model(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Settle the facts of a call and rewrite its arguments (a forward pre-hook).

    On the model and on its base model: the outer one settles the facts, the base model gets the
    positions and an empty mask.
    """
    named = arguments_by_name(model, args, kwargs)
    call: ModelCall | None = named.get(KEYWORD)
    if call is None:
        call = named[KEYWORD] = _settle(model, named)
    if model.base_model is model:
        tokens = tokens_of(named, type(model).__name__)
        named["position_ids"] = call.positions(tokens.device)
        # a dict is taken as it is: no mask of S x S is made
        named["attention_mask"] = {"indexed_attention": None}
        named["use_cache"] = False  # the config's default; whoever asks for a cache was refused
    return (), named


def leave_model(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    """Keep the call for `indexer_loss` (a forward hook)."""
    call: ModelCall = kwargs[KEYWORD]
    if call.owner == id(model):
        call.is_open = False
        _last[model] = call


def _settle(model: PreTrainedModel, named: dict[str, Any]) -> ModelCall:
    where = type(model).__name__
    _last.pop(model, None)
    call = _facts(model, where)
    problem: Exception | None = None
    shapes: dict[str, object] = {}
    try:
        shapes = _read(model, named, call, where)
    except Exception as error:  # whatever it is, the others would wait for this rank
        problem = error
    index = _calls.get(model, 0)
    _calls[model] = index + 1
    if call.group is not None:
        preflight(call.group, where, shapes, error=problem, call_index=index)
    elif problem is not None:
        raise problem
    return call


def _facts(model: PreTrainedModel, where: str) -> ModelCall:
    """Return what the boundaries know: layout, order, ranks."""
    found = [m for m in model.modules() if isinstance(m, SparseAttention)]
    boundaries = [boundary_of(core) for core in found]
    first = boundaries[0]
    if any(boundary is None for boundary in boundaries) and any(boundaries):
        raise fail(
            where,
            f"{sum(b is None for b in boundaries)} of {len(found)} layers have no "
            "context-parallel style, and all must have one or none",
            "let prepare_model apply them",
        )
    assert first is None or isinstance(first, DSABoundary), "prepare_model applied it"
    return ModelCall(model, found[0].layout, first)


def _read(
    model: PreTrainedModel, named: dict[str, Any], call: ModelCall, where: str
) -> dict[str, object]:
    """Fill in the lengths, check the call, and return what must be alike on all ranks."""
    tokens = tokens_of(named, where)
    call.batch, local = tokens.shape[:2]
    call.global_length = local * call.cp_size
    _refusals.check_call(model, named, call.cp_size, where)
    starts: Sequence[int] | Tensor | None = named.get("cu_seq_lens_q")
    if call.layout == "TND":
        call.ends = _refusals.read_ends(named, call.batch, call.global_length, where)
    elif starts is not None:
        raise fail(
            where,
            'cu_seq_lens_q (given) must come with layout="TND": documents would see each other',
            'prepare_model(model, layout="TND")',
        )
    _refusals.check_labels(named, call, where)
    given = named.get("position_ids")
    if given is not None:
        _refusals.check_positions(given, call.positions(given.device), where)
    return {
        "tokens": (call.batch, local),
        "documents end at": call.ends,
        "grad": call.records,
        # a loss is summed over the ranks: a rank without labels would be waited for
        **{f"{name} given": named.get(name) is not None for name in _OF_LOSS},
    }
