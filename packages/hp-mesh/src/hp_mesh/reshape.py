"""Reshapes, pairs, splits in the boundary, whose backward DTensor (2.13) gets wrong or sends for.

The gradient of what every CP rank holds whole is partial. Backward of a reshape copies it where its
strides demand that, and DTensor (2.13) has no rule for the copy of a partial tensor: it all-reduces
the whole gradient, which the boundary then reduces once more. A local reshape is all that is
needed: the shards of the result are the reshaped shards of the input.

Backward of `torch.view_as_real` copies its gradient in the same way where it is not contiguous, and
how a gradient lies may differ between ranks: some would all-reduce, and the others go on. It is
made contiguous here, on each rank alone.

Backward of a split fills the parts that nobody used with plain zeros, which DTensor refuses to join
with the others; cut by `narrow`, a part that is not used has no gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Placement, Replicate

from hp_mesh._torch import local_shard, redistribute, wrap_detached
from hp_mesh.plain import enter_view

if TYPE_CHECKING:
    from hp_mesh.view import View

__all__ = ["RESHAPES"]


def _reshape(
    view: View, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    x = args[0] if args else None
    if not isinstance(x, DTensor) or not view.owns(x):
        return func(*args, **kwargs)
    if func is Tensor.view and not local_shard(x).is_contiguous() and not _is_dtype(args[1:]):
        func = Tensor.reshape  # a shard may lie apart where the whole would not
    is_whole = any(isinstance(x.placements[axis], Replicate) for axis in view.cp_axes)
    if not (is_whole and x.requires_grad and torch.is_grad_enabled()):
        args, kwargs = enter_view(view, func, args, kwargs)
        return view.call_dtensor(func, args, kwargs)
    with torch.no_grad():
        shaped = view.call_dtensor(func, args, kwargs)
    if shaped.dtype != x.dtype or local_shard(shaped).numel() != local_shard(x).numel():
        return view.call_dtensor(func, args, kwargs)  # view(dtype), or resharded on the way
    return _Reshape.apply(x, shaped)  # type: ignore[no-untyped-call]


def _split(
    view: View, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    x = args[0] if args else None
    if not isinstance(x, DTensor) or not view.owns(x):
        return func(*args, **kwargs)
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0) % x.ndim
    if not (x.requires_grad and torch.is_grad_enabled()) or any(
        p.is_shard(dim) for p in x.placements
    ):
        return view.call_dtensor(func, args, kwargs)
    with torch.no_grad():
        sizes = [part.size(dim) for part in func(*args, **kwargs)]
    starts = itertools.accumulate(sizes, initial=0)
    return tuple(x.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=False))


def _view_as_real(
    view: View, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    result = view.call_dtensor(func, *enter_view(view, func, args, kwargs))
    if not isinstance(result, DTensor) or not result.requires_grad:
        return result
    return _ContiguousGrad.apply(result)  # type: ignore[no-untyped-call]


def _is_dtype(args: Sequence[Any]) -> bool:
    return bool(args) and isinstance(args[0], torch.dtype)


class _Reshape(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, shaped: DTensor) -> DTensor:
        ctx.shape, ctx.before, ctx.after = local_shard(x).shape, x.placements, shaped.placements
        return wrap_detached(local_shard(shaped), x.device_mesh, tuple(shaped.placements), True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:
        target: list[Placement] = [
            present if present.is_partial() else after
            for present, after in zip(grad.placements, ctx.after, strict=True)
        ]
        grad = redistribute(grad, target)
        placements = tuple(
            present if present.is_partial() else before
            for present, before in zip(target, ctx.before, strict=True)
        )
        local = local_shard(grad).reshape(ctx.shape)
        return wrap_detached(local, grad.device_mesh, placements, False), None


class _ContiguousGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor) -> DTensor:
        local = local_shard(x)
        return wrap_detached(local.view_as(local), x.device_mesh, tuple(x.placements), True)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        if local_shard(grad).is_contiguous():
            return grad
        return _Contiguous.apply(grad)  # type: ignore[no-untyped-call]


class _Contiguous(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor) -> DTensor:
        local = local_shard(x).contiguous()
        return wrap_detached(local, x.device_mesh, tuple(x.placements), x.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> DTensor:
        return grad


RESHAPES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        (
            Tensor.view,
            Tensor.reshape,
            Tensor.flatten,
            Tensor.unflatten,
            torch.reshape,
            torch.flatten,
            torch.unflatten,
        ),
        _reshape,
    ),
    **dict.fromkeys((Tensor.split, Tensor.chunk, torch.split, torch.chunk), _split),
    torch.view_as_real: _view_as_real,
}
"""What runs each op inside the boundary (see `hp_mesh.handlers`)."""
