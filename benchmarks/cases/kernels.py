"""The Triton kernels on a GPU or an NPU: right first, then GB/s against a copy of the same bytes.

One round times a device-to-device copy and each kernel, forward and backward; ``share`` is the
median over rounds of the copy's time over the kernel's, both for the bytes that the kernel reads
and writes. The limit is 0.85 from 64 MiB on, and 1 / 1.1 for packing q, k and v.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hp_comm.kernels import HeadWork, arithmetic, reference
from hp_mesh.testing import assert_close

DEVICES = ("cuda", "npu")
RANKS, HEAD_SIZE = 8, 128
MIB = (16, 64, 256)
LARGE, SHARE, PACK_SHARE = 64, 0.85, 1 / 1.1


def run(rounds: int, device: str) -> list[dict[str, Any]]:
    """Return a row for each kernel and size, bf16."""
    if device not in DEVICES:
        raise SystemExit(f"kernels runs on {' or '.join(DEVICES)} (--device), not on {device}")
    if importlib.util.find_spec("triton") is None:
        raise SystemExit(f"kernels on {device} needs Triton: the extra hp-comm[{device}]")
    if device == "npu":
        import torch_npu  # noqa: F401
    if not torch.get_device_module(device).is_available():
        raise SystemExit(f"kernels needs a device, and torch {torch.__version__} finds no {device}")
    rows = []
    for mib in MIB:
        for name, bound, call, expected in calls(device, mib):
            rows.append(measure(name, mib, bound, call, expected, rounds, device))
    return rows


Call = tuple[str, int, Callable[[], list[Tensor]], Callable[[], list[Tensor]]]


def calls(device: str, mib: int) -> list[Call]:
    """Return name, bytes read and written, the kernel and its definition, of about ``mib`` each."""
    from hp_comm.kernels import launch, launch_heads, launch_merge  # these import triton

    heads = (32, 8, 8)
    rows = mib * 2**20 // (sum(heads) * HEAD_SIZE * 2)
    rows -= rows % RANKS
    make = torch.Generator(device).manual_seed(1)

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=make, device=device).to(dtype)

    qkv = [randn(1, rows, n, HEAD_SIZE) for n in heads]
    cut = ([2] * 3, [n // RANKS for n in heads for _ in range(RANKS)], [], [1, 2])
    shapes = [list(x.shape) for x in qkv]
    buffer = reference.pack(qkv, *cut)
    moved = 2 * buffer.numel() * 2
    angle = randn(1, rows, 1, HEAD_SIZE // 2, dtype=torch.float32)
    work = HeadWork(randn(HEAD_SIZE), 1e-6, angle.cos(), angle.sin())
    works = [work, work, None]
    prepared = (*cut, 1)
    tables = 2 * 4 * angle.numel() * 2  # cos and sin, for q and for k
    normed = (qkv[0].numel() + qkv[1].numel()) * 2  # what a norm reads again in backward
    out = [randn(rows * sum(heads), HEAD_SIZE) for _ in range(3)]
    lse = [randn(rows * sum(heads), dtype=torch.float32) for _ in range(3)]
    merging = (out[0], lse[0], out[1], lse[1])
    outs, lses = out[0].numel() * 2, lse[0].numel() * 4

    def flat(found: tuple[list[Tensor], list[Tensor | None]]) -> list[Tensor]:
        return [x for part in found for x in part if x is not None]

    def unpacked(module: Any) -> list[Tensor]:
        return flat(module.unpack_heads(buffer, [*qkv[:2], None], works, shapes, *prepared))

    return [
        (
            "pack q, k, v",
            moved,
            lambda: [launch.pack(qkv, *cut)],
            lambda: [reference.pack(qkv, *cut)],
        ),
        (
            "unpack q, k, v",
            moved,
            lambda: launch.unpack(buffer, shapes, *cut),
            lambda: reference.unpack(buffer, shapes, *cut),
        ),
        (
            "pack, QK-norm and rotary",
            moved + tables,
            lambda: [launch_heads.pack_heads(qkv, works, *prepared)],
            lambda: [arithmetic.pack_heads(qkv, works, *prepared)],
        ),
        (
            "its backward",
            moved + tables + normed,
            lambda: unpacked(launch_heads),
            lambda: unpacked(arithmetic),
        ),
        (
            "merge",
            3 * (outs + lses),
            lambda: list(launch_merge.merge(*merging)),
            lambda: list(arithmetic.merge(*merging)),
        ),
        (
            "its backward",
            5 * outs + 5 * lses,
            lambda: list(launch_merge.merge_backward(*merging, out[2], lse[2])),
            lambda: list(arithmetic.merge_backward(*merging, out[2], lse[2])),
        ),
    ]


def measure(
    name: str,
    mib: int,
    bound: int,
    call: Callable[[], list[Tensor]],
    expected: Callable[[], list[Tensor]],
    rounds: int,
    device: str,
) -> dict[str, Any]:
    """Check, then time one kernel beside a copy."""
    is_right = True
    try:
        for one, other in zip(call(), expected(), strict=True):
            wide = one.dtype == torch.float32 and other.ndim == 1 and other.numel() == HEAD_SIZE
            dtype = torch.bfloat16 if wide else one.dtype  # a weight's gradient sums bf16 numbers
            assert_close(one.to(dtype), other.to(dtype), kind="grad")
    except AssertionError as error:
        print(f"{name}: {error}")
        is_right = False
    half = torch.empty(bound // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(half)
    copies, times = [], []
    for _ in range(max(rounds, 1) + 3):  # the first ones compile and warm up
        copies.append(timed(lambda: target.copy_(half), device))
        times.append(timed(call, device))
    share = statistics.median(c / t for c, t in zip(copies[3:], times[3:], strict=True))
    limit = PACK_SHARE if name.startswith("pack q") else SHARE
    return {
        "case": name,
        "MiB": mib,
        "GB/s": bound / statistics.median(times[3:]) / 1e9,
        "copy GB/s": bound / statistics.median(copies[3:]) / 1e9,
        "share": share,
        "limit": limit if mib >= LARGE else None,
        "holds": mib < LARGE or share >= limit,
        "checked": is_right,
    }


def timed(call: Callable[[], object], device: str, repeats: int = 10) -> float:
    """Return the seconds of a call on the device, without the host's part where calls queue up."""
    runtime = torch.get_device_module(device)
    start, end = runtime.Event(enable_timing=True), runtime.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    runtime.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / repeats
