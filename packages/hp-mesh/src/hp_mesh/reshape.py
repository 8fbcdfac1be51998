"""Reshapes of keys and values inside the boundary, with a backward that sends nothing.

The gradient of what every CP rank holds whole is partial. Backward of a reshape copies it where its
strides demand that, and DTensor (2.13) has no rule for the copy of a partial tensor: it all-reduces
the whole gradient, which the boundary then reduces once more. A local reshape is all that is
needed: the shards of the result are the reshaped shards of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Placement, Replicate

from hp_mesh._torch import local_shard, wrap_detached
from hp_mesh.plain import enter_view

if TYPE_CHECKING:
    from hp_mesh.view import View

__all__ = ["register_reshapes"]

_OPS = (
    Tensor.view,
    Tensor.reshape,
    Tensor.flatten,
    Tensor.unflatten,
    torch.reshape,
    torch.flatten,
    torch.unflatten,
)


def register_reshapes(register: Callable[[Any, Any], None]) -> None:
    """Register the handlers of this file with `hp_mesh.view.register_handler`."""
    for op in _OPS:
        register(op, _reshape)


def _reshape(
    view: View, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    x = args[0] if args else None
    if not isinstance(x, DTensor) or not view.owns(x):
        return func(*args, **kwargs)
    is_whole = any(isinstance(x.placements[axis], Replicate) for axis in view.cp_axes)
    if not (is_whole and x.requires_grad and torch.is_grad_enabled()):
        args, kwargs = enter_view(view, func, args, kwargs)
        return view.call_dtensor(func, args, kwargs)
    with torch.no_grad():
        shaped = view.call_dtensor(func, args, kwargs)
    if shaped.dtype != x.dtype or local_shard(shaped).numel() != local_shard(x).numel():
        return view.call_dtensor(func, args, kwargs)  # view(dtype), or resharded on the way
    return _Reshape.apply(x, shaped)  # type: ignore[no-untyped-call]


class _Reshape(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, shaped: DTensor) -> DTensor:
        ctx.shape, ctx.before, ctx.after = local_shard(x).shape, x.placements, shaped.placements
        return wrap_detached(local_shard(shaped), x.device_mesh, shaped.placements, True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:
        target: list[Placement] = [
            present if present.is_partial() else after
            for present, after in zip(grad.placements, ctx.after, strict=True)
        ]
        if target != list(grad.placements):
            grad = grad.redistribute(grad.device_mesh, target)
        placements = [
            present if present.is_partial() else before
            for present, before in zip(target, ctx.before, strict=True)
        ]
        local = local_shard(grad).reshape(ctx.shape)
        return wrap_detached(local, grad.device_mesh, placements, False), None
