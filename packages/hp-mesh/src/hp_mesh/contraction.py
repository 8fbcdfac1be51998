"""Matmul, einsum and linear inside the boundary, computed on local shards by their dim labels.

DTensor lowers these to a flattened ``bmm``; a batch dim and two axes of head shards cannot be
flattened without communication, and an einsum over heads not even with one axis (torch 2.13).
Written with labels the rule is short: on each mesh axis at most one label is sharded; an operand
that has the label and is replicated is cut to this rank's part; if the label is summed over, the
result is partial.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from hp_mesh._torch import from_local, to_local
from hp_mesh.plain import cut_balanced, cut_by_caller, enter_view, share_of_replicated

if TYPE_CHECKING:
    from hp_mesh.view import View

__all__ = ["CONTRACTIONS"]


def _leave(
    view: View, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run ``func`` as if it had no handler."""
    flat: list[Any] = []
    for value in (*args, *kwargs.values()):
        flat.extend(value if isinstance(value, (list, tuple)) else [value])
    if any(view.owns(t) for t in flat):
        args, kwargs = enter_view(view, func, args, kwargs)
        return view.call_dtensor(func, args, kwargs)
    return func(*args, **kwargs)


def _matmul(
    view: View, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    if len(args) != 2 or kwargs or not any(view.owns(t) for t in args):
        return _leave(view, func, args, kwargs)
    a, b = args
    if a.ndim < 2 or b.ndim < 2:
        return _leave(view, func, args, kwargs)
    # batch dims from the right share labels; i, j are rows and columns, k is summed over
    batch = string.ascii_uppercase[: max(a.ndim, b.ndim) - 2]
    labels = [batch[len(batch) - (t.ndim - 2) :] for t in (a, b)]
    result = _contract(view, [a, b], [labels[0] + "ik", labels[1] + "kj"], batch + "ij", func)
    return _leave(view, func, args, kwargs) if result is None else result


def _linear(
    view: View, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    names = ("input", "weight", "bias")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    if not view.owns(x) or weight.ndim != 2:
        return _leave(view, func, args, kwargs)
    batch = string.ascii_uppercase[: x.ndim - 1]
    operands, labels = [x, weight], [batch + "k", "jk"]
    if bias is not None:
        operands, labels = [*operands, bias], [*labels, "j"]
    result = _contract(view, operands, labels, batch + "j", F.linear)
    return _leave(view, func, args, kwargs) if result is None else result


def _einsum(
    view: View, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    parsed = _parse_einsum(args) if not kwargs else None
    if parsed is None or not any(view.owns(t) for t in parsed[0]):
        return _leave(view, func, args, kwargs)
    operands, labels, out = parsed
    equation = f"{','.join(labels)}->{out}"
    result = _contract(view, operands, labels, out, lambda *local: func(equation, *local))
    return _leave(view, func, args, kwargs) if result is None else result


def _norm(
    view: View, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Normalise rows that no axis cuts; DTensor would sum a partial gradient over the ranks."""
    names: tuple[str, ...] = ("input", "normalized_shape", "weight", "bias", "eps")
    if func in (F.rms_norm, torch.rms_norm):
        names = ("input", "normalized_shape", "weight", "eps")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x = given.pop("input")
    if not view.owns(x):
        return _leave(view, func, args, kwargs)
    num_normed = len(given["normalized_shape"])
    label = string.ascii_uppercase[: x.ndim]
    affine = [name for name in ("weight", "bias") if given.get(name) is not None]
    operands = [x, *(given.pop(name) for name in affine)]
    labels = [label, *[label[x.ndim - num_normed :]] * len(affine)]

    def compute(local: Tensor, *parameters: Tensor) -> Tensor:
        named = dict(zip(affine, parameters, strict=True))
        normed: Tensor = func(local, **given, **named)
        return normed

    whole = label[x.ndim - num_normed :]
    result = _contract(view, operands, labels, label, compute, whole=whole)
    return _leave(view, func, args, kwargs) if result is None else result


def _parse_einsum(args: Sequence[Any]) -> tuple[list[Tensor], list[str], str] | None:
    """Split ``einsum("...b,bc->...c", x, y)``; None for forms that are left to DTensor."""
    if not args or not isinstance(args[0], str):
        return None
    operands = (
        list(args[1]) if len(args) == 2 and isinstance(args[1], (list, tuple)) else list(args[1:])
    )
    left, arrow, out = args[0].replace(" ", "").partition("->")
    labels = left.split(",")
    if len(labels) != len(operands):
        return None
    # "..." stands for as many letters as the operand has more dims, lined up from the right
    free = [c for c in string.ascii_letters if c not in args[0]]
    spare = [
        t.ndim - len(label.replace("...", "")) for label, t in zip(labels, operands, strict=True)
    ]
    longest = max([0, *(n for n, label in zip(spare, labels, strict=True) if "..." in label)])
    batch = "".join(free[:longest])
    labels = [
        label.replace("...", batch[len(batch) - n :])
        for label, n in zip(labels, spare, strict=True)
    ]
    if any(len(label) != t.ndim for label, t in zip(labels, operands, strict=True)):
        return None
    if not arrow:
        out = batch + "".join(sorted(c for c in set(left) - {",", "."} if left.count(c) == 1))
    return operands, labels, out.replace("...", batch)


def _contract(
    view: View,
    operands: Sequence[Tensor],
    labels: Sequence[str],
    out: str,
    compute: Callable[..., Tensor],
    whole: str = "",
) -> DTensor | None:
    """Compute ``compute(*local operands)``; None if the shards do not allow it locally.

    Args:
        view: The active view.
        operands: Tensors of the op, DTensors or plain.
        labels: One letter for each dim of each operand.
        out: Letters of the result.
        compute: Takes the local operands; linear in each along letters that are summed over.
        whole: Letters that must not be sharded.
    """
    mesh = view.mesh
    if any(isinstance(t, DTensor) and not view.owns(t) for t in operands):
        return None
    sizes: dict[str, int] = {}
    for tensor, label in zip(operands, labels, strict=True):
        for dim, letter in enumerate(label):
            sizes[letter] = max(sizes.get(letter, 1), tensor.size(dim))
    sharded: list[str | None] = []
    for axis in range(mesh.ndim):
        found = set()
        for tensor, label in zip(operands, labels, strict=True):
            if isinstance(tensor, DTensor):
                placement = tensor.placements[axis]
                if type(placement) is Shard:
                    found.add(label[placement.dim])
                elif not isinstance(placement, Replicate):
                    return None
        if len(found) > 1:
            return None
        sharded.append(found.pop() if found else None)
    for letter in set(filter(None, sharded)):
        if letter in whole or any(label.count(letter) > 1 for label in labels):
            return None
        sizes[letter] = max(
            t.size(label.index(letter))
            for t, label in zip(operands, labels, strict=True)
            if isinstance(t, DTensor) and any(p.is_shard(label.find(letter)) for p in t.placements)
        )
        parts = 1
        for axis, name in enumerate(sharded):
            parts *= mesh.size(axis) if name == letter else 1
        if sizes[letter] % parts:
            return None
    locals_ = [
        _operand(view, tensor, label, sharded, sizes)
        for tensor, label in zip(operands, labels, strict=True)
    ]
    if any(local is None for local in locals_):
        return None
    # a bias is added once per rank: with a summed shard it would be added once too often
    if compute is F.linear and len(operands) == 3 and "k" in sharded:
        return None
    result = compute(*locals_)
    placements: list[Placement] = [
        Replicate() if name is None else Shard(out.index(name)) if name in out else Partial()
        for name in sharded
    ]
    return from_local(result, mesh, placements, view.partial_grads(placements))


def _operand(
    view: View,
    tensor: Tensor,
    label: str,
    sharded: Sequence[str | None],
    sizes: Mapping[str, int],
) -> Tensor | None:
    """Return this rank's part of ``tensor``, or None if it is cut in another way."""
    mesh = view.mesh
    if not isinstance(tensor, DTensor):
        placements = _placements_of_plain(view, tensor, label, sharded, sizes)
        if placements is None:
            return None
        tensor = share_of_replicated(tensor, mesh, placements, view)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "the boundary runs on ranks of its mesh"
    grads: list[Placement] = []
    cuts: dict[str, list[int]] = {}
    for axis, name in enumerate(sharded):
        placement = tensor.placements[axis]
        if isinstance(placement, Replicate) and (name is not None or axis in view.cp_axes):
            grads.append(Partial())
        else:
            grads.append(placement)
        if name is not None and name in label and isinstance(placement, Replicate):
            cuts.setdefault(name, []).append(axis)
    local = to_local(tensor, grads)
    for name, axes in cuts.items():
        dim = label.index(name)
        if tensor.size(dim) == 1 and sizes[name] > 1:
            continue  # broadcast along the sharded label
        if view.is_balanced and any(axis in view.row_axes for axis in axes):
            local, _ = cut_balanced(view, "a contraction", local, dim, sizes[name])
            continue
        done = [a for a, n in enumerate(sharded) if n == name and a not in axes]
        if done and max(done) > min(axes):
            return None  # cut already, but not into the parts that are cut further
        index, parts = 0, 1
        for axis in axes:
            index, parts = index * mesh.size(axis) + coordinate[axis], parts * mesh.size(axis)
        part = local.size(dim) // parts
        local = local.narrow(dim, index * part, part)
    return local


def _placements_of_plain(
    view: View,
    plain: Tensor,
    label: str,
    sharded: Sequence[str | None],
    sizes: Mapping[str, int],
) -> list[Placement] | None:
    """Return what a plain operand holds of each dim: all, or what its caller has cut; else None.

    Cut once more, a dim may come down to one row or head, which would be broadcast without a word.
    """
    placements: list[Placement] = [Replicate()] * view.mesh.ndim
    for dim, letter in enumerate(label):
        axes = [axis for axis, name in enumerate(sharded) if name == letter]
        size, whole = plain.size(dim), sizes[letter]
        if not axes or size in (1, whole):
            continue
        if view.is_balanced and any(axis in view.row_axes for axis in axes):
            continue  # `cut_balanced` knows these rows
        chosen = cut_by_caller(view, axes, size, whole)
        if not chosen:
            return None
        for axis in chosen:
            placements[axis] = Shard(dim)
    return placements


CONTRACTIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        (torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__), _matmul
    ),
    torch.einsum: _einsum,
    F.linear: _linear,
    **dict.fromkeys((F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm), _norm),
}
"""What runs each op inside the boundary (see `hp_mesh.handlers`)."""
