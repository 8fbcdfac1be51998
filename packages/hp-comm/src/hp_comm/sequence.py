"""Helpers around a model whose sequence is sharded: put it together again, and one loss for all.

Cutting needs no communication and lives in `hp_mesh`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_comm import arguments, cuts
from hp_comm.collectives import gather_seq
from hp_comm.reductions import summed
from hp_mesh.checks import require, require_divisible
from hp_mesh.sequence import Order, join_sequence

__all__ = ["count_tokens", "global_loss", "unshard_sequence"]


def unshard_sequence(
    x: Tensor,
    group: ProcessGroup,
    *,
    seq_dim: int,
    order: Order = "contiguous",
    lengths: Sequence[int] | None = None,
    length: int | None = None,
    sum_gradients: bool = True,
) -> Tensor:
    """Put the whole sequence together on every rank, in natural order and without padding.

    Args:
        x: This rank's shard, ``[.., S/P, ..]``: logits, hidden states, token ids.
        group: The ``P`` ranks that share the sequence.
        seq_dim: Dim of ``x`` that holds the sequence.
        order: How the data lies on the ranks: consecutive shards, or head-tail (zigzag) pairs.
        lengths: Local lengths of the ranks if they differ; for contiguous order only.
        length: Length without padding; what lies behind it is cut off.
        sum_gradients: True when each rank goes on with a loss of its own share: a shard's gradient
            is the sum over ranks. False when every rank computes the *same* loss from the
            result: the gradient is this rank's slice, and backward sends nothing. (Summing there
            would make it ``P`` times too large.)

    Returns:
        ``[.., S, ..]``, the same on all ranks.
    """
    where = "unshard_sequence"
    arguments.require_tensor(where, "x", x)
    size, rank = arguments.group_of(where, group)
    dim = arguments.one_dim(where, x.shape, "seq_dim", seq_dim)
    arguments.require_order(where, order)
    if order == "head_tail":
        arguments.require_no_lengths(where, lengths)
        require_divisible(where, f"local length (dim {dim} of x)", x.shape[dim], "2", 2)
    part = cuts.lengths_of_ranks(where, x.shape, dim, lengths, size, rank)
    total = sum(part.counts)
    if length is not None:
        require(
            0 <= length <= total, where, f"length ({length}) must be in 0..{total}, what there is"
        )
    if sum_gradients:
        whole = gather_seq(x, group, seq_dim=dim, lengths=lengths, order=order)
        return whole if length is None else whole.narrow(dim, 0, length)
    whole = gather_seq(x.detach(), group, seq_dim=dim, lengths=lengths)
    shards = list(torch.split(whole, list(part.counts), dim))
    shards[rank] = x  # the only shard that a gradient flows to
    if order == "head_tail":
        whole = join_sequence(shards, seq_dim=dim, order=order)
    else:
        whole = torch.cat(shards, dim)
    return whole if length is None else whole.narrow(dim, 0, length)


def count_tokens(weights: Tensor | Iterable[Tensor], group: ProcessGroup) -> Tensor:
    """Sum the weights of all tokens of a step over the ranks: the one denominator of its loss.

    Args:
        weights: This rank's mask (bool or integer) or weights, any shape; with gradient
            accumulation those of all micro-batches of the step.
        group: All ranks with tokens of their own: data parallel times context parallel.

    Returns:
        Scalar, the same on all ranks, int64 for masks; for `global_loss`'s ``total``.
    """
    where = "count_tokens"
    parts = arguments.tensors_of(where, "weights", weights)
    arguments.group_of(where, group)
    total = torch.stack([_weight_sum(part) for part in parts]).sum()
    return summed(where, total, group)


def _weight_sum(weights: Tensor) -> Tensor:
    exact = weights.dtype.is_floating_point
    return weights.detach().sum(dtype=_sum_dtype(weights.dtype) if exact else torch.int64)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _GlobalLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, total: Tensor, group: ProcessGroup, divisor: float
    ) -> Tensor:
        # no token at all: a loss of zero and no gradient, not 0 / 0
        weight = torch.where(total == 0, 0.0, 1.0 / total.to(local.dtype))
        ctx.scale = weight * divisor
        return summed("global_loss", local, group) * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad * ctx.scale, None, None, None


def global_loss(
    losses: Tensor,
    group: ProcessGroup,
    *,
    weights: Tensor | None = None,
    total: Tensor | int | None = None,
    gradient_divisor: int | None = None,
) -> Tensor:
    r"""Return the mean loss over all tokens of all ranks; every token weighs the same.

    A mean of per-rank means does not: where prompts are masked, the one answer token of a rank
    would weigh as much as the thousand of another. Here::

        loss = sum over ranks, micro-batches, tokens of (weight * loss)  /  total

    FSDP and DDP *average* gradients over their ranks, that is, divide their sum by
    ``gradient_divisor``. Backward multiplies by it, so that what they leave in ``.grad`` is the
    gradient of ``loss``, whatever the CP degree, the number of ranks, the cut into micro-batches::

        total = count_tokens([batch.mask for batch in step], group)
        for batch in step:
            global_loss(model(batch), group, weights=batch.mask, total=total).backward()

    Args:
        losses: This rank's loss per token, any shape, labels shifted before the cut.
        group: All ranks with tokens of their own: data parallel times context parallel, the group
            of the flattened mesh that FSDP gets.
        weights: Mask or weights of ``losses``' shape. Default: every token counts 1.
        total: The step's `count_tokens`. Needed with gradient accumulation. Default: counted here,
            as if this call were the whole step.
        gradient_divisor: By how much the gradient reduction divides. Default: the size of ``group``
            (FSDP and DDP over it); 1 if gradients are summed, or when nothing reduces them.

    Returns:
        Scalar, the same on all ranks, in the dtype of ``losses`` but at least float32; with
        accumulation, this micro-batch's share of the step's loss. One all-reduce of a scalar, one
        more without ``total``; backward sends nothing.
    """
    where = "global_loss"
    arguments.require_tensor(where, "losses", losses)
    size, _ = arguments.group_of(where, group)
    if gradient_divisor is None:
        gradient_divisor = size
    require(
        gradient_divisor > 0, where, f"gradient_divisor ({gradient_divisor}) must be at least 1"
    )
    if weights is None:
        weights = torch.ones((), dtype=torch.bool, device=losses.device).expand(losses.shape)
    require(
        weights.shape == losses.shape,
        where,
        f"weights ({tuple(weights.shape)}) must have the shape of losses ({tuple(losses.shape)})",
    )
    dtype = _sum_dtype(losses.dtype)
    # where, not times: the loss of an ignored token may be NaN or infinite
    kept = torch.where(weights != 0, losses.to(dtype) * weights, losses.new_zeros((), dtype=dtype))
    total = count_tokens(weights, group) if total is None else torch.as_tensor(total)
    result: Tensor = cast(Any, _GlobalLoss).apply(
        kept.sum(), total.to(losses.device), group, float(gradient_divisor)
    )
    return result
