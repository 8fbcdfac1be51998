"""Put gathered keys of head-tail data into the order of the sequence: one selection of chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["in_chunks"]


class _Select(torch.autograd.Function):
    """Permute chunks. Backward permutes back: torch's own would add rows into zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, order: tuple[int, ...]) -> Tensor:
        ctx.dim, ctx.order = dim, order
        index = torch.tensor(order, device=x.device)
        shape = list(x.shape)
        chunks = x.reshape(*shape[:dim], len(order), -1, *shape[dim + 1 :])
        return chunks.index_select(dim, index).view(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        back = [0] * len(ctx.order)
        for place, chunk in enumerate(ctx.order):
            back[chunk] = place
        return in_chunks(grad, ctx.dim, back), None, None


def in_chunks(x: Tensor, dim: int, order: Sequence[int]) -> Tensor:
    """Return ``x`` cut into as many chunks along ``dim`` as ``order`` has, in that order."""
    return cast(Tensor, cast(Any, _Select).apply(x, dim, tuple(order)))
