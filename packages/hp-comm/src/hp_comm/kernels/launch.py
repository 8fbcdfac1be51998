"""The kernels of `hp_comm.kernels._triton` on real tensors: plan, table, grid, call.

Offers what `hp_comm.kernels.reference` offers, for tensors on a GPU or an NPU, or on a CPU under
``TRITON_INTERPRET=1``. What is planned for a layout is kept: shapes repeat from step to step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hp_comm.kernels import _triton, reference
from hp_comm.kernels.config import launch_of
from hp_comm.kernels.fitting import fitting
from hp_comm.kernels.layout import Shape, copies, packed_size
from hp_comm.kernels.limits import TENSORS, bundles
from hp_comm.kernels.plans import Launch, move_launch
from hp_comm.kernels.segments import move_segments, sum_segments

__all__ = ["MOVED", "Cut", "call", "device_name", "move", "on", "pack", "resolved", "unpack"]

Cut = tuple[Shape, Shape, Shape, Shape]
"""dims, counts, index and joined of a call; see `hp_comm.kernels.layout`."""

MOVED = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
MOVED |= {torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64}
"""Dtypes that Triton knows on every device; others take the reference."""


@lru_cache(maxsize=512)
def _planned(
    kernel: str,
    device: str,
    element_size: int,
    shapes: tuple[Shape, ...],
    strides: tuple[Shape, ...],
    cut: Cut,
    only: tuple[int, ...],
) -> tuple[Launch, ...]:
    """Return the launches that move the tensors ``only`` of a layout."""
    found = [copy for copy in copies(shapes, strides, *cut) if copy.t in only]
    segments = move_segments(found) if kernel == "pack" else sum_segments(found)
    if not segments:
        return ()
    largest = max(segments, key=lambda one: one.elements)
    sizes = {"rows": largest.rows, "inner": largest.inner, "element_size": element_size}
    launch = launch_of(kernel, device, sizes)
    return fitting(
        kernel,
        device,
        element_size,
        launch,
        lambda one: [move_launch(kernel, bundle, one) for bundle in bundles(segments)],
    )


@lru_cache(maxsize=1024)
def _table(one: Launch, device: torch.device) -> Tensor:
    """Return the table on the device; a launch is itself and no other, so the key is short."""
    return torch.tensor(one.table, dtype=torch.int64, device=device)


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make ``device`` the one that kernels are launched on."""
    if device.type == "cpu" or device.index == torch.accelerator.current_device_index():
        return contextlib.nullcontext()
    return torch.accelerator.device_index(device.index)


def device_name(x: Tensor) -> str:
    """Return the device as launch configs name it: ``cuda-sm90``, ``ascend910b3``, ``cpu``."""
    return _name_of(x.device)


@lru_cache(maxsize=64)
def _name_of(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"cuda-sm{major}{minor}"
    if device.type == "npu":
        npu: Any = getattr(torch, "npu", None)  # torch_npu adds it
        return str(npu.get_device_name(device)).lower()
    return device.type


def call(kernel: str, one: Launch, device: torch.device, **tensors: Tensor) -> None:
    """Launch a kernel."""
    options = {} if device.type == "cpu" else one.options
    with on(device):
        getattr(_triton, kernel)[one.grid](
            table=_table(one, device), **tensors, **one.numbers, **options
        )


def move(
    kernel: str, xs: Sequence[Tensor], buffer: Tensor, cut: Cut, only: Sequence[int] | None = None
) -> None:
    """Move the tensors ``only`` of ``xs`` into the buffer, or out of it."""
    launches = _planned(
        kernel,
        device_name(buffer),
        buffer.element_size(),
        tuple(tuple(x.shape) for x in xs),
        tuple(x.stride() for x in xs),
        cut,
        tuple(range(len(xs)) if only is None else only),
    )
    for one in launches:
        tensors = [xs[t] for t in one.tensors]
        tensors += [tensors[0]] * (TENSORS - len(tensors))
        named = {f"x{i}": x for i, x in enumerate(tensors)}
        call(kernel, one, buffer.device, buffer=buffer, **named)


def resolved(x: Tensor) -> Tensor:
    """Return ``x`` with the numbers that it stands for in memory."""
    return x.resolve_conj().resolve_neg() if x.is_neg() or x.is_conj() else x


def pack(
    xs: list[Tensor],
    dims: list[int],
    counts: list[int],
    index: list[int],
    joined: Sequence[int] = (),
) -> Tensor:
    """See `reference.pack`; one launch for up to three tensors."""
    if xs[0].dtype not in MOVED:
        return reference.pack(xs, dims, counts, index, joined)
    buffer = xs[0].new_empty(packed_size([list(x.shape) for x in xs], dims, counts))
    cut = (tuple(dims), tuple(counts), tuple(index), tuple(joined))
    move("pack", [resolved(x) for x in xs], buffer, cut)
    return buffer


def unpack(
    buffer: Tensor,
    shapes: list[list[int]],
    dims: list[int],
    counts: list[int],
    index: list[int],
    joined: Sequence[int] = (),
) -> list[Tensor]:
    """See `reference.unpack`; sums run in fp32 and are rounded once."""
    if buffer.dtype not in MOVED or (index and not buffer.is_floating_point()):
        return reference.unpack(buffer, shapes, dims, counts, index, joined)
    outs = [buffer.new_empty(shape) for shape in shapes]
    reference.zero_what_nobody_sends(outs, dims, counts, index)
    cut = (tuple(dims), tuple(counts), tuple(index), tuple(joined))
    move("unpack", outs, resolved(buffer), cut)
    return outs
