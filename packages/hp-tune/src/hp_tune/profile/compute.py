"""What a rank computes and copies while it is timed; all ranks do so at once, as in a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hp_tune.profile.timing import Clock, Piece

__all__ = ["measure_compute"]

HEADS, HEAD_SIZE = 4, 64


def measure_compute(
    clock: Clock, dtype: torch.dtype, *, lengths: list[int], copied: int, gemm: int, rounds: int
) -> dict[str, Any]:
    """Return rows of matrix products, copies, attention and launches.

    ``ms`` is wall time; ``busy_ms`` processor time of the busiest rank, where that is the device.

    Args:
        clock: Of this rank.
        dtype: Of products and attention.
        lengths: Sequence lengths of attention: causal, and a quarter of the rows on all keys, as a
            rank of a gather sees them; all rows on all keys of the longest.
        copied: Bytes of a copy.
        gemm: Rows and columns of the largest product; smaller ones are measured, too.
        rounds: Timed rounds.
    """
    device = clock.device
    pieces: dict[str, Piece] = {}
    rows: list[dict[str, Any]] = []

    def add(name: str, run: Callable[[], object], **row: Any) -> None:
        run()
        ms = clock.longest([clock.once(Piece(run))[0]])[0]
        pieces[name] = Piece(run, max(1, min(200, int(2.0 / max(ms, 1e-3)))))
        rows.append({"name": name, **row})

    for size in (gemm // 4, gemm // 2, gemm):
        a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
        add(f"gemm {size}", _product(a, b), what="gemm", flops=2 * size**3)
    whole = torch.zeros(copied, dtype=torch.uint8, device=device)
    other = torch.empty_like(whole)
    add("copy dense", lambda: other.copy_(whole), what="copy", bytes=copied)
    heads = torch.zeros(copied // (HEADS * HEAD_SIZE * 4), HEADS, HEAD_SIZE, device=device)
    add("copy pack", lambda: heads.transpose(0, 1).contiguous(), what="pack",
        bytes=heads.numel() * 4)  # fmt: skip
    small = torch.zeros(16, device=device)
    add("launch", lambda: small.add_(1), what="launch")
    longest = max(lengths)
    shapes = [(length, length, True) for length in lengths]
    shapes += [(length // 4, length, False) for length in lengths] + [(longest, longest, False)]
    for queries, keys, causal in dict.fromkeys(shapes):
        pairs = queries * (queries + 1) // 2 if causal else queries * keys
        flops = 4 * HEADS * HEAD_SIZE * pairs
        row = {"rows": queries * HEADS, "length": queries, "flops": flops, "causal": causal}
        forward, backward = _attention(queries, keys, causal, dtype, device)
        name = f"{queries} x {keys}{' causal' if causal else ''}"
        add(f"attention {name}", forward, what="attention", **row)
        add(f"attention backward {name}", backward, what="attention backward", **row)
    found = clock.measure(pieces, rounds)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "rows": [
            {**row, "ms": times.ms, "low": times.low, "high": times.high}
            | ({"busy_ms": times.busy_ms} if device.type == "cpu" else {})
            for row, times in zip(rows, found.values(), strict=True)
        ],
    }


def _product(a: Tensor, b: Tensor) -> Callable[[], object]:
    return lambda: a @ b


def _attention(
    queries: int, keys: int, causal: bool, dtype: torch.dtype, device: torch.device
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return forward and backward, each alone, of one fused attention, ``[1, H, L, D]``."""
    q = torch.randn(1, HEADS, queries, HEAD_SIZE, dtype=dtype, device=device, requires_grad=True)
    k, v = (
        torch.randn(1, HEADS, keys, HEAD_SIZE, dtype=dtype, device=device, requires_grad=True)
        for _ in range(2)
    )
    upstream = torch.randn_like(q)

    def forward() -> Tensor:
        with torch.no_grad():
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    output = F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def backward() -> object:
        return torch.autograd.grad(output, (q, k, v), upstream, retain_graph=True)

    return forward, backward
