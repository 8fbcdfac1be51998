"""Dropout seeds that differ between ranks and still follow from one ``torch.manual_seed``.

Ranks of one context-parallel group are seeded alike, so equal draws would drop the same pattern in
every block of the global attention matrix. Each rank therefore mixes its coordinates into a number
that all of them draw together. The draw comes from torch's default CPU generator, whose state
activation checkpointing saves and restores: a recomputed attention drops the same weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

__all__ = ["dropout_seed", "mix", "seeded"]

_MASK_64 = (1 << 64) - 1


def _splitmix64(state: int) -> int:
    """Return the splitmix64 hash of ``state``: one changed bit in changes half the bits out."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return state ^ (state >> 31)


def mix(seed: int, *coordinates: int) -> int:
    """Fold ``coordinates`` into ``seed``; order matters, ``(1, 2)`` and ``(2, 1)`` differ.

    Returns:
        A non-negative integer below ``2**63``, which every torch generator accepts as a seed.
    """
    state = _splitmix64(seed & _MASK_64)
    for coordinate in coordinates:
        state = _splitmix64(state ^ (coordinate & _MASK_64))
    return state >> 1


def dropout_seed(coordinates: Sequence[int]) -> int:
    """Draw one number from torch's default CPU generator and mix this rank's coordinates into it.

    Every rank must call it equally often, or ranks seeded alike drift apart.

    Args:
        coordinates: What tells this block of the attention matrix from all others that are
            computed elsewhere, e.g. ``(rank of the block, index of the sub-call)``.

    Returns:
        A seed for ``torch.Generator.manual_seed``.
    """
    drawn = int(torch.randint(0, (1 << 63) - 1, (), dtype=torch.int64, device="cpu"))
    return mix(drawn, *coordinates)


@contextlib.contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Run a kernel that draws from ``device``'s default generator as if seeded with ``seed``.

    The generator's state is put back afterwards. Meant for fused kernels, which take no generator.
    """
    index = device.index
    if index is None and device.type != "cpu":
        index = torch.get_device_module(device).current_device()
    devices = [] if device.type == "cpu" else [index]
    with torch.random.fork_rng(devices=devices, device_type=device.type):
        if device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            torch.get_device_module(device).manual_seed(seed)
        yield
