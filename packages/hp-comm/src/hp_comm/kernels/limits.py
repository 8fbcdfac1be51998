"""From pieces to a launch: block sizes, grid, and whether a block fits on chip; no torch here.

What fits is predicted for Ascend's unified buffer, in which every tile of a program must lie at
the same time. The constants are those of bishengir-compile 1.2.0, found by compiling tiles of
growing size until it refused; `nox -s npu_compile` holds prediction and compiler together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from hp_comm.kernels.segments import Segments

__all__ = [
    "TENSORS",
    "Blocks",
    "alignment",
    "blocks",
    "bundles",
    "grid",
    "head_blocks",
    "power_of_two",
    "shifts",
]

TENSORS = 3
"""Tensors that one launch of `pack` or `unpack` serves."""

LARGEST_GRID = 65535  # of CUDA, in any but the first dim

UB_BYTES = 192 * 1024
"""Unified buffer of a vector core of Ascend 910B and 910_93."""

LINE = 32
"""Bytes to which a row of a tile is rounded up in the unified buffer."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The tile that a program holds at a time."""

    rows: int
    inner: int


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def alignment(offsets: Iterable[int]) -> int:
    """Return the power of two, at most 16, that divides every offset that is one."""
    common = gcd(16, *(offset for offset in offsets if offset >= 0))
    return common & -common


def blocks(pieces: Segments, tile: int) -> Blocks:
    """Return a tile of at most ``tile`` elements, a power of two: whole rows if they fit."""
    inner = min(power_of_two(pieces.inner), tile)
    return Blocks(min(max(tile // inner, 1), power_of_two(pieces.rows)), inner)


def head_blocks(rows: int, size: int, tile: int) -> int:
    """Return how many rows of whole heads of ``size`` make a tile of at most ``tile`` elements."""
    return min(max(tile // power_of_two(size), 1), power_of_two(rows))


def bundles(segments: Sequence[Segments]) -> list[tuple[Segments, ...]]:
    """Group pieces by launch, the largest together."""
    order = sorted(segments, key=lambda one: -one.elements)
    return [tuple(order[i : i + TENSORS]) for i in range(0, len(order), TENSORS)]


def grid(
    pieces: Sequence[int], row_blocks: Sequence[int], launch: Mapping[str, int]
) -> tuple[int, int]:
    """Return the number of programs along pieces and along rows.

    One per tile, or as many as ``launch["programs"]`` says, which then walk over all tiles.
    """
    along_pieces, along_rows = max(sum(pieces), 1), min(max(row_blocks), LARGEST_GRID)
    programs = launch.get("programs")
    if programs is None:
        return along_pieces, along_rows
    along_pieces = min(along_pieces, programs)
    return along_pieces, min(along_rows, max(programs // along_pieces, 1))


def shifts(pieces: Sequence[int], programs: int) -> list[int]:
    """Return what deals out the pieces of the second and third tensor after those of the first."""
    return [-sum(pieces[:i]) % programs for i in range(1, TENSORS)]


def predict_ub_bytes(
    kernel: str, element_size: int, numbers: Mapping[str, float], multibuffer: bool = False
) -> int:
    """Return about how many bytes of the unified buffer a program needs, rather too many.

    Args:
        kernel: Its name.
        element_size: Bytes of an element of the data.
        numbers: Its compile-time arguments.
        multibuffer: Whether a tile is loaded while the one before is worked on. The compiler gives
            it up where it does not fit; what it refuses does not fit without.
    """
    count = {name: int(n) for name, n in numbers.items()}
    if kernel in ("pack", "unpack"):
        return sum(_moved(count, i, element_size) for i in range(count["TENSORS"])) * (
            2 if multibuffer else 1
        )
    rows = count["BLOCK_ROWS"]
    if kernel.startswith("merge"):
        tile = rows * _line(count["BLOCK_INNER"] * 4)
        tiles = 2.6 if kernel == "merge" else 5.2
        return int(tile * (tiles + (2 if multibuffer else 0))) + 5 * rows * LINE
    tile = 0
    if count["ROTARY"]:
        tile += rows * _line(count["BLOCK_PAIRS"] * 4) * (2 if count["INTERLEAVED"] else 1)
    if count["ROTARY"] < count["SIZE"]:
        tile += rows * _line(count["BLOCK_REST"] * 4)
    tiles = 6.0 if kernel == "pack_rotary" else 6.6
    if count.get("SUMMANDS", 1) > 1:
        tiles += 1
    return int(tile * (tiles + (5 if multibuffer else 0))) + 3 * rows * LINE


def _line(size: int) -> int:
    return -(-size // LINE) * LINE


def _moved(count: Mapping[str, int], i: int, element_size: int) -> int:
    """Return the bytes of the tile of tensor ``i`` of a move."""
    rows, inner = count[f"BLOCK_ROWS{i}"], count[f"BLOCK_INNER{i}"]
    if count[f"X_IN{i}"] != 1:  # element by element, each on a line of its own
        return rows * inner * LINE
    if count.get(f"SUMMANDS{i}", 1) > 1:
        return int(3.5 * rows * _line(inner * 4))
    return rows * _line(inner * element_size)
