"""Dropout seeds follow from ``torch.manual_seed`` and differ between the blocks of attention."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from hp_cp.attention.rng import dropout_seed, mix, seeded
from hp_cp.attention.sdpa import window_sdpa
from hp_mesh.window import AttentionWindow


def test_one_manual_seed_reproduces_every_seed() -> None:
    """And the next call draws another."""
    torch.manual_seed(11)
    first = [dropout_seed((2, 1)) for _ in range(3)]
    torch.manual_seed(11)
    assert [dropout_seed((2, 1)) for _ in range(3)] == first
    assert len(set(first)) == 3


def test_coordinates_tell_blocks_apart_under_one_seed() -> None:
    """Ranks are seeded alike; 16 x 16 coordinates give 256 seeds, order counts."""
    seeds = set()
    for c in range(16):
        for d in range(16):
            torch.manual_seed(0)
            seeds.add(dropout_seed((c, d)))
    assert len(seeds) == 256
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_mix_spreads_neighbours_over_all_bits() -> None:
    """One step of a coordinate changes about half of the bits."""
    flips = [(mix(5, i) ^ mix(5, i + 1)).bit_count() for i in range(1000)]
    assert 28 < sum(flips) / len(flips) < 35


def test_seeded_gives_the_generator_back_as_it_was() -> None:
    """Also when the block raises nothing and draws much."""
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with seeded(torch.device("cpu"), 99):
        inside = torch.rand(100)
    assert torch.equal(torch.rand(4), expected)
    with seeded(torch.device("cpu"), 99):
        assert torch.equal(torch.rand(100), inside)


def test_checkpoint_recomputes_the_same_dropout() -> None:
    """The draw comes from the generator whose state checkpointing restores, in both its kinds."""
    window = AttentionWindow(9, 8, 17, 17)
    gradients = []
    for reentrant in (None, False, True):
        torch.manual_seed(4)
        q = torch.randn(2, 3, 8, 4, dtype=torch.float64, requires_grad=True)
        k = torch.randn(2, 3, 17, 4, dtype=torch.float64)

        def attend(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            seed = dropout_seed((1, 0))
            return window_sdpa(q, k, k, window, is_causal=True, dropout_p=0.5, dropout_seed=seed)

        if reentrant is None:
            out = attend(q, k)
        else:
            out = checkpoint(attend, q, k, use_reentrant=reentrant)
        out.square().sum().backward()
        gradients.append(q.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])
