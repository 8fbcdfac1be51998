"""Plans of kernel calls: what no kernel runs to show."""

from __future__ import annotations

import pytest

from hp_comm.kernels.catalog import arguments, cases, variants, variants_of
from hp_comm.kernels.config import KERNELS, default_launch
from hp_comm.kernels.layout import copies
from hp_comm.kernels.limits import UB_BYTES, alignment, blocks, grid, predict_ub_bytes, shifts
from hp_comm.kernels.plans import merge_launch
from hp_comm.kernels.segments import Segments, move_segments


def _pieces(rows: int, inner: int, *strides: tuple[int, int], count: int = 1) -> Segments:
    return Segments(0, rows, inner, strides, tuple((i, i) for i in range(count)))


def test_every_piece_of_three_tensors_is_dealt_to_one_program() -> None:
    """Whatever the number of programs, each piece of each tensor is visited exactly once."""
    for counts in ([7, 3, 2], [1, 1, 1], [40, 5, 5], [2, 0, 9]):
        for programs in (1, 2, 3, 8, sum(counts)):
            first = [0, *shifts(counts, programs)]
            seen: list[tuple[int, int]] = []
            for program in range(programs):
                for t, count in enumerate(counts):
                    start = program + first[t]
                    start -= programs if start >= programs else 0
                    seen += [(t, piece) for piece in range(start, count, programs)]
            assert sorted(seen) == [(t, p) for t, count in enumerate(counts) for p in range(count)]
            if programs == sum(counts):  # one piece each: all programs work alike
                assert len(seen) == programs


def test_offsets_within_a_tile_fit_32_bits() -> None:
    """A tile of rows that lie far apart has fewer of them."""
    far = blocks(_pieces(4096, 8, (2**22, 1), (8, 1)), 4096)
    assert far.rows * 2**22 <= 2**30 and far.inner == 8
    near = blocks(_pieces(4096, 8, (64, 1), (8, 1)), 4096)
    assert near.rows == 512


def test_a_tile_is_a_power_of_two_and_no_larger_than_asked() -> None:
    """Odd sizes are rounded up and masked; short pieces do not get a long tile."""
    for rows, inner in ((1, 1), (5, 240), (1000, 80), (3, 5000)):
        tile = blocks(_pieces(rows, inner, (inner, 1), (inner, 1)), 4096)
        assert tile.rows & (tile.rows - 1) == tile.inner & (tile.inner - 1) == 0
        assert tile.rows * tile.inner <= 4096 and tile.rows < 2 * rows


def test_alignment_is_what_every_offset_has() -> None:
    """At most 16; a missing summand (-1) has none."""
    assert alignment([0, 64, 160]) == 16
    assert alignment([0, 24, -1]) == 8
    assert alignment([3]) == 1


def test_a_grid_has_a_program_per_tile_or_as_many_as_asked() -> None:
    """And never more than a device takes."""
    assert grid([4, 2, 2], [10, 3, 3], {"tile": 1}) == (8, 10)
    assert grid([4, 2, 2], [10, 3, 3], {"tile": 1, "programs": 40}) == (8, 5)
    assert grid([100], [10], {"tile": 1, "programs": 40}) == (40, 1)
    assert grid([1], [10**6], {"tile": 1})[1] == 65535


def test_the_catalogue_has_every_kernel_with_all_its_arguments() -> None:
    """Each argument is a runtime one or a constant; quick has one shape of each."""
    for quick in (True, False):
        found = list(variants(quick))
        assert {one.kernel for one in found} == set(KERNELS)
        for one in found:
            assert set(one.signature) | set(one.constants) == set(arguments(one.kernel))
            assert not set(one.signature) & set(one.constants)
            assert list(one.signature) == [n for n in arguments(one.kernel) if n in one.signature]


@pytest.mark.parametrize("device", ["ascend910b3", "cuda-sm90"])
def test_default_launches_fit_the_unified_buffer(device: str) -> None:
    """What an untuned device is given is never refused for its size, in any case and dtype."""
    for kernel, case in cases(quick=False):
        for dtype, size in (("bf16", 2), ("fp32", 4)):
            for one in variants_of(kernel, case, dtype, default_launch(device)):
                assert predict_ub_bytes(kernel, size, one.constants) <= UB_BYTES


def test_long_rows_are_cut_so_that_every_core_has_work() -> None:
    """Two batch entries of a chunk of rows are two long rows: not two programs' work."""
    shape = (2, 4, 8192, 1, 576)  # B, chunks of a head-tail gather, rows, heads, size
    strides = (4 * 8192 * 576, 8192 * 576, 576, 576, 1)
    moved = copies((shape,), (strides,), (1,), (2, 2), (0, 3, 1, 2), ())

    segments = move_segments(moved)

    assert sum(one.elements for one in segments) == 2 * 4 * 8192 * 576
    assert max(one.inner for one in segments) <= 1024
    assert all(one.strides == ((1024, 1), (1024, 1)) for one in segments)


def test_a_transposed_tensor_is_read_along_its_own_consecutive_dim() -> None:
    """Of ``[B, H, D, S]`` seen as ``[B, S, H, D]`` a tile has rows of S, few as they are."""
    B, S, H, D = 9, 6, 40, 16
    strides = (H * D * S, 1, D * S, S)
    moved = copies(((B, S, H, D),), (strides,), (2,), (20, 20), (), ())

    segments = move_segments(moved)

    assert sum(one.elements for one in segments) == B * S * H * D
    assert {one.strides[0] for one in segments} == {(1, S)}


@pytest.mark.parametrize("asked", [{}, {"programs": 3}], ids=["a-program-a-tile", "programs"])
@pytest.mark.parametrize("rows", [1, 31, 4096])
def test_a_merge_has_programs_for_all_its_rows(rows: int, asked: dict[str, int]) -> None:
    """As many as tiles, or as asked for, which then walk over all; one along the unused dim."""
    plan = merge_launch(rows, 80, {**default_launch("cuda-sm90"), "tile": 1024, **asked})

    tiles = -(-rows // int(plan.numbers["BLOCK_ROWS"]))
    assert plan.numbers["BLOCK_ROWS"] * plan.numbers["BLOCK_INNER"] <= 1024
    assert plan.grid == (min(tiles, asked.get("programs", tiles)), 1)
