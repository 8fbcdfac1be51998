"""The two losses of a prepared model: the language model's and the indexers'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_comm import global_loss
from hp_dsa.cores import IndexerLoss
from hp_dsa.loss import normalize_loss
from hp_dsa.transformers.call import KEYWORD, ModelCall, last_call
from hp_mesh.checks import fail, require
from hp_mesh.sequence import next_token_labels, shard_sequence

__all__ = ["GlobalCausalLoss", "indexer_loss"]

LossFunction = Callable[..., Tensor]


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


class GlobalCausalLoss:
    """A causal LM's ``loss_function`` that knows when its logits are a shard.

    Takes the loss function that the model had, which still serves calls on one device, and by how
    much the reduction of gradients divides (see `prepare_model`).
    """

    def __init__(self, stock: LossFunction, gradient_divisor: int | None = None) -> None:
        self.stock = stock
        self.gradient_divisor = gradient_divisor

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Return the loss of the whole sequence, the same value on every rank.

        Its gradient is this rank's part, times ``gradient_divisor``.

        Args:
            logits: ``[B, S/P, V]``. The loss is computed in float32 at least.
            labels: ``[B, S]``, not shifted; ignored if ``shift_labels`` is given.
            vocab_size: ``V``.
            num_items_in_batch: What the sum is divided by, counted over the whole sequence (and
                over accumulated micro-batches); None counts the targets of this call.
            ignore_index: Label of a token without a target.
            shift_labels: ``[B, S/P]`` or ``[B, S]``, shifted on the whole sequence.
            **options: Other keywords of the model call.
        """
        call: ModelCall | None = options.pop(KEYWORD, None)
        if call is None or call.group is None:
            return self.stock(
                logits=logits,
                labels=labels,
                vocab_size=vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **options,
            )
        cp = (call.rank, call.cp_size)
        targets = shift_labels
        if targets is None:
            targets = next_token_labels(labels, cp, ignore_index=ignore_index, order=call.order)
        elif targets.shape[-1] == call.global_length:
            targets = shard_sequence(targets, cp, order=call.order)
        targets = targets.reshape(-1).to(logits.device)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        token_losses = F.cross_entropy(
            wide.reshape(-1, vocab_size), targets, ignore_index=ignore_index, reduction="none"
        )
        total = num_items_in_batch
        if total is not None:
            total = torch.as_tensor(total, device=logits.device)
        return global_loss(
            token_losses,
            call.group,
            weights=targets != ignore_index,
            total=total,
            gradient_divisor=self.gradient_divisor,
        )
