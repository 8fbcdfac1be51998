"""The call of a kernel, worked out from a layout: grid, table and every number; no torch here.

What runs (`hp_comm.kernels.launch`) and what is compiled to be checked (`hp_comm.kernels.catalog`)
read the same calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hp_comm.kernels.limits import (
    TENSORS,
    alignment,
    blocks,
    grid,
    head_blocks,
    power_of_two,
    shifts,
)
from hp_comm.kernels.segments import Segments

__all__ = ["Launch", "Work", "compiler", "head_launch", "merge_launch", "move_launch"]

Work = tuple[int, bool, bool, float]
"""Rotated numbers of a head, whether pairs are interleaved, whether there is a norm, its eps."""


@dataclass(frozen=True, eq=False)
class Launch:
    """One call of a kernel: everything but the tensors.

    Attributes:
        tensors: Which tensors of the operator's call take part.
        table: Offsets of all pieces, one line after the other.
        grid: Programs along pieces and along rows.
        numbers: The kernel's other arguments, by name.
        options: What the compiler takes.
    """

    tensors: tuple[int, ...]
    table: tuple[int, ...]
    grid: tuple[int, int]
    numbers: Mapping[str, float]
    options: Mapping[str, int]


def move_launch(kernel: str, bundle: Sequence[Segments], launch: Mapping[str, int]) -> Launch:
    """Return the call of ``pack`` or ``unpack`` for up to three kinds of pieces."""
    counts = [len(one.table) for one in bundle]
    tiles = [blocks(one, launch["tile"]) for one in bundle]
    row_blocks = [-(-one.rows // tile.rows) for one, tile in zip(bundle, tiles, strict=True)]
    programs = grid(counts, row_blocks, launch)
    table = tuple(n for one in bundle for line in one.table for n in line)
    numbers: dict[str, int] = {"TENSORS": len(bundle), "ALIGN": alignment(table)}
    numbers["shift1"], numbers["shift2"] = shifts(counts, programs[0])
    if kernel == "unpack":
        lengths = [sum(map(len, one.table)) for one in bundle]
        numbers["table1"], numbers["table2"] = lengths[0], sum(lengths[:2])
    for i in range(TENSORS):
        one, tile = (bundle[i], tiles[i]) if i < len(bundle) else (bundle[0], tiles[0])
        (x_row, x_in), (b_row, _) = one.strides
        numbers |= {
            f"n{i}": len(one.table) if i < len(bundle) else 0,
            f"rows{i}": one.rows,
            f"inner{i}": one.inner,
            f"x_row{i}": x_row,
            f"b_row{i}": b_row,
            f"X_IN{i}": x_in,
            f"BLOCK_ROWS{i}": tile.rows,
            f"BLOCK_INNER{i}": tile.inner,
        }
        if kernel == "unpack":
            width = len(one.table[0])
            numbers[f"SUMMANDS{i}"] = 1 if width == 2 else (width - 1) // 2
    return Launch(tuple(one.t for one in bundle), table, programs, numbers, compiler(launch))


def compiler(launch: Mapping[str, int]) -> dict[str, int]:
    """Return what of a launch config is for the compiler, not for the kernel."""
    return {name: n for name, n in launch.items() if name not in ("tile", "programs")}


def head_launch(kernel: str, segments: Segments, work: Work, launch: Mapping[str, int]) -> Launch:
    """Return the call of ``pack_rotary`` or ``unpack_rotary`` for one kind of pieces.

    Args:
        kernel: Its name.
        segments: Pieces of one head each.
        work: See `Work`.
        launch: See `hp_comm.kernels.config`.
    """
    rotary, interleaved, norm, eps = work
    size, rows = segments.inner, segments.rows
    strides = [row for row, _ in segments.strides]
    block_rows = head_blocks(rows, size, launch["tile"], strides)
    programs = grid([len(segments.table)], [-(-rows // block_rows)], launch)
    table = tuple(n for line in segments.table for n in line)
    (x_row, x_in), *others = segments.strides
    numbers: dict[str, float] = {
        "count": len(segments.table),
        "eps": eps,
        "rows": rows,
        "x_row": x_row,
        "SIZE": size,
        "ROTARY": rotary,
        "INTERLEAVED": interleaved,
        "NORM": norm,
        "X_IN": x_in,
        "ALIGN": alignment(table),
        "BLOCK_ROWS": block_rows,
        "BLOCK_PAIRS": power_of_two(rotary // 2),
        "BLOCK_REST": power_of_two(size - rotary),
    }
    if kernel == "pack_rotary":
        (c_row, c_in), (b_row, _) = others
        numbers |= {"c_row": c_row, "C_IN": c_in, "b_row": b_row}
    else:
        (g_row, _), (c_row, c_in), _ = others
        summands = (len(segments.table[0]) - 3) // 2
        numbers |= {"g_row": g_row, "c_row": c_row, "C_IN": c_in, "SUMMANDS": summands}
    return Launch((segments.t,), table, programs, numbers, compiler(launch))


def merge_launch(rows: int, size: int, launch: Mapping[str, int]) -> Launch:
    """Return the call of ``merge`` or ``merge_backward`` for ``rows`` outputs of ``size``."""
    block_rows = head_blocks(rows, size, launch["tile"])
    programs = min(-(-rows // block_rows), launch.get("programs", rows))
    numbers = {
        "rows": rows,
        "SIZE": size,
        "BLOCK_ROWS": block_rows,
        "BLOCK_INNER": power_of_two(size),
    }
    return Launch((), (), (programs, 1), numbers, compiler(launch))
