"""In and out of a DTensor with the gradient laid out as wanted, which torch (2.13) cannot do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from hp_mesh._torch.autograd import is_transformed
from hp_mesh._torch.dtensors import local_shard, redistribute, shard_offset, wrap_detached

__all__ = ["from_local", "patch_dtensor_exits", "to_local"]


def from_local(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    grad_placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Wrap ``local`` as a DTensor without checks or communication (all shards have one length).

    Where ``grad_placements`` is ``Partial()``, the gradient becomes this rank's share of the sum,
    whatever it came as; ``DTensor.from_local`` has no way from a shard to a partial one (2.13).
    """
    placed = tuple(placements)
    wanted = _whole_grads(placed) if grad_placements is None else tuple(grad_placements)
    wrapped: DTensor = _FromLocal.apply(local, mesh, placed, wanted)  # type: ignore[no-untyped-call]
    return wrapped


def to_local(tensor: DTensor, grad_placements: Sequence[Placement]) -> Tensor:
    """Return the local tensor of ``tensor``, whose gradient is laid out as ``grad_placements``."""
    local: Tensor = _ToLocal.apply(tensor, tuple(grad_placements))  # type: ignore[no-untyped-call]
    return local


def _whole_grads(placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """Return what torch takes for the placements of a gradient: those of a sum are whole."""
    return tuple(Replicate() if p.is_partial() else p for p in placements)


_BATCHED = (
    "a gradient that is_grads_batched=True or torch.func wraps must not reach a DTensor, whose "
    "parts lie on other ranks; ask for one gradient at a time"
)


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        grad_placements: tuple[Placement, ...],
    ) -> DTensor:
        ctx.placements, ctx.grad_placements = placements, grad_placements
        ctx.set_materialize_grads(False)
        return wrap_detached(local.view_as(local), mesh, placements, local.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[Tensor | None, None, None, None]:
        if grad is None:
            return None, None, None, None
        if torch.is_grad_enabled() and grad.requires_grad:
            if tuple(grad.placements) != ctx.grad_placements:
                raise RuntimeError(
                    f"a second derivative of a DTensor with {ctx.placements} needs its gradient as "
                    f"{ctx.grad_placements}, and it came as {tuple(grad.placements)}; pass "
                    "use_local_input=True to the style and work on local tensors"
                )
            return to_local(grad, ctx.placements), None, None, None
        return _partial_share(grad, ctx.grad_placements), None, None, None


class _ToLocal(torch.autograd.Function):
    """``DTensor.to_local``, whose backward computes the layout of the gradient anew every time."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, grad_placements: tuple[Placement, ...]) -> Tensor:
        ctx.mesh, ctx.grad_placements = tensor.device_mesh, grad_placements
        ctx.placements = tuple(tensor.placements)
        ctx.set_materialize_grads(False)
        local: Tensor = tensor._local_tensor
        if type(local) is not Tensor:
            return local.view_as(local)  # waits, if it is still under way
        return local.detach()  # no view to autograd, which lets nobody write to those of functions

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[DTensor | None, None]:
        if grad is None:
            return None, None
        if is_transformed(grad):
            raise RuntimeError(_BATCHED)
        if torch.is_grad_enabled() and grad.requires_grad:
            return from_local(grad, ctx.mesh, ctx.grad_placements, ctx.placements), None
        return wrap_detached(grad, ctx.mesh, ctx.grad_placements, grad.requires_grad), None


def _partial_share(grad: DTensor, wanted: Sequence[Placement]) -> Tensor:
    """Return the local tensor of ``grad`` as ``wanted``, without communication on partial axes.

    Where ``Partial()`` is wanted, any placement is a share of the sum: a partial one as it is, a
    shard with zeros around it, a replicated one on the first rank and zeros on the others.
    """
    mesh, present = grad.device_mesh, list(grad.placements)
    if present == list(wanted):
        return local_shard(grad)
    # zeros can be put around a shard only if no axis to its right cuts its dim and stays
    padded_axes = {
        axis
        for axis, placement in enumerate(present)
        if type(placement) is Shard
        and wanted[axis].is_partial()
        and not any(
            other.is_shard(placement.dim) and not want.is_partial()
            for other, want in zip(present[axis + 1 :], wanted[axis + 1 :], strict=True)
        )
    }
    if padded_axes:
        around = [Replicate() if axis in padded_axes else p for axis, p in enumerate(present)]
        shape, outer = shard_offset(grad.shape, mesh, around)
        _, inner = shard_offset(grad.shape, mesh, present)
        padded = grad._local_tensor.new_zeros(shape)
        part = padded
        for dim, (start, base) in enumerate(zip(inner, outer, strict=True)):
            part = part.narrow(dim, start - base, grad._local_tensor.size(dim))
        part.copy_(grad._local_tensor)
        present = [Partial() if axis in padded_axes else p for axis, p in enumerate(present)]
        grad = wrap_detached(padded, mesh, tuple(present), False)
    target = [
        want
        if not want.is_partial()
        else now
        if now.is_replicate() or now == Partial()
        else Replicate()
        for now, want in zip(present, wanted, strict=True)
    ]
    local = redistribute(grad, target)._local_tensor
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "backward runs on ranks of the mesh"
    for axis, (now, want) in enumerate(zip(target, wanted, strict=True)):
        if want.is_partial() and now.is_replicate() and coordinate[axis] != 0:
            local = torch.zeros_like(local)
    return local


def patch_dtensor_exits(
    default_grad_placements: Callable[[DTensor, bool], Sequence[Placement] | None],
) -> None:
    """Let ``to_local`` and ``full_tensor`` ask for their default ``grad_placements``.

    torch takes the forward placements as default: for a replicated tensor whose gradient is
    partial, each rank would keep its own part only and the sum over ranks would be lost without a
    word. No function mode sees ``to_local``, hence the change on the class. Where the callable
    returns None, torch's default stays.

    Args:
        default_grad_placements: Called with the DTensor and whether all of it is asked for.
    """
    if getattr(DTensor.to_local, "_hp_mesh", False):
        return
    to_local, full_tensor = DTensor.to_local, DTensor.full_tensor

    @functools.wraps(to_local)
    def to_local_with_default(
        self: DTensor, *, grad_placements: Sequence[Placement] | None = None
    ) -> Tensor:
        if grad_placements is None:
            grad_placements = default_grad_placements(self, False)
        return to_local(self, grad_placements=grad_placements)

    @functools.wraps(full_tensor)
    def full_tensor_with_default(
        self: DTensor, *, grad_placements: Sequence[Placement] | None = None
    ) -> Tensor:
        if grad_placements is None:
            grad_placements = default_grad_placements(self, True)
            if grad_placements is not None and all(p.is_replicate() for p in self.placements):
                # nothing to gather; redistribute's backward would all-reduce the partial gradient
                return to_local(self, grad_placements=grad_placements)
        return full_tensor(self, grad_placements=grad_placements)

    patched: Any = to_local_with_default
    patched._hp_mesh = True
    DTensor.to_local = to_local_with_default  # type: ignore[method-assign]
    DTensor.full_tensor = full_tensor_with_default  # type: ignore[method-assign]
