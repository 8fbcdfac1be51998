"""The denominator of the indexer's loss, which is a sum."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from hp_mesh.checks import require

__all__ = ["normalize_loss"]


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, total: Tensor, divisor: float) -> Tensor:
        # no token at all: a loss of zero and no gradient, not 0 / 0
        weight = torch.where(total == 0, 0.0, 1.0 / total.to(loss.dtype))
        ctx.scale = weight * divisor
        return loss * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.scale, None, None


def normalize_loss(loss: Tensor, total: Tensor | int, *, gradient_divisor: int = 1) -> Tensor:
    """Divide a summed loss by the tokens of the whole step.

    A mean of the ranks' means would weigh a token of a short shard more than one of a long shard.

    Args:
        loss: Summed over all ranks, as it leaves `DSAIndexerLossContextParallel`.
        total: Tokens of the step over all ranks, data-parallel ones included, and all of its
            micro-batches: `hp_comm.count_tokens`. Read once, which waits for its device.
        gradient_divisor: By how much the reduction of parameter gradients divides: the number of
            ranks of FSDP and DDP, which average; 1 where gradients are summed.

    Returns:
        The mean, in the shape of ``loss``; backward multiplies by ``gradient_divisor``, so that
        what is left in ``.grad`` is the gradient of the mean.
    """
    require(
        gradient_divisor > 0,
        "normalize_loss",
        f"gradient_divisor ({gradient_divisor}) must be at least 1",
    )
    require(
        isinstance(total, Tensor | int | float) and not isinstance(total, bool),
        "normalize_loss",
        f"total ({total!r}) must be a number of tokens",
        "count those of all ranks and micro-batches with hp_comm.count_tokens",
    )
    count = torch.as_tensor(total, device=loss.device)
    require(
        bool((count >= 0).all()),  # not so for NaN
        "normalize_loss",
        f"total ({count.tolist()}) must be at least 0",
    )
    return cast(Tensor, cast(Any, _Normalize).apply(loss, count, float(gradient_divisor)))
