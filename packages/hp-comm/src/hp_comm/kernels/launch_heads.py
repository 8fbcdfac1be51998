"""Pack with QK-norm and rotary, on real tensors; `hp_comm.kernels.arithmetic` defines it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from hp_comm.kernels import arithmetic
from hp_comm.kernels.arithmetic import HeadWork
from hp_comm.kernels.config import launch_of
from hp_comm.kernels.fitting import fitting
from hp_comm.kernels.launch import MOVED, Cut, call, device_name, move, resolved
from hp_comm.kernels.layout import Shape, copies, packed_size
from hp_comm.kernels.plans import Launch, Work, head_launch
from hp_comm.kernels.reference import zero_what_nobody_sends
from hp_comm.kernels.segments import Segments, head_segments

__all__ = ["pack_heads", "unpack_heads"]


def _what(work: HeadWork) -> Work:
    return work.rotary, work.interleaved, work.weight is not None, work.eps


def _angle_strides(x: Tensor, work: HeadWork) -> Shape:
    """Return the strides of ``cos`` over the tensor's dims; those of size 1 do not move."""
    if work.cos is None:
        return (0,) * x.ndim
    sizes, strides = work.cos.shape, work.cos.stride()
    return (*(0 if n == 1 else s for n, s in zip(sizes[:-1], strides, strict=False)), strides[-1])


@lru_cache(maxsize=512)
def _planned(
    kernel: str,
    device: str,
    element_size: int,
    t: int,
    shapes: tuple[Shape, ...],
    strides: tuple[tuple[Shape, ...], ...],
    cut: Cut,
    seq_dim: int,
    work: Work,
) -> tuple[Launch, ...]:
    """Return the launches for tensor ``t``; ``strides`` are those of all tensors, several times.

    Each time tensor ``t`` is another one that is addressed alike: the tensor itself, its gradient,
    the table of angles.
    """
    found = [[copy for copy in copies(shapes, of_all, *cut) if copy.t == t] for of_all in strides]
    segments = head_segments(
        list(zip(*found, strict=True)),
        0 if cut[3] else seq_dim,
        len(shapes[t]),
        summed=kernel == "unpack_rotary",
    )
    planned: list[Launch] = []
    for one in segments:
        sizes = {"rows": one.rows, "inner": one.inner, "element_size": element_size}
        launch = launch_of(kernel, device, sizes)
        planned += fitting(
            kernel, device, element_size, launch, partial(_head_launches, kernel, one, work)
        )
    return tuple(planned)


def _head_launches(
    kernel: str, segments: Segments, work: Work, launch: Mapping[str, int]
) -> list[Launch]:
    return [head_launch(kernel, segments, work, launch)]


def _strides(xs: Sequence[Tensor], t: int, other: Shape) -> tuple[Shape, ...]:
    return tuple(other if i == t else x.stride() for i, x in enumerate(xs))


def _tensors(work: HeadWork, blank: Tensor) -> dict[str, Tensor]:
    """Return weight, cos and sin, something in the place of what there is not."""
    return {
        "weight": blank if work.weight is None else work.weight.contiguous(),
        "cos": blank if work.cos is None else work.cos,
        "sin": blank if work.sin is None else work.sin,
    }


def _alike(work: HeadWork | None) -> HeadWork | None:
    """Return ``work`` with cos and sin that lie alike: one table of offsets serves both."""
    if work is None or work.cos is None or work.sin is None:
        return work
    if work.cos.stride() == work.sin.stride():
        return work
    return work.again(work.weight, work.cos.contiguous(), work.sin.contiguous())


def _read(x: Tensor, work: HeadWork) -> Tensor:
    """Return ``x`` as the kernels can read it."""
    x = resolved(x)
    # heads that do not lie in one piece are read number by number; triton-ascend 3.2 does not even
    # compile pairs in them
    return x.contiguous() if x.stride(-1) != 1 else x


def _launches(
    kernel: str, t: int, alike: Sequence[Shape], xs: Sequence[Tensor], cut: Cut, seq_dim: int,
    work: HeadWork,
) -> tuple[Launch, ...]:  # fmt: skip
    """Return the launches for tensor ``t`` and what is addressed like it, of these strides."""
    return _planned(
        kernel,
        device_name(xs[t]),
        xs[t].element_size(),
        t,
        tuple(tuple(x.shape) for x in xs),
        tuple(tuple(own if i == t else x.stride() for i, x in enumerate(xs)) for own in alike),
        cut,
        seq_dim,
        _what(work),
    )


def pack_heads(
    xs: list[Tensor],
    works: Sequence[HeadWork | None],
    dims: list[int],
    counts: list[int],
    index: list[int],
    joined: Sequence[int] = (),
    seq_dim: int = 0,
) -> Tensor:
    """See `arithmetic.pack_heads`; one launch per tensor with work, one for the others."""
    if not _is_fit(xs[0]):
        return arithmetic.pack_heads(xs, works, dims, counts, index, joined, seq_dim)
    works = [_alike(work) for work in works]
    cut = (tuple(dims), tuple(counts), tuple(index), tuple(joined))
    buffer = xs[0].new_empty(packed_size([list(x.shape) for x in xs], dims, counts))
    xs = [
        resolved(x) if work is None else _read(x, work) for x, work in zip(xs, works, strict=True)
    ]
    move("pack", xs, buffer, cut, [t for t, work in enumerate(works) if work is None])
    for t, work in enumerate(works):
        if work is None:
            continue
        alike = [xs[t].stride(), _angle_strides(xs[t], work)]
        for one in _launches("pack_rotary", t, alike, xs, cut, seq_dim, work):
            named = _tensors(work, buffer)
            call("pack_rotary", one, buffer.device, x=xs[t], buffer=buffer, **named)
    return buffer


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
    """See `arithmetic.unpack_heads`; each program sums its own share of a weight's gradient."""
    if not _is_fit(buffer):
        return arithmetic.unpack_heads(
            buffer, xs, works, shapes, dims, counts, index, joined, seq_dim
        )
    works = [_alike(work) for work in works]
    cut = (tuple(dims), tuple(counts), tuple(index), tuple(joined))
    buffer = resolved(buffer)
    outs = [buffer.new_empty(shape) for shape in shapes]
    zero_what_nobody_sends(outs, dims, counts, index)
    move("unpack", outs, buffer, cut, [t for t, work in enumerate(works) if work is None])
    weights: list[Tensor | None] = [None] * len(outs)
    for t, work in enumerate(works):
        if work is not None:
            weights[t] = _unpack_one(t, buffer, xs[t], work, outs, cut, seq_dim)
    return outs, weights


def _unpack_one(
    t: int,
    buffer: Tensor,
    x: Tensor | None,
    work: HeadWork,
    outs: list[Tensor],
    cut: Cut,
    seq_dim: int,
) -> Tensor | None:
    """Fill the gradient ``outs[t]`` and return that of its weight."""
    size = outs[t].shape[-1]
    wide = torch.float64 if buffer.dtype == torch.float64 else torch.float32
    total = None if work.weight is None else buffer.new_zeros(size, dtype=wide)
    x = outs[t] if x is None or total is None else _read(x, work)  # without a norm it is not read
    alike = [x.stride(), outs[t].stride(), _angle_strides(x, work)]
    for one in _launches("unpack_rotary", t, alike, outs, cut, seq_dim, work):
        programs = one.grid[0] * one.grid[1] if total is not None else 0
        parts = buffer.new_empty(programs, size, dtype=wide)
        call(
            "unpack_rotary",
            one,
            buffer.device,
            buffer=buffer,
            x=x,
            grad=outs[t],
            grad_weight=parts,
            **_tensors(work, buffer),
        )
        if total is not None:
            total += parts.sum(0)
    return total


def _is_fit(x: Tensor) -> bool:
    return x.dtype in MOVED and x.is_floating_point()
