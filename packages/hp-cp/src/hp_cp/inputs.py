"""q, k and v of one call: found, split from their layout, and checked before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hp_comm.fingerprint import LocalRows
from hp_cp.gathers import check_whole_kv
from hp_cp.heads import HeadTable
from hp_cp.plan import Plan
from hp_cp.prepared import Works, describe, done, read_works
from hp_cp.style_arguments import resolve_dims
from hp_mesh.arguments import Slot, find_slots, read_slots
from hp_mesh.checks import advise_on_shards, fail, require
from hp_mesh.handoff import Waitable
from hp_mesh.open_views import current_view
from hp_mesh.placement import TensorLayout, read_layout
from hp_mesh.transforms import refuse_transforms

if TYPE_CHECKING:
    from hp_cp.style import ContextParallel

__all__ = ["LABELS", "LENGTH", "Inputs", "advise", "read_inputs"]

LABELS = ("q", "k", "v")
LENGTH = "local sequence length"


@dataclass
class Inputs:
    """q, k and v of one call, checked on this rank.

    Attributes:
        claimed: Under `AsyncContextParallel`, the exchanges that run already, by name.
        handoffs: How it stands with each handoff, in a word.
        shards: Under ``keep_kv=False``, k and v before the gather, outside autograd.
        works: QK-norm and rotary of q, k and v that are still to be done.
        is_cross: Whether k and v may be of another sequence than q.
        call_index: How many calls of the boundary went before.
    """

    slots: list[Slot]
    tensors: list[Tensor]
    locals: list[Tensor]
    layouts: list[TensorLayout]
    dims: tuple[int, int]
    table: HeadTable
    num_heads: int
    num_kv_heads: int
    claimed: dict[str, Waitable] = field(default_factory=dict)
    handoffs: dict[str, str] = field(default_factory=dict)
    shards: tuple[Tensor, Tensor] | None = None
    works: Works = (None, None, None)
    is_cross: bool = False
    call_index: int = 0

    @property
    def kv_is_whole(self) -> bool:
        """Whether k and v came with the whole sequence, so that nothing is to be gathered."""
        return self.layouts[1].is_whole

    def own_heads(self, place: int, *, dense: bool) -> list[Tensor]:
        """Return the heads of whole k and v that Ulysses rank ``place`` needs; nothing is sent.

        Their gradients are zero elsewhere: what is summed over the ranks is the whole.
        """
        heads, head_dim = self.table.kv_sent[place], self.dims[1]  # consecutive ones
        own = [x.narrow(head_dim, heads[0], len(heads)) for x in self.locals[1:]]
        own = [done(x, work) for x, work in zip(own, self.works[1:], strict=True)]
        return [x.contiguous() for x in own] if dense else own

    def signature(self) -> dict[str, object]:
        """Return what must be the same on every CP rank, by the name to show."""
        seq_dim, _ = self.dims
        signature: dict[str, object] = {LENGTH: self.locals[0].size(seq_dim)}
        if self.is_cross:
            signature[f"{LENGTH} of k and v"] = self.locals[1].size(seq_dim)
        if self.handoffs:
            signature["handoffs"] = self.handoffs
        if any(work is not None for work in self.works):
            signature["work on q, k, v"] = [describe(work) for work in self.works]
        for name, x, layout in zip(LABELS, self.locals, self.layouts, strict=True):
            shape = [n for dim, n in enumerate(x.shape) if dim != seq_dim]
            signature[f"shape of {name} without its sequence dim"] = shape
            signature[f"dtype of {name}"] = x.dtype
            signature[f"requires_grad of {name}"] = x.requires_grad and torch.is_grad_enabled()
            signature[f"placements of {name}"] = layout.placements
        return signature

    def told_apart(self) -> LocalRows:
        """Return what differs between the shards of one sequence.

        v follows from the tokens. q and k may have been rotated by global positions, and then they
        differ also where every rank was handed the whole sequence; but v of cross attention is of a
        sequence of its own, which may be whole on each rank.
        """
        which = 0 if self.is_cross else 2
        return LocalRows(LABELS[which], self.locals[which], self.dims[0])


def read_inputs(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    style: ContextParallel,
    plan: Plan,
    cp_mesh: DeviceMesh,
    where: str,
) -> Inputs:
    """Find q, k and v in a call and check what this rank alone can know about them.

    Raises:
        ValueError: With the rule, the numbers and the way out.
        TypeError: If one of them is not a tensor.
    """
    slots = find_slots(
        args,
        kwargs,
        labels=LABELS,
        indices=style.qkv_indices,
        kwarg_names=style.qkv_kwarg_names,
        where=where,
    )
    tensors: list[Tensor] = read_slots(args, kwargs, slots)
    refuse_transforms(where, tensors)
    outer = current_view()
    require(
        outer is None or not outer.is_local,
        where,
        "this module is called inside another one with use_local_input=True, whose plain tensors "
        "do not say what they are shards of; only one of the two must have a style",
        "apply the style to one of the two modules",
    )
    ndim = tensors[0].ndim
    if any(x.ndim != ndim for x in tensors):
        raise fail(
            where,
            f"q, k and v with {[x.ndim for x in tensors]} dims must have one number of dims",
            "check qkv_indices and qkv_kwarg_names",
        )
    needs_heads = plan.ulysses_degree > 1 or style.head_groups > 1
    seq_dim, head_dim = resolve_dims(
        where, ndim, style.seq_dim, style.head_dim, needs_heads=needs_heads
    )
    pairs = [
        read_layout(
            x,
            cp_mesh,
            seq_dim,
            name,
            where,
            may_be_whole=name != "q" and style.cross_attention,
        )
        for name, x in zip(LABELS, tensors, strict=True)
    ]
    q, k, v = locals_ = [local for local, _ in pairs]
    require(
        pairs[1][1].is_whole == pairs[2][1].is_whole,
        where,
        "k and v must both be whole (Replicate()) on the CP axis, or both be shards",
        "redistribute one of them",
    )
    if pairs[1][1].is_whole:
        check_whole_kv(plan, overlap=style.overlaps, where=where)
    lengths = [x.size(seq_dim) for x in locals_]
    same = lengths[1:] if style.cross_attention else lengths
    if len(set(same)) != 1:
        raise fail(
            where,
            f"{'k and v' if style.cross_attention else 'q, k and v'} "
            f"{[list(x.shape) for x in locals_]} have {lengths} rows in seq_dim "
            f"({style.seq_dim}); they must have one length",
            "check that seq_dim and head_dim name the layout (BSHD is 1, 2 and BNSD is 2, 1) and "
            "that each is this rank's shard",
        )
    num_heads = num_kv_heads = 1
    if needs_heads:
        num_heads, num_kv_heads = q.size(head_dim), k.size(head_dim)
        require(
            v.size(head_dim) == num_kv_heads,
            where,
            f"v has {v.size(head_dim)} heads in head_dim ({style.head_dim}), which must be "
            f"the number of heads of k ({num_kv_heads})",
            "check qkv_indices and the layout",
        )
        _require_heads_cut_alike([layout for _, layout in pairs], head_dim, where)
    elif head_dim < ndim:
        num_heads, num_kv_heads = q.size(head_dim), k.size(head_dim)
    layout = pairs[0][1]
    table = plan.heads(
        num_heads,
        num_kv_heads,
        where=where,
        head_dim=head_dim if needs_heads else None,
        shape=list(q.shape),
        tp_size=layout.foreign_size(head_dim),
    )
    works = read_works(where, kwargs, locals_, head_dim)
    return Inputs(
        slots=slots,
        tensors=tensors,
        locals=locals_,
        layouts=[layout for _, layout in pairs],
        dims=(seq_dim, head_dim),
        table=table,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        works=works,
        is_cross=style.cross_attention,
    )


def _require_heads_cut_alike(layouts: Sequence[TensorLayout], head_dim: int, where: str) -> None:
    """Refuse KV heads that are whole where those of q are cut: which are whose is not known."""
    q, *others = (layout.foreign_placements for layout in layouts)
    for name, kv in zip(LABELS[1:], others, strict=True):
        require(
            len(kv) != len(q)  # refused where meshes are compared
            or all(
                a.is_shard(head_dim) == b.is_shard(head_dim) for a, b in zip(q, kv, strict=True)
            ),
            where,
            f"{name} with {kv} must have its heads (dim {head_dim}) cut like those of q with {q}, "
            "over the axes that are not CP",
            "redistribute k and v; fewer KV heads than ranks there are repeated first, up to one "
            "for each rank; or use ulysses_degree=1, which takes them as they are",
        )


def advise(plan: Plan, differing: Mapping[str, Sequence[str]]) -> str:
    """Name the way out of what the ranks disagree about: unequal shards need padding."""
    return advise_on_shards(differing.get(LENGTH, ()), plan.next_length)
