"""Compute that takes its time but no core, as on an accelerator.

On few cores, ranks that compute and a transport that copies take turns, and a wall says more of
the cores than of the schedule. These modules sleep instead, forward and backward; what goes over
the link is as large as ever. The time of attention goes with its heads, so head groups divide it.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

PROJECTION, ATTENTION, BACKWARD = 20.0, 120.0, 2.0
"""ms of one projection and of attention on one rank, and how much longer backward takes."""


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ms: float, q: Tensor, *others: Tensor) -> Tensor:
        ctx.ms, ctx.shapes = ms, [x.shape for x in others]
        time.sleep(ms / 1e3)
        return q.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        time.sleep(BACKWARD * ctx.ms / 1e3)
        return None, grads[0].clone(), *(grads[0].new_ones(shape) for shape in ctx.shapes)


def sleep(ms: float, q: Tensor, *others: Tensor) -> Tensor:
    """Return a copy of ``q`` after ``ms``; backward gives every input a gradient."""
    output: Tensor = _Sleep.apply(ms, q, *others)  # type: ignore[no-untyped-call]
    return output


class Projection(nn.Module):
    """In place of a linear layer that keeps the width."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a copy of ``x``, ``[B, S/P, H * D]``."""
        return sleep(PROJECTION, x)


class Core(nn.Module):
    """In place of attention; needs ``use_local_input=True``.

    Args:
        local_elements: Elements of all of a rank's q, which take `ATTENTION`.
    """

    def __init__(self, local_elements: int) -> None:
        super().__init__()
        self.local_elements = local_elements

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return a copy of ``q``, ``[B, S, H, D]``."""
        return sleep(ATTENTION * q.numel() / self.local_elements, q, k, v)
