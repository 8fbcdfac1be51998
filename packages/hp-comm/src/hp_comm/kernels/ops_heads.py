"""Operators of the kernels that compute: schema, fake implementation, gradient.

``hp_comm::pack_heads``, ``hp_comm::unpack_heads``, ``hp_comm::merge``, ``hp_comm::merge_backward``;
`hp_comm.kernels.arithmetic` says what each one means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from hp_comm.kernels import arithmetic
from hp_comm.kernels.arithmetic import HeadWork
from hp_comm.kernels.layout import packed_size
from hp_comm.kernels.ops import chosen, load
from hp_mesh.checks import fail

__all__ = ["HeadWork", "check_work", "merge", "pack_heads", "unpack_heads"]


def _module(x: Tensor, name: str) -> Any:
    if chosen(x) == "reference":
        return arithmetic
    return load(name)


def check_work(where: str, x: Tensor, work: HeadWork, head_dim: int | None) -> None:
    """Refuse work that does not fit the heads of ``x``, ``[.., D]`` with heads on ``head_dim``.

    Without a ``head_dim`` (nobody has said it), cos may be 1 in any dim but must not be in all.
    """
    size = x.shape[-1]
    if head_dim == x.ndim - 1:
        raise fail(where, f"x {tuple(x.shape)} must have the numbers of a head in a dim of its own")
    if not x.is_floating_point():
        raise fail(where, f"x ({x.dtype}) must be of a floating dtype")
    if work.weight is not None and tuple(work.weight.shape) != (size,):
        raise fail(
            where, f"weight {tuple(work.weight.shape)} must be of the size of a head ({size},)"
        )
    for name in ("weight", "cos"):
        part = getattr(work, name)
        if part is not None and part.device != x.device:
            raise fail(where, f"{name} (on {part.device}) must be on the device of x ({x.device})")
    if work.cos is None or work.sin is None:
        return
    if work.rotary > size:
        raise fail(
            where,
            f"cos ({work.rotary // 2} pairs) must rotate at most a head ({size} numbers)",
            "pass one angle for each pair: half of a table that repeats them",
        )
    wanted = [*x.shape[:-1], None]
    if head_dim is not None:
        wanted[head_dim] = 1
    fits = work.cos.ndim == x.ndim and all(
        w is None or n == w or (n == 1 and d != head_dim)
        for d, (n, w) in enumerate(zip(work.cos.shape, wanted, strict=True))
    )
    if not fits:
        raise fail(
            where,
            f"cos {tuple(work.cos.shape)} must have the dims of x {tuple(x.shape)}, 1 where x has "
            "heads and half the rotated numbers in the last",
            "" if head_dim is None else f"for example cos.unsqueeze({head_dim})",
        )
    if work.cos.requires_grad or work.sin.requires_grad:
        raise fail(where, "cos and sin must need no gradient", "detach them")


_Flat = tuple[list[Tensor], list[float], list[int], list[Tensor], list[Tensor]]


def _flat(works: Sequence[HeadWork | None], blank: Tensor) -> _Flat:
    """Write works the way a schema can say them; an empty tensor stands for one that is not there.

    The kind is 0 for no work, 1 for pairs in halves, 2 for interleaved ones.
    """
    none = blank.new_empty(0)

    def listed(name: str) -> list[Tensor]:
        found = [None if work is None else getattr(work, name) for work in works]
        return [none if one is None else one for one in found]

    return (
        listed("weight"),
        [1e-6 if work is None else work.eps for work in works],
        [0 if work is None else 1 + work.interleaved for work in works],
        listed("cos"),
        listed("sin"),
    )


def _works(
    weights: list[Tensor], eps: list[float], kinds: list[int], cos: list[Tensor], sin: list[Tensor]
) -> list[HeadWork | None]:
    def given(x: Tensor) -> Tensor | None:
        return x if x.numel() else None

    return [
        HeadWork(given(w), e, given(c), given(s), kind == 2) if kind else None
        for w, e, kind, c, s in zip(weights, eps, kinds, cos, sin, strict=True)
    ]


@torch.library.custom_op("hp_comm::pack_heads", mutates_args=())
def _pack_heads(
    xs: list[Tensor],
    weights: list[Tensor],
    eps: list[float],
    kinds: list[int],
    cos: list[Tensor],
    sin: list[Tensor],
    dims: list[int],
    counts: list[int],
    index: list[int],
    joined: list[int],
    seq_dim: int,
) -> Tensor:
    works = _works(weights, eps, kinds, cos, sin)
    kernels = _module(xs[0], "launch_heads")
    return cast(Tensor, kernels.pack_heads(xs, works, dims, counts, index, joined, seq_dim))


@_pack_heads.register_fake
def _(xs: list[Tensor], *rest: Any) -> Tensor:
    dims, counts = rest[5], rest[6]
    return xs[0].new_empty(packed_size([list(x.shape) for x in xs], dims, counts))


@torch.library.custom_op("hp_comm::unpack_heads", mutates_args=())
def _unpack_heads(
    buffer: Tensor,
    xs: list[Tensor],
    weights: list[Tensor],
    eps: list[float],
    kinds: list[int],
    cos: list[Tensor],
    sin: list[Tensor],
    shapes: list[int],
    dims: list[int],
    counts: list[int],
    index: list[int],
    joined: list[int],
    seq_dim: int,
) -> list[Tensor]:
    works = _works(weights, eps, kinds, cos, sin)
    ndim = len(shapes) // len(xs)
    nested = [shapes[i : i + ndim] for i in range(0, len(shapes), ndim)]
    kernels = _module(buffer, "launch_heads")
    grads, weight_grads = kernels.unpack_heads(
        buffer, xs, works, nested, dims, counts, index, joined, seq_dim
    )
    return [
        *grads,
        *(
            buffer.new_empty(0) if grad is None else grad.to(weight.dtype)
            for grad, weight in zip(weight_grads, weights, strict=True)
        ),
    ]


@_unpack_heads.register_fake
def _(buffer: Tensor, xs: list[Tensor], weights: list[Tensor], *rest: Any) -> list[Tensor]:
    shapes = rest[4]
    ndim = len(shapes) // len(xs)
    grads = [buffer.new_empty(shapes[i : i + ndim]) for i in range(0, len(shapes), ndim)]
    return [*grads, *(torch.empty_like(weight) for weight in weights)]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    xs, weights, ctx.eps, ctx.kinds, cos, sin, *ctx.cut = inputs
    # without a norm the gradient does not ask what was packed
    kept = [x if w.numel() else x.new_empty(0) for x, w in zip(xs, weights, strict=True)]
    ctx.shapes = [n for x in xs for n in x.shape]
    ctx.save_for_backward(*kept, *weights, *cos, *sin)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    n = len(ctx.saved_tensors) // 4
    xs, weights, cos, sin = (list(ctx.saved_tensors[i * n : (i + 1) * n]) for i in range(4))
    grads = _unpack_heads(
        grad.contiguous(), xs, weights, ctx.eps, ctx.kinds, cos, sin, ctx.shapes, *ctx.cut
    )
    *cuts, _ = ctx.cut
    nothing: list[Any] = [None if numbers else [] for numbers in cuts]
    return grads[:n], grads[n:], None, None, [None] * n, [None] * n, *nothing, None


_pack_heads.register_autograd(_backward, setup_context=_remember)


def pack_heads(
    xs: list[Tensor],
    works: Sequence[HeadWork | None],
    dims: list[int],
    counts: list[int],
    index: list[int],
    joined: Sequence[int] = (),
    seq_dim: int = 0,
) -> Tensor:
    """Call ``hp_comm::pack_heads``; see `arithmetic.pack_heads`."""
    if not xs:
        raise fail("pack_heads", "xs (empty) must hold a tensor")
    if len(works) != len(xs):
        raise fail(
            "pack_heads", f"works ({len(works)}) must be one, or None, per tensor ({len(xs)})"
        )
    for t, (x, work) in enumerate(zip(xs, works, strict=True)):
        if work is not None:
            check_work(f"pack_heads: works[{t}]", x, work, None)
    flat = _flat(works, xs[0])
    return cast(Tensor, _pack_heads(xs, *flat, dims, counts, index, list(joined), seq_dim))


def unpack_heads(
    buffer: Tensor,
    xs: Sequence[Tensor | None],
    works: Sequence[HeadWork | None],
    shapes: list[list[int]],
    dims: list[int],
    counts: list[int],
    index: list[int],
    joined: Sequence[int] = (),
    seq_dim: int = 0,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Call ``hp_comm::unpack_heads``; see `arithmetic.unpack_heads`."""
    none = buffer.new_empty(0)
    kept = [none if x is None else x for x in xs]
    numbers = [n for shape in shapes for n in shape]
    found = _unpack_heads(
        buffer, kept, *_flat(works, buffer), numbers, dims, counts, index, list(joined), seq_dim
    )
    weights = [
        None if work is None or work.weight is None else grad
        for work, grad in zip(works, found[len(xs) :], strict=True)
    ]
    return found[: len(xs)], weights


@torch.library.custom_op("hp_comm::merge", mutates_args=())
def _merge(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = _module(out1, "launch_merge").merge(out1, lse1, out2, lse2)
    return out.contiguous(), lse.contiguous()  # as the fake implementation says


@_merge.register_fake
def _(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    return out1.new_empty(out1.shape), lse1.new_empty(lse1.shape)


@torch.library.custom_op("hp_comm::merge_backward", mutates_args=())
def _merge_backward(
    out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor, grad: Tensor, grad_lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kernels = _module(out1, "launch_merge")
    one, two, three, four = kernels.merge_backward(out1, lse1, out2, lse2, grad, grad_lse)
    return one.contiguous(), two.contiguous(), three.contiguous(), four.contiguous()


@_merge_backward.register_fake
def _(
    out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor, grad: Tensor, grad_lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    one, two, three, four = (x.new_empty(x.shape) for x in (out1, lse1, out2, lse2))
    return one, two, three, four


def _remember_merge(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _merge_gradients(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor, ...]:
    return cast(tuple[Tensor, ...], _merge_backward(*ctx.saved_tensors, grad, grad_lse))


_merge.register_autograd(_merge_gradients, setup_context=_remember_merge)


def merge(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Join two partial attentions, differentiable; see `arithmetic.merge`."""
    if out1.shape != out2.shape or lse1.shape != lse2.shape or out1.shape[:-1] != lse1.shape:
        raise fail(
            "merge",
            f"out1 {tuple(out1.shape)}, lse1 {tuple(lse1.shape)}, out2 {tuple(out2.shape)}, lse2 "
            f"{tuple(lse2.shape)} must be [.., D], [..], [.., D], [..]",
        )
    for name, x in (("out1", out1), ("lse1", lse1), ("out2", out2), ("lse2", lse2)):
        if not x.is_floating_point():
            raise fail("merge", f"{name} ({x.dtype}) must be of a floating dtype")
    return cast(tuple[Tensor, Tensor], _merge(out1, lse1, out2, lse2))
