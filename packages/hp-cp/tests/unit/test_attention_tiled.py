"""Tiled attention equals attention with all scores at once, for every tile size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hp_cp.attention.sdpa import window_sdpa
from hp_cp.attention.tiled import tiled_attention
from hp_mesh.testing import assert_close, poison_empty
from hp_mesh.window import AttentionWindow

SHAPE = {"B": 2, "H": 6, "Hkv": 2, "Lq": 13, "K": 29, "D": 8, "Dv": 5}


def make(requires_grad: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(1)
    B, H, Hkv, Lq, K, D, Dv = SHAPE.values()
    q, k, v = (
        torch.randn(shape, generator=gen, dtype=torch.float64)
        for shape in ((B, H, Lq, D), (B, Hkv, K, D), (B, Hkv, K, Dv))
    )
    return (
        q.requires_grad_(requires_grad),
        k.requires_grad_(requires_grad),
        v.requires_grad_(requires_grad),
    )


def explicit(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, weights_factor: Tensor | float = 1.0
) -> Tensor:
    """All scores at once; ``weights_factor`` is what dropout multiplies the weights with."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0.0) * weights_factor) @ v


def compare(actual: Tensor, expected: Tensor, leaves: tuple[Tensor, ...]) -> None:
    upstream = torch.randn(expected.shape, dtype=torch.float64)
    assert_close(actual, expected)
    got = torch.autograd.grad(actual, leaves, upstream)
    want = torch.autograd.grad(expected, leaves, upstream)
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, kind="grad")


@pytest.mark.parametrize("tile", [1, 2, 4, 7, 16, 64, None])
@pytest.mark.parametrize("offset", [None, 0, 3, 16, 40, -4], ids=lambda x: f"offset={x}")
def test_any_tile_size_gives_the_same_numbers(tile: int | None, offset: int | None) -> None:
    """Tiles that divide nothing, tiles above the diagonal, rows without keys (negative offset)."""
    q, k, v = make()
    visible = torch.ones(13, 29, dtype=torch.bool)
    if offset is not None:
        visible = visible.tril(offset)
    with poison_empty():
        mine = tiled_attention(q, k, v, causal_offset=offset, tile=tile)
        compare(mine, explicit(q, k, v, visible), (q, k, v))


@pytest.mark.parametrize("tile", [4, 7, None])
@pytest.mark.parametrize("shape", [(1, 1, 13, 29), (2, 6, 13, 29), (2, 1, 1, 29), (1, 6, 13, 1)])
def test_a_mask_and_its_gradient_are_cut_to_the_tiles(
    shape: tuple[int, ...], tile: int | None
) -> None:
    """A float mask of any broadcast shape, together with a causal offset."""
    q, k, v = make()
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    causal = torch.zeros(13, 29, dtype=torch.float64).masked_fill(
        ~torch.ones(13, 29, dtype=torch.bool).tril(5), -torch.inf
    )
    mine = tiled_attention(q, k, v, mask=bias, causal_offset=5, tile=tile)
    whole = F.scaled_dot_product_attention(q, k, v, bias + causal, enable_gqa=True)
    compare(mine, whole, (q, k, v, bias))


def dropped(p: float, seed: int, tile: int | None, offset: int | None) -> Tensor:
    """Read the pattern of kept weights off the op itself: identity values, uniform scores."""
    B, H, Hkv, Lq, K, D, _ = SHAPE.values()
    q, k = torch.zeros(B, H, Lq, D, dtype=torch.float64), torch.zeros(B, Hkv, K, D).double()
    v = torch.eye(K, dtype=torch.float64).expand(B, Hkv, K, K)
    options: dict[str, Any] = {"causal_offset": offset, "seed": seed, "tile": tile}
    kept = tiled_attention(q, k, v, dropout_p=p, **options)
    return kept / tiled_attention(q, k, v, **options).clamp_min(1e-30)


@pytest.mark.parametrize("tile", [4, 7, None])
@pytest.mark.parametrize("offset", [None, 16], ids=["full", "causal"])
def test_dropout_equals_the_same_pattern_applied_by_hand(
    tile: int | None, offset: int | None
) -> None:
    """Forward and backward drop the same weights: gradients match those of an explicit factor."""
    q, k, v = make()
    factor = dropped(0.3, 77, tile, offset)
    assert torch.all((factor - 1 / 0.7).abs().lt(1e-9) | factor.eq(0))
    visible = torch.ones(13, 29, dtype=torch.bool).tril(29 if offset is None else offset)
    mine = tiled_attention(q, k, v, causal_offset=offset, dropout_p=0.3, seed=77, tile=tile)
    compare(mine, explicit(q, k, v, visible, factor), (q, k, v))


def test_dropout_keeps_the_stated_share_and_scales_the_mean() -> None:
    """About 70 of 100 weights survive, heads and tiles draw independently, the mean stays."""
    factor = dropped(0.3, 5, 4, None)
    assert 0.66 < factor.ne(0).double().mean() < 0.74
    assert 0.95 < factor.mean() < 1.05
    assert not torch.equal(factor[0, 0], factor[0, 1])
    assert not torch.equal(factor[0, 0], factor[1, 0])
    assert not torch.equal(factor[..., 0:4, 0:4], factor[..., 4:8, 0:4])
    assert not torch.equal(factor[..., 0:4, 0:4], factor[..., 0:4, 4:8])


def test_dropout_follows_its_seed_alone() -> None:
    """Same seed same pattern, another seed another; p=0 and p=1 are exact."""
    q, k, v = make(requires_grad=False)
    window = AttentionWindow(9, 13, 29, 29)

    def run(p: float, seed: int | None) -> Tensor:
        return window_sdpa(
            q,
            k,
            v,
            window,
            is_causal=True,
            enable_gqa=True,
            dropout_p=p,
            dropout_seed=seed,
        )

    assert torch.equal(run(0.5, 1), run(0.5, 1))
    assert not torch.equal(run(0.5, 1), run(0.5, 2))
    assert torch.equal(run(0.0, 1), run(0.0, 2))
    assert run(1.0, 1).eq(0).all()
    torch.manual_seed(8)
    drawn = run(0.5, None)
    assert not torch.equal(run(0.5, None), drawn)
    torch.manual_seed(8)
    assert torch.equal(run(0.5, None), drawn)


def test_no_rows_no_batch_and_no_keys_are_empty_and_zero() -> None:
    """An empty shard is no special case for the caller."""
    q, k, v = make()
    assert tiled_attention(q[:, :, :0], k, v).shape == (2, 6, 0, 5)
    assert tiled_attention(q[:0], k[:0], v[:0]).shape == (0, 6, 13, 5)
    out = tiled_attention(q, k[:, :, :0], v[:, :, :0])
    assert out.eq(0).all()
    out.sum().backward()
    assert q.grad is not None and q.grad.eq(0).all()


def test_many_heads_and_few_rows_use_the_smallest_tile() -> None:
    """Where even one tile of all heads is larger than one head's scores, the numbers hold."""
    q = torch.randn(40, 8, 5, 2, dtype=torch.float64)
    k, v = torch.randn(2, 40, 8, 9, 2, dtype=torch.float64)
    assert_close(tiled_attention(q, k, v), F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("tile", [4, None])
def test_autocast_is_off_inside_a_tile(tile: int | None) -> None:
    """Its sums are in float32: cast to bfloat16 again, they would lose what they are kept for."""
    inputs = [x.detach().float() for x in make()]
    upstream = torch.randn(2, 6, 13, 5)

    def run() -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = tiled_attention(*leaves, causal_offset=16, tile=tile)
        return [out, *torch.autograd.grad(out, leaves, upstream)]

    expected = run()
    with torch.autocast("cpu", torch.bfloat16):
        assert (inputs[0] @ inputs[0].mT).dtype == torch.bfloat16
        found = run()

    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32 and torch.equal(one, other)
