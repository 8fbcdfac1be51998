"""The tensors of one call: found, split from their layout, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hp_comm.fingerprint import LocalRows
from hp_dsa.arguments import LENGTHS, Argument, find
from hp_dsa.gather import Source
from hp_dsa.plan import DSAPlan
from hp_mesh.arguments import Slot
from hp_mesh.checks import advise_on_shards, fail, require
from hp_mesh.handoff import Waitable
from hp_mesh.open_views import current_view
from hp_mesh.placement import TensorLayout, read_layout

__all__ = ["LENGTH", "Inputs", "advise", "options_of", "read_inputs"]

LENGTH = "local sequence length"


@dataclass(eq=False)
class Inputs:
    """What one call holds, checked on this rank; all mappings are by argument name.

    Attributes:
        arguments: The arguments that were found.
        slots: Where the call holds them.
        locals: This rank's shards.
        layouts: How they came.
        sources: Those that are gathered.
        lengths: Keywords of the lengths in the call, by side.
        local_length: Query rows of this rank.
        local_keys: Key rows of this rank.
        under_way: Gathers that were started ahead.
        handoffs: How it stands with each handoff, in a word.
        packs: What is left to gather, in words.
    """

    arguments: tuple[Argument, ...]
    slots: dict[str, Slot]
    locals: dict[str, Tensor]
    layouts: dict[str, TensorLayout]
    sources: dict[str, Source]
    lengths: dict[str, str]
    local_length: int
    local_keys: int
    under_way: dict[str, Waitable] = field(default_factory=dict)
    handoffs: dict[str, str] = field(default_factory=dict)
    packs: list[str] = field(default_factory=list)

    def signature(self, plan: DSAPlan, kwargs: Mapping[str, Any]) -> dict[str, object]:
        """Return what must be the same on every CP rank, by the name to show."""
        signature: dict[str, object] = {LENGTH: self.local_length, "gathers": self.packs}
        if self.local_keys != self.local_length:
            signature["local key length"] = self.local_keys
        if self.handoffs:
            signature["handoffs"] = self.handoffs
        signature |= options_of(kwargs)
        for argument in self.arguments:
            name, x = argument.name, self.locals[argument.name]
            dim = _dim(argument, plan)
            shape = [n for d, n in enumerate(x.shape) if d != dim]
            grad = x.requires_grad and torch.is_grad_enabled()
            signature[name] = f"{shape} {x.dtype}{' grad' if grad else ''}"
            if not self.layouts[name].is_plain:
                signature[f"placements of {name}"] = self.layouts[name].placements
        # last: they may be long, and the names before them are to be read
        return signature | {name: _comparable(kwargs[name]) for name in self.lengths.values()}

    def told_apart(self, plan: DSAPlan) -> LocalRows:
        """Return what differs between the shards of one sequence.

        Global positions rotate the indexer's keys, which then differ also where every rank was
        handed the whole sequence; its weights have no positions, nor has the latent of attention.
        """
        name = "weights" if "weights" in self.locals else "key"
        return LocalRows(name, self.locals[name], plan.seq_dim)


def options_of(kwargs: Mapping[str, Any]) -> dict[str, object]:
    """Return the numbers and words of a call, which each rank must be given alike."""
    return {name: x for name, x in kwargs.items() if isinstance(x, (Number, str))}


def _comparable(lengths: Any) -> object:
    """Return lengths as they can be compared; a tensor on a device would be waited for."""
    if not isinstance(lengths, Tensor):
        return tuple(lengths) if isinstance(lengths, Iterable) else lengths
    if lengths.device.type != "cpu":
        return f"a tensor on {lengths.device.type}"
    values = lengths.tolist()
    return tuple(values) if isinstance(values, list) else values


def _dim(argument: Argument, plan: DSAPlan) -> int:
    return plan.statistics_dim if argument.role == "statistics" else plan.seq_dim


def read_inputs(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    boundary: Sequence[Argument],
    renamed: Mapping[str, str],
    plan: DSAPlan,
    cp_mesh: DeviceMesh,
    where: str,
) -> Inputs:
    """Find the arguments of a call and check what this rank alone can know about them.

    Raises:
        ValueError: With the rule, the numbers and the way out.
        TypeError: If one of them is not a tensor.
    """
    slots = find(boundary, args, kwargs, renamed, where)
    found = tuple(argument for argument in boundary if argument.name in slots)
    outer = current_view()
    require(
        outer is None or not outer.is_local,
        where,
        "this module is called inside another one with use_local_input=True; only one of the two "
        "must have a style",
        "apply the style to one of the two modules",
    )
    tensors: dict[str, Tensor] = {}
    for name, slot in slots.items():
        tensors[name] = kwargs[slot.key] if isinstance(slot.key, str) else args[slot.key]
    _check_dims(found, tensors, plan, where)
    lengths = {
        side: name
        for side, names in LENGTHS.items()
        for name in kwargs
        if name in names and kwargs[name] is not None
    }
    pairs = {
        argument.name: read_layout(
            tensors[argument.name], cp_mesh, _dim(argument, plan), argument.name, where
        )
        for argument in found
    }
    locals_ = {name: local for name, (local, _) in pairs.items()}
    local_length, local_keys = _check_lengths(found, locals_, plan, len(lengths) == 2, where)
    return Inputs(
        arguments=found,
        slots=slots,
        locals=locals_,
        layouts={name: layout for name, (_, layout) in pairs.items()},
        sources={
            a.name: Source(tensors[a.name], locals_[a.name]) for a in found if a.role == "keys"
        },
        lengths=lengths,
        local_length=local_length,
        local_keys=local_keys,
    )


def _check_dims(
    found: Sequence[Argument], tensors: Mapping[str, Tensor], plan: DSAPlan, where: str
) -> None:
    for argument in found:
        x = tensors[argument.name]
        if argument.role == "statistics" or argument.name == "weights":
            enough = x.ndim > _dim(argument, plan)
        else:
            enough = x.ndim == plan.ndim
        require(
            argument.role != "statistics" or tuple(x.shape) != (0,),
            where,
            f"{argument.name} (empty) must hold the softmax statistics of attention",
            "call sparse_flash_attention with return_softmax_lse=True",
        )
        other = "TND" if plan.layout == "BSND" else "BSND"
        require(
            enough,
            where,
            f"{argument.name} (shape {tuple(x.shape)}) must have the dims of layout "
            f"{plan.layout!r}",
            f"construct the style with layout={other!r} if that is what it has",
        )


def _check_lengths(
    found: Sequence[Argument],
    locals_: Mapping[str, Tensor],
    plan: DSAPlan,
    has_lengths: bool,
    where: str,
) -> tuple[int, int]:
    """Return the local lengths of queries and keys; each side must have one."""
    rows = locals_["query"].size(plan.seq_dim)
    keys = locals_["key"].size(plan.seq_dim)
    for argument in found:
        dim = _dim(argument, plan)
        size, expected = locals_[argument.name].size(dim), keys if argument.role == "keys" else rows
        require(
            size == expected,
            where,
            f"{argument.name} (shape {tuple(locals_[argument.name].shape)}) has {size} rows in dim "
            f"{dim}, which must be as many as {'key' if argument.role == 'keys' else 'query'} has "
            f"({expected})",
            "pass this rank's shard of each",
        )
    if keys != rows and not has_lengths:
        whole = keys == rows * plan.cp_size
        raise fail(
            where,
            f"key has {keys} rows on this rank and query {rows}; local_length * cp_size "
            f"({keys} * {plan.cp_size}) must be the key length ({rows} * {plan.cp_size})",
            "pass this rank's shard of key, not the whole: it is gathered here"
            if whole
            else "if there are more keys than queries, pass the lengths of both as keywords",
        )
    return rows, keys


def advise(plan: DSAPlan, differing: Mapping[str, Sequence[str]]) -> str:
    """Name the way out of what the ranks disagree about: unequal shards need padding."""
    return advise_on_shards(differing.get(LENGTH, ()), plan.next_length)
