"""Masks for the whole sequence are cut to a rank's rows and heads, or refused by shape."""

from __future__ import annotations

import pytest
import torch

from hp_cp.attention.masks import cut_mask
from hp_mesh.window import AttentionWindow

WINDOW = AttentionWindow(query_start=6, query_length=4, key_length=16, global_length=16)


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)


@pytest.mark.parametrize(
    "shape", [(16, 16), (1, 1, 16, 16), (2, 1, 16, 16), (2, 6, 16, 16), (6, 16, 16)], ids=str
)
def test_global_rows_are_cut_to_the_window_without_a_copy(shape: tuple[int, ...]) -> None:
    """Row ``i`` of the mask is the token at position ``i``."""
    mask = numbered(*shape)
    cut = cut_mask(mask, WINDOW)
    assert torch.equal(cut, mask[..., 6:10, :])
    assert cut.untyped_storage().data_ptr() == mask.untyped_storage().data_ptr()


@pytest.mark.parametrize("shape", [(4, 16), (2, 1, 1, 16), (2, 6, 4, 16), (1, 16)], ids=str)
def test_local_and_broadcast_rows_stay(shape: tuple[int, ...]) -> None:
    """Cut already, or one row for all: cutting twice changes nothing."""
    mask = numbered(*shape)
    assert cut_mask(mask, WINDOW) is mask


def test_rows_as_many_as_keys_are_positions_when_keys_cover_the_sequence() -> None:
    """A mask sized from a key buffer that is longer than the sequence."""
    window = AttentionWindow(6, 4, key_length=20, global_length=16)
    mask = numbered(20, 20)
    assert torch.equal(cut_mask(mask, window), mask[6:10])


def test_rows_equal_to_a_shorter_key_length_are_not_taken_for_positions() -> None:
    """Later ranks have no such rows, so no rank may guess."""
    window = AttentionWindow(0, 4, key_length=8, global_length=16)
    with pytest.raises(ValueError, match=r"must have 16 rows .* not 8"):
        cut_mask(numbered(8, 8), window)


def test_all_heads_are_cut_and_own_or_shared_heads_stay() -> None:
    """The head dim is dim -3: 6 heads of which this rank computes 2 to 4."""
    mask = numbered(2, 6, 16, 16)
    cut = cut_mask(mask, WINDOW, heads=(2, 4), num_heads=6)
    assert torch.equal(cut, mask[:, 2:4, 6:10])
    own = cut_mask(mask[:, :2], WINDOW, heads=(2, 4), num_heads=6)
    assert torch.equal(own, mask[:, :2, 6:10])
    shared = cut_mask(mask[:, :1], WINDOW, heads=(2, 4), num_heads=6)
    assert torch.equal(shared, mask[:, :1, 6:10])
    assert cut_mask(numbered(4, 16), WINDOW, heads=(2, 4), num_heads=6).shape == (4, 16)


def test_a_mask_that_needs_a_gradient_gets_it_on_its_own_rows() -> None:
    """The cut is a view that autograd knows."""
    mask = numbered(16, 16).requires_grad_()
    cut_mask(mask, WINDOW).sum().backward()
    assert mask.grad is not None
    assert mask.grad.sum() == 4 * 16 and mask.grad[6:10].eq(1).all()


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((1, 1, 8, 8), r"attn_mask \(shape \[1, 1, 8, 8\]\) must have 16 keys .* not 8"),
        ((1, 1, 8, 16), r"must have 16 rows .*, 4 \(this rank's rows\) or 1, not 8"),
        ((2, 3, 16, 16), r"must have 6 heads \(all\), 2 \(this rank's\) or 1 .* not 3"),
        ((16,), r"must have at least 2 dims"),
    ],
    ids=["keys", "rows", "heads", "one-dim"],
)
def test_a_mask_that_cannot_match_is_refused(shape: tuple[int, ...], words: str) -> None:
    """The message names its shape, what would be right, and the way out."""
    with pytest.raises(ValueError, match=words) as error:
        cut_mask(numbered(*shape), WINDOW, heads=(2, 4), num_heads=6, where="attention")
    assert str(error.value).startswith("attention: ") and "; " in str(error.value)
