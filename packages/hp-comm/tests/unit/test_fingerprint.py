"""A fingerprint follows from what rows hold, not from how they lie in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hp_comm.fingerprint import FINGERPRINT_BYTES, NO_FINGERPRINT, LocalRows
from hp_mesh.testing import largest_allocation, randn


def of(x: Tensor, seq_dim: int = 1) -> bytes:
    found = LocalRows("x", x, seq_dim).fingerprint()
    assert len(found) == FINGERPRINT_BYTES
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
@pytest.mark.parametrize("rows", [2, 7, 32, 33, 500])
def test_equal_rows_have_one_fingerprint_whatever_their_strides(
    dtype: torch.dtype, rows: int
) -> None:
    """Dense, transposed, expanded with a gradient: equal elements are what counts."""
    x = (randn(2, rows, 3, 5) * 100).to(dtype)
    found = of(x)
    assert found != NO_FINGERPRINT
    assert of(x.transpose(1, 2).contiguous().transpose(1, 2)) == found
    assert of(x.movedim(1, 0).contiguous(), 0) == of(x.movedim(1, 0), 0) == found
    other = (randn(2, rows, 3, 5, seed=1) * 100).to(dtype)
    assert of(other) != found


def test_each_end_of_the_sequence_is_looked_at() -> None:
    """Ranks whose sequences begin alike, or end alike, are told apart."""
    x = randn(2, 500, 3, 5)
    for row in (0, -1):
        other = x.clone()
        other[:, row] += 1
        assert of(other) != of(x)


def test_rows_that_are_all_alike_say_nothing() -> None:
    """Zeros, padding, one token again and again, one row, no row; NaN is compared as bits."""
    assert of(torch.zeros(2, 40, 3, 5)) == NO_FINGERPRINT
    assert of(randn(2, 1, 3, 5).expand(2, 40, 3, 5)) == NO_FINGERPRINT
    assert of(torch.full((2, 40, 3), torch.nan)) == NO_FINGERPRINT
    assert of(randn(2, 1, 3, 5)) == NO_FINGERPRINT
    assert of(randn(2, 0, 3, 5)) == NO_FINGERPRINT
    with_nan = randn(2, 40, 3)
    with_nan[:, 3] = torch.nan
    assert of(with_nan) == of(with_nan.clone()) != NO_FINGERPRINT


def test_a_few_elements_are_read_and_no_graph_is_made() -> None:
    """Of a large tensor no copy is made."""
    x = randn(2, 4000, 8, 16, requires_grad=True)
    with largest_allocation() as memory:
        of(x)
    assert memory.largest <= 32 * 8 * 8 * x.ndim, memory.largest_op  # their places
