"""Plain tensors that meet DTensors inside the boundary: masks, rotary tables, biases, sinks.

A plain tensor is read as written for one device: all ranks hold it whole. Its gradient stays
*partial*: what this rank's rows and heads contribute. So a parameter inside the core gets this
rank's own share, as under FSDP every parameter does, and no all-reduce is hidden in backward.

Along a dim where the DTensor is sharded, the size tells what the plain tensor holds::

    DTensor scores [B, H, S, S], rows sharded over CP, L = S / P rows on this rank
    mask [S, S]   all rows: DTensor takes this rank's rows
    mask [L, S]   the caller has cut it: this rank's rows
    bias [H/tp, 1, 1]  heads cut by TP: the shard of the TP axis
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hp_mesh._torch import from_local, lies_elsewhere, to_local
from hp_mesh.checks import fail

if TYPE_CHECKING:
    from hp_mesh.view import View

__all__ = [
    "cut_balanced",
    "cut_by_caller",
    "cut_head_group",
    "enter_view",
    "parts_beside_cp",
    "share_of_replicated",
    "written",
]

_NOT_LINED_UP = frozenset(
    {
        *("__getitem__", "index_select", "gather", "take_along_dim", "embedding", "take"),
        *("index_copy", "index_add", "index_fill", "scatter", "scatter_add", "scatter_reduce"),
        *(
            "matmul",
            "__matmul__",
            "__rmatmul__",
            "mm",
            "bmm",
            "mv",
            "dot",
            "vdot",
            "inner",
            "outer",
        ),
        *("addmm", "addbmm", "baddbmm", "addmv", "addr", "linear", "bilinear", "einsum", "kron"),
        *("tensordot", "chain_matmul", "multi_dot", "cdist", "conv1d", "conv2d", "conv3d"),
    }
)
"""Ops whose tensors are not lined up dim by dim from the right."""


def enter_view(
    view: View, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of ``func`` with every plain tensor wrapped on the view's mesh."""
    name = getattr(func, "__name__", "")
    _refuse_lost_writes(view, name, args, kwargs)
    tensors = [t for t in _flat(args, kwargs) if isinstance(t, Tensor)]
    if not view.is_balanced and all(isinstance(t, DTensor) for t in tensors):
        return list(args), dict(kwargs)  # nothing to line up
    anchor = max(
        (t for t in tensors if isinstance(t, DTensor)),
        key=lambda t: (t.ndim, any(p.is_shard() for p in t.placements)),
    )
    return (
        [_wrap(view, name, v, anchor) for v in args],
        {k: _wrap(view, name, v, anchor) for k, v in kwargs.items()},
    )


def _wrap(view: View, name: str, value: Any, anchor: DTensor) -> Any:
    # not a closure of enter_view: one that calls itself is a cycle, and would keep the anchor and
    # its graph alive until the garbage collector comes
    if isinstance(value, Tensor) and not isinstance(value, DTensor):
        if value.ndim == 0 and not value.requires_grad:
            return value  # DTensor takes scalars as they are, whatever their device
        if name in _NOT_LINED_UP:
            return share_of_replicated(value, view.mesh, [Replicate()] * view.mesh.ndim, view)
        return _align(view, name, value, anchor)
    if view.is_balanced and view.owns(value) and name not in _NOT_LINED_UP:
        return _align_balanced(view, name, value, anchor)
    if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
        items = [_wrap(view, name, v, anchor) for v in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _flat(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    flat: list[Any] = []
    for value in (*args, *kwargs.values()):
        flat.extend(value if isinstance(value, (list, tuple)) else [value])
    return flat


def written(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what the function ``name`` writes to, if it writes in place."""
    in_place = name == "__setitem__" or (
        (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_OPERATORS
    )
    return args[0] if in_place and args else kwargs.get("out")


def _refuse_lost_writes(
    view: View, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Refuse writes in place that would be lost, or would lose a gradient.

    A plain tensor written from a DTensor would gather it; a slice of a sharded dim is not a view
    but gathered data, so that what is written there never reaches the tensor it was taken from.
    """
    target = written(name, args, kwargs)
    if not isinstance(target, Tensor):
        return
    way_out = (
        "build the result without writing in place (torch.cat, torch.where), or pass "
        "use_local_input=True and work on local tensors"
    )
    if not isinstance(target, DTensor):
        raise fail(
            view.where,
            f"{name} writes a DTensor into a plain tensor {tuple(target.shape)}; inside the "
            "boundary the target must be a DTensor as well",
            way_out,
        )
    if lies_elsewhere(target) or (
        name == "__setitem__" and len(args) > 1 and _cuts_shards(target, args[1])
    ):
        raise fail(
            view.where,
            f"{name} writes to a part of a DTensor {tuple(target.shape)} along a dim that is cut "
            f"over ranks ({tuple(target.placements)}); the write would be lost",
            way_out,
        )


_IN_PLACE_OPERATORS = frozenset(
    f"__i{name}__"
    for name in (
        *("add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow"),
        *("and", "or", "xor", "lshift", "rshift", "matmul"),
    )
)


def _cuts_shards(tensor: DTensor, index: Any) -> bool:
    """Whether ``index`` takes only a part of a sharded dim by an integer or a slice."""
    parts = list(index) if isinstance(index, tuple) else [index]
    taken = sum(
        part.ndim if isinstance(part, Tensor) and part.dtype == torch.bool else 1
        for part in parts
        if part is not None and part is not Ellipsis
    )
    dim = 0
    for part in parts:
        if part is None:
            continue
        if part is Ellipsis:
            dim += tensor.ndim - taken
            continue
        basic = isinstance(part, int) or (isinstance(part, slice) and part != slice(None))
        if basic and any(p.is_shard(dim) for p in tensor.placements):
            return True
        dim += part.ndim if isinstance(part, Tensor) and part.dtype == torch.bool else 1
    return False


def cut_head_group(view: View, plain: Tensor, dim: int, parts: int) -> Tensor:
    """Cut what has an entry for each head of q to the heads of the group at work.

    Args:
        view: The active view.
        plain: Has on ``dim`` the heads of the model, or of this rank of tensor parallelism.
        dim: Dim of the heads.
        parts: Over how many ranks of axes other than CP the heads of q are cut. Each of them has
            heads of every group, so those of a group lie apart in the model's.
    """
    group, groups = view.head_group
    held, here = view.num_heads, view.num_heads // groups
    if groups > 1 and plain.size(dim) == held * parts:
        pieces = [plain.narrow(dim, i * held + group * here, here) for i in range(parts)]
        return pieces[0] if parts == 1 else torch.cat(pieces, dim)
    if groups > 1 and plain.size(dim) == held:
        return plain.narrow(dim, group * here, here)
    return plain


def _cut_to_group(view: View, plain: Tensor, anchor: DTensor) -> Tensor:
    """Cut a plain tensor along the dim that lines up with the heads of ``anchor``."""
    if view.head_group[1] == 1:
        return plain
    here = view.num_heads // view.head_group[1]
    for dim in range(plain.ndim):
        beside = dim + anchor.ndim - plain.ndim
        if beside < 0:
            continue
        parts = parts_beside_cp(view, anchor, beside)
        if anchor.size(beside) == here * parts:
            cut = cut_head_group(view, plain, dim, parts)
            if cut is not plain:
                return cut
    return plain


def parts_beside_cp(view: View, tensor: DTensor, dim: int) -> int:
    """Return into how many parts axes other than CP cut ``dim`` of ``tensor``."""
    axes = [a for a, p in enumerate(tensor.placements) if a not in view.cp_axes and p.is_shard(dim)]
    return _product(view.mesh, axes)


def _align(view: View, name: str, plain: Tensor, anchor: DTensor) -> DTensor:
    plain = _cut_to_group(view, plain, anchor)
    placements: list[Placement] = [Replicate()] * view.mesh.ndim
    for dim in range(plain.ndim):
        beside = dim + anchor.ndim - plain.ndim
        if beside < 0:
            continue
        axes = [a for a, p in enumerate(anchor.placements) if p.is_shard(beside)]
        if not axes:
            continue
        size, whole = plain.size(dim), anchor.size(beside)
        on_rows = any(axis in view.row_axes for axis in axes)
        if view.is_balanced and on_rows and size != 1:
            plain, cut = cut_balanced(view, name, plain, dim, whole)
            chosen = axes if cut else []
        elif size in (1, whole):
            chosen = []
        else:
            chosen = cut_by_caller(view, axes, size, whole)
        for axis in chosen:
            placements[axis] = Shard(dim)
    return share_of_replicated(plain, view.mesh, placements, view)


def cut_by_caller(view: View, axes: list[int], size: int, whole: int) -> list[int]:
    """Return over which of ``axes`` a plain dim of ``size`` has been cut; none if that is unknown.

    A caller cuts rows (this rank's are known) or has TP's heads; heads that CP cuts are never its
    own, and with expanded KV heads their number may look like all of them.

    Args:
        view: The active view.
        axes: Mesh axes that cut the dim beside it.
        size: Its size, neither 1 nor ``whole``.
        whole: The size of the dim beside it, over all ranks.
    """
    foreign = [axis for axis in axes if axis not in view.cp_axes]
    known = [foreign] if view.head_axis in axes else [foreign, axes]
    fits = (some for some in known if some and size * _product(view.mesh, some) == whole)
    return next(fits, [])


def _align_balanced(view: View, name: str, tensor: DTensor, anchor: DTensor) -> DTensor:
    """Cut what was computed from k alone (a mask) where it lines up with a head-tail half of q."""
    placements = list(tensor.placements)
    for axis in view.row_axes:
        of_anchor = anchor.placements[axis]
        if not isinstance(of_anchor, Shard) or not placements[axis].is_replicate():
            continue
        dim = of_anchor.dim + tensor.ndim - anchor.ndim
        if dim < 0 or tensor.size(dim) == 1:
            continue
        local = to_local(tensor, view.partial_grads(placements))
        local, _ = cut_balanced(view, name, local, dim, anchor.size(of_anchor.dim))
        placements[axis] = Shard(dim)
        tensor = from_local(local, view.mesh, placements, view.partial_grads(placements))
    return tensor


def cut_balanced(view: View, name: str, plain: Tensor, dim: int, whole: int) -> tuple[Tensor, bool]:
    """Cut a dim that lines up with the rows of a head-tail half of q."""
    window, size = view.window, plain.size(dim)
    if size == window.global_length:
        return view.take_rows(plain, dim), True
    if size == window.query_length and size != whole:
        return plain, True
    if size == whole and plain.stride(dim) == 0:  # widened to the rows of q: all of them are alike
        return plain.narrow(dim, 0, window.query_length), True
    raise fail(
        view.where,
        f"{name} meets a plain tensor {tuple(plain.shape)} whose dim {dim} ({size}) must have the "
        f"global length ({window.global_length}): under load_balance q holds half of the sequence "
        f"in head-tail order ({whole} rows), so a mask or table sized from q has the wrong rows",
        "take its length from k, as in torch.tril(torch.ones(k_len, k_len)), or use "
        "attention_window()",
    )


def _product(mesh: DeviceMesh, axes: Sequence[int]) -> int:
    size = 1
    for axis in axes:
        size *= mesh.size(axis)
    return size


def share_of_replicated(
    plain: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], view: View
) -> DTensor:
    """Wrap ``plain`` on ``mesh``; its gradient is this rank's share on the CP axes."""
    return from_local(plain, mesh, placements, view.partial_grads(placements))
