"""Test data that does not depend on who asks, in which order, or in which thread."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["randn"]


def randn(
    *shape: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    requires_grad: bool = False,
) -> Tensor:
    """Return normal numbers of ``shape`` that depend on ``seed`` alone.

    torch's default CPU generator is shared by all threads of a process, so ranks that are threads
    would draw from it in a random order.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
    return drawn.requires_grad_(requires_grad)
