"""The operators: schema, fake implementation, gradient, and the door to other implementations."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from hp_comm.kernels.layout import packed_size
from hp_mesh.checks import fail

__all__ = ["Kernels", "chosen", "implementation", "pack", "unpack"]

KNOWN = ("reference", "triton")


class Kernels(Protocol):
    """What an implementation module offers; `reference` says what each one means."""

    def pack(
        self,
        xs: list[Tensor],
        dims: list[int],
        counts: list[int],
        index: list[int],
        joined: Sequence[int] = (),
    ) -> Tensor:
        """See `reference.pack`."""

    def unpack(
        self,
        buffer: Tensor,
        shapes: list[list[int]],
        dims: list[int],
        counts: list[int],
        index: list[int],
        joined: Sequence[int] = (),
    ) -> list[Tensor]:
        """See `reference.unpack`."""


def chosen(x: Tensor) -> str:
    """Return which kernels serve ``x``'s device: ``HP_KERNELS``, or triton except on a CPU."""
    asked = os.environ.get("HP_KERNELS") or ("reference" if x.device.type == "cpu" else "triton")
    if asked not in KNOWN:
        raise fail("hp_comm.kernels", f"HP_KERNELS ({asked!r}) must be one of {', '.join(KNOWN)}")
    if asked == "triton":
        _require_triton(x.device.type)
    return asked


def implementation(x: Tensor) -> Kernels:
    """Return the kernels that move data on ``x``'s device; see `chosen`."""
    return cast(Kernels, load({"reference": "reference", "triton": "launch"}[chosen(x)]))


@cache
def load(name: str) -> Any:
    """Return a module of kernels, or say why its triton does not work."""
    try:
        return importlib.import_module(f"hp_comm.kernels.{name}")
    except ImportError as error:
        raise ImportError(
            f"hp_comm.kernels: triton is installed but cannot be imported ({error}); install the "
            "extra hp-comm[cuda] or hp-comm[npu] into an environment of its own: both put a triton "
            "there, and their files mix"
        ) from error


@cache
def _require_triton(device_type: str) -> None:
    extra = "hp-comm[npu]" if device_type == "npu" else "hp-comm[cuda]"
    if importlib.util.find_spec("triton") is None:
        raise ImportError(
            f"hp_comm.kernels: a tensor on {device_type} must have Triton kernels, but triton "
            f"cannot be imported; install {extra}"
            + ("" if device_type != "cpu" else " (hp-comm[npu] on Ascend)")
            + ", or use HP_KERNELS=reference"
        )
    if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise fail(
            "hp_comm.kernels",
            "HP_KERNELS (triton) must be interpreted on a CPU, which is for tests only",
            "set TRITON_INTERPRET=1, or use HP_KERNELS=reference",
        )


def _nest(shapes: list[int], ndims: list[int]) -> list[list[int]]:
    nested: list[list[int]] = []
    for ndim in ndims:
        nested.append(shapes[:ndim])
        shapes = shapes[ndim:]
    return nested


@torch.library.custom_op("hp_comm::pack", mutates_args=())
def _pack(
    xs: list[Tensor], dims: list[int], counts: list[int], index: list[int], joined: list[int]
) -> Tensor:
    return implementation(xs[0]).pack(xs, dims, counts, index, joined)


@torch.library.custom_op("hp_comm::unpack", mutates_args=())
def _unpack(
    buffer: Tensor,
    shapes: list[int],
    ndims: list[int],
    dims: list[int],
    counts: list[int],
    index: list[int],
    joined: list[int],
) -> list[Tensor]:
    kernels = implementation(buffer)
    return kernels.unpack(buffer, _nest(shapes, ndims), dims, counts, index, joined)


@_pack.register_fake
def _(
    xs: list[Tensor], dims: list[int], counts: list[int], index: list[int], joined: list[int]
) -> Tensor:
    return xs[0].new_empty(packed_size([list(x.shape) for x in xs], dims, counts))


@_unpack.register_fake
def _(
    buffer: Tensor,
    shapes: list[int],
    ndims: list[int],
    dims: list[int],
    counts: list[int],
    index: list[int],
    joined: list[int],
) -> list[Tensor]:
    return [buffer.new_empty(shape) for shape in _nest(shapes, ndims)]


def _no_grads(cut: list[list[int]]) -> list[Any]:
    """Return what stands for the gradient of lists of numbers: torch takes an empty one as is."""
    return [None if numbers else [] for numbers in cut]


def _remember_pack(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    xs, *ctx.cut = inputs
    ctx.shapes = [list(x.shape) for x in xs]


def _pack_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return unpack(grad.contiguous(), ctx.shapes, *ctx.cut), *_no_grads(ctx.cut)


def _remember_unpack(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, _, _, *ctx.cut = inputs


def _unpack_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    return pack(list(grads), *ctx.cut), None, None, *_no_grads(ctx.cut)


_pack.register_autograd(_pack_backward, setup_context=_remember_pack)
_unpack.register_autograd(_unpack_backward, setup_context=_remember_unpack)


def _is_plain(x: Tensor) -> bool:
    """Say whether an operator would only cost time: no graph, no tracer, no tensor subclass."""
    return (
        type(x) is Tensor
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and x.device.type != "meta"
    )


def pack(
    xs: list[Tensor],
    dims: list[int],
    counts: list[int],
    index: list[int],
    joined: Sequence[int] = (),
) -> Tensor:
    """Call ``hp_comm::pack``; see `reference.pack`."""
    if not xs:
        raise fail("pack", "xs (empty) must hold a tensor")
    if any(x.dtype != xs[0].dtype for x in xs):
        dtypes = sorted({str(x.dtype) for x in xs})
        raise fail(
            "pack", f"tensors ({', '.join(dtypes)}) must be of one dtype: they share a buffer"
        )
    if _is_plain(xs[0]):
        return implementation(xs[0]).pack(xs, dims, counts, index, joined)
    return cast(Tensor, _pack(xs, dims, counts, index, list(joined)))


def unpack(
    buffer: Tensor,
    shapes: list[list[int]],
    dims: list[int],
    counts: list[int],
    index: list[int],
    joined: Sequence[int] = (),
) -> list[Tensor]:
    """Call ``hp_comm::unpack``; see `reference.unpack`."""
    size = packed_size(shapes, dims, counts)
    if buffer.numel() != size:
        raise fail(
            "unpack", f"buffer ({buffer.numel()} elements) must have those of the cut ({size})"
        )
    if _is_plain(buffer):
        return implementation(buffer).unpack(buffer, shapes, dims, counts, index, joined)
    flat = [n for shape in shapes for n in shape]
    ndims = [len(shape) for shape in shapes]
    return cast(list[Tensor], _unpack(buffer, flat, ndims, dims, counts, index, list(joined)))
