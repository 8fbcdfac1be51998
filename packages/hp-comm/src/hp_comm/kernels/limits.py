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
    inner = _within(inner, [of_inner for _, of_inner in pieces.strides])
    rows = min(max(tile // inner, 1), power_of_two(pieces.rows))
    return Blocks(_within(rows, [row for row, _ in pieces.strides]), inner)


def head_blocks(rows: int, size: int, tile: int, strides: Iterable[int] = ()) -> int:
    """Return how many rows of whole heads of ``size`` make a tile of at most ``tile`` elements."""
    return _within(min(max(tile // power_of_two(size), 1), power_of_two(rows)), strides)


def _within(count: int, strides: Iterable[int]) -> int:
    """Return at most ``count``, a power of two, so that offsets inside a tile fit 32 bits."""
    largest = max(map(abs, strides), default=0)
    while count > 1 and count * largest >= 2**30:
        count //= 2
    return count


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


def predict_ub_bytes(kernel: str, element_size: int, numbers: Mapping[str, float]) -> int:
    """Return about how many bytes of the unified buffer a program needs, rather too many.

    That is without double buffering, which the compiler gives up before it refuses a kernel.

    Args:
        kernel: Its name.
        element_size: Bytes of an element of the data.
        numbers: Its compile-time arguments.
    """
    count = {name: int(n) for name, n in numbers.items()}
    if kernel in ("pack", "unpack"):
        # one tensor after the other, in the same place
        return max(_moved(kernel, count, i, element_size) for i in range(count["TENSORS"]))
    rows = count["BLOCK_ROWS"]
    if kernel.startswith("merge"):
        tile = rows * _line(count["BLOCK_INNER"] * 4)
        tiles = MERGED[kernel, element_size < 4]
        return int(tiles * tile) + 48 * rows  # a number per row takes a line, or half of one
    pairs = 2 * _line(count["BLOCK_PAIRS"] * 4) if count["ROTARY"] else 0
    rest = _line(count["BLOCK_REST"] * 4) if count["ROTARY"] < count["SIZE"] else 0
    of_pairs, of_rest = _of_heads(kernel, count, element_size)
    single = 0  # what is read element by element, each on a line of its own
    if count["X_IN"] != 1 and (kernel == "pack_rotary" or count["NORM"]):
        single = LINE * (pairs + rest) // 4
    return int(rows * (of_pairs * pairs + of_rest * rest + single))


MERGED = {
    ("merge", True): 2.6,
    ("merge", False): 2.0,
    ("merge_backward", True): 4.1,
    ("merge_backward", False): 4.1,
}
"""fp32 tiles that are alive at once, by whether the data is narrower than fp32."""


def _of_heads(kernel: str, count: Mapping[str, int], element_size: int) -> tuple[float, float]:
    """Return how many fp32 tiles of pairs, and of the rest of a head, are alive at once."""
    packs = kernel == "pack_rotary"
    copied = element_size / 4  # the rest of a head is only copied, as it is
    if count["INTERLEAVED"]:
        if count["NORM"]:
            return 8.0, 1.25 if packs else 2.25
        return 8.0, copied if packs else 1.25
    if count["NORM"]:
        return (2.25, 2.25) if packs else (4.5, 4.0)
    if packs:
        return 2.75, copied
    return 2.5, 1.25 if count["SUMMANDS"] > 1 else copied


def _line(size: int) -> int:
    return -(-size // LINE) * LINE


def _moved(kernel: str, count: Mapping[str, int], i: int, element_size: int) -> int:
    """Return the bytes that tensor ``i`` of a move takes."""
    rows, inner = count[f"BLOCK_ROWS{i}"], count[f"BLOCK_INNER{i}"]
    strided = count[f"X_IN{i}"] != 1  # element by element, each on a line of its own
    if count.get(f"SUMMANDS{i}", 1) > 1:  # a sum in fp32, a summand, and that as it was loaded
        tile = rows * inner * LINE if strided else rows * _line(inner * 4)
        return tile * (3 if element_size < 4 else 2)
    tile = rows * _line(inner * element_size)
    if not strided:
        return tile
    return rows * inner * LINE + (tile if kernel == "pack" else 0)
