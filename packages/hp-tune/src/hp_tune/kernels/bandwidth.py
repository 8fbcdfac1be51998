"""What a launch on Ascend would cost if memory bandwidth were all: a model, for ranking only.

``time = bytes / (HBM bandwidth x efficiency(tile bytes) x balance)``. Nothing here was measured on
a device; what is assumed is said below, and shows in every result that follows from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hp_comm.kernels.plans import Launch

__all__ = ["ASSUMED", "Estimate", "estimate"]

HBM_GBPS = 1600.0
"""Of 910B1 to B4 with 64 GB and of one die of 910_93, by the makers' product pages."""

STREAM, HALF_BYTES, SINGLE_BUFFER, BLOCK_BYTES, WAVE_MS = 0.6, 4096, 0.6, 32, 0.002
ASSUMED = (
    f"HBM {HBM_GBPS:g} GB/s (product page); assumed: {STREAM:g} of it in long copies, half of that "
    f"at {HALF_BYTES} bytes a tile, x{SINGLE_BUFFER:g} without double buffering, {BLOCK_BYTES} "
    f"bytes moved per element where access is element by element, {WAVE_MS * 1e3:g} us a wave"
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Modelled time of a call, ms; its bandwidth; and the factors of its efficiency."""

    ms: float
    GBps: float
    efficiency: float
    balance: float
    tile_bytes: int


def estimate(
    kernel: str,
    launches: Sequence[Launch],
    *,
    num_bytes: int,
    element_size: int,
    cores: int,
    double_buffered: bool,
    by_element: bool,
) -> Estimate:
    """Return what a kernel's launches would cost.

    Args:
        kernel: Name of the kernel.
        launches: Its calls for one layout, with their grids.
        num_bytes: What is read and written at least.
        element_size: Bytes of an element of the data.
        cores: Vector cores of the device.
        double_buffered: Whether the compiler kept double buffering.
        by_element: Whether it moves single elements, or rows one by one.
    """
    worst_balance, smallest, waves = 1.0, 0, 0
    for one in launches:
        tiles, tile_bytes = _tiles(kernel, one.numbers, element_size)
        programs = max(one.grid[0] * one.grid[1], 1)
        per_wave = -(-programs // cores)
        rounds = -(-tiles // programs) * per_wave
        worst_balance = min(worst_balance, tiles / (cores * rounds))
        smallest = tile_bytes if not smallest else min(smallest, tile_bytes)
        waves += per_wave
    efficiency = STREAM * smallest / (smallest + HALF_BYTES)
    if not double_buffered:
        efficiency *= SINGLE_BUFFER
    if by_element:
        efficiency *= min(element_size / BLOCK_BYTES, 1.0)
    reached = HBM_GBPS * efficiency * min(worst_balance, 1.0)
    ms = num_bytes / (reached * 1e6) + waves * WAVE_MS
    return Estimate(ms, num_bytes / ms / 1e6, efficiency, worst_balance, smallest)


def _tiles(kernel: str, numbers: Mapping[str, float], element_size: int) -> tuple[int, int]:
    """Return how many tiles a launch has, and the bytes of the largest."""
    n = {name: int(value) for name, value in numbers.items()}
    if kernel in ("pack", "unpack"):
        count, largest = 0, 0
        for i in range(n["TENSORS"]):
            rows, inner = n[f"BLOCK_ROWS{i}"], n[f"BLOCK_INNER{i}"]
            count += n[f"n{i}"] * -(-n[f"rows{i}"] // rows) * -(-n[f"inner{i}"] // inner)
            held = min(rows, n[f"rows{i}"]) * min(inner, n[f"inner{i}"])
            largest = max(largest, held * element_size)
        return count, largest
    rows = min(n["BLOCK_ROWS"], n["rows"])
    return n.get("count", 1) * -(-n["rows"] // rows), rows * n["SIZE"] * element_size
