"""Packing q, k and v for one all-to-all on a CPU, against a plain copy of the same bytes.

One round times the copy, then pack and unpack, one thread; ``ratio`` is the median over rounds of
a kernel's time over that of the copy. The limit is 1.5.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hp_comm.kernels import pack, unpack
from hp_mesh.testing import randn

LIMIT = 1.5
ROWS, HEADS, HEAD_SIZE, RANKS = 8192, (32, 8, 8), 128, 8
LAYOUTS = {"BSHD": (1, 2), "BNSD": (2, 1)}


def run(rounds: int) -> list[dict[str, Any]]:
    """Return a row for each direction, layout and dtype."""
    torch.set_num_threads(1)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for layout, (seq_dim, head_dim) in LAYOUTS.items():
            xs = [randn(1, ROWS, heads, HEAD_SIZE, dtype=dtype) for heads in HEADS]
            xs = [x.transpose(1, 2).contiguous() if layout == "BNSD" else x for x in xs]
            cut = (
                [head_dim] * 3,
                [heads // RANKS for heads in HEADS for _ in range(RANKS)],
                [],
                [seq_dim, head_dim],
            )
            rows += measure(f"{layout}, {dtype}".replace("torch.", ""), xs, cut, rounds)
    return rows


def measure(name: str, xs: list[Tensor], cut: Any, rounds: int) -> list[dict[str, Any]]:
    """Check, then time both directions."""
    with torch.no_grad():
        buffer = pack(xs, *cut)
        shapes = [list(x.shape) for x in xs]
        back = unpack(buffer, shapes, *cut)
        is_right = all(torch.equal(x, y) for x, y in zip(xs, back, strict=True))
        like = torch.cat([x.flatten() for x in xs])
        copy = lambda: torch.empty_like(like).copy_(like)  # noqa: E731
        ways: dict[str, Callable[[], object]] = {
            "pack": lambda: pack(xs, *cut),
            "unpack": lambda: unpack(buffer, shapes, *cut),
        }
        ratios: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds + 1):
            plain = timed(copy)
            for way, call in ways.items():
                ratios[way].append(timed(call) / plain)
    rows = []
    for way, found in ratios.items():
        ratio = statistics.median(found[1:])
        rows.append(
            {
                "case": f"{way}, {name}",
                "MB": like.numel() * like.element_size() / 1e6,
                "ratio": ratio,
                "limit": LIMIT,
                "holds": ratio <= LIMIT,
                "checked": is_right,
            }
        )
    return rows


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
