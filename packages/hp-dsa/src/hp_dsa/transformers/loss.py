"""The two losses of a prepared model: the language model's and the indexers'."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hp_comm.causal_loss import CausalLoss
from hp_dsa.cores import IndexerLoss
from hp_dsa.loss import normalize_loss
from hp_dsa.transformers.call import KEYWORD, last_call
from hp_mesh.checks import fail, require

__all__ = ["GlobalCausalLoss", "indexer_loss"]


def indexer_loss(
    model: nn.Module,
    *,
    total: Tensor | int | None = None,
    gradient_divisor: int | None = None,
) -> Tensor:
    """Return the indexers' loss of the last call of ``model``, to be added to that of the LM.

    The KL divergences of all tokens, ranks and layers that own an indexer are summed and divided by
    ``total``: the value is the same on every rank, its gradient is this rank's part and reaches
    indexers only. Take it after each call; it holds the call's graph until the next.

    Args:
        model: What was called, as `prepare_model` returned it.
        total: Tokens of the whole step: all context- and data-parallel ranks and all accumulated
            micro-batches. Default: ``B * S`` of the call, as if it were the whole step.
        gradient_divisor: By how much the reduction of gradients divides their sum. Default: what
            `prepare_model` was told, the number of context-parallel ranks if nothing. With a
            ``total`` of data-parallel ranks too: the number of ranks of FSDP's or DDP's mesh.

    Returns:
        A scalar, float32 (float64 in float64 models).
    """
    where = "indexer_loss"
    call = last_call(model)
    if call is None:
        raise fail(
            where,
            f"{type(model).__name__} must have been called, and have come to its end",
            "call the model that prepare_model returned, itself and not a part of it",
        )
    expected = sum(isinstance(module, IndexerLoss) for module in model.modules())
    require(
        expected > 0,
        where,
        "the model was prepared with indexer_loss=None and must have a loss to return",
        'prepare_model(model, indexer_loss="sparse")',
    )
    require(
        len(call.losses) == expected,
        where,
        f"losses of {len(call.losses)} layers arrived and must be those of {expected}",
        f"let what wraps the layers hand on the keyword {KEYWORD} as it is",
    )
    losses = list(call.losses.values())
    learns = any(p.requires_grad for n, p in model.named_parameters() if ".indexer." in n)
    require(
        all(loss.requires_grad for loss in losses) or not (call.records and learns),
        where,
        "the layers ran without recording gradients, which they must record for this loss",
        'use activation checkpointing with {"use_reentrant": False}',
    )
    summed = torch.stack([loss.reshape(()) for loss in losses]).sum()
    if total is None:
        total = call.batch * call.global_length
    divisor = call.gradient_divisor if gradient_divisor is None else gradient_divisor
    return normalize_loss(summed, total, gradient_divisor=divisor)


class GlobalCausalLoss(CausalLoss):
    """The loss that `prepare_model` gives a causal LM.

    Labels are those of the whole sequence, ``[B, S]``.
    """

    keyword = KEYWORD
