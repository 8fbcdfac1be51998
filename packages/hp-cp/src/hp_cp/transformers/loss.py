"""The loss of the whole sequence, from the logits of one shard.

Two things go wrong when a rank computes its own loss: the last token of a shard has its target on
the next rank, and a mean over the rank's tokens weighs them by how many the rank happens to have.
Here targets are shifted on the whole sequence and then cut, and the sum over all ranks is divided
by the number of targets of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hp_comm import global_loss
from hp_cp.transformers.call import KEYWORD, GlobalCall

__all__ = ["GlobalCausalLoss"]

LossFunction = Callable[..., Tensor]


class GlobalCausalLoss:
    """A causal LM's ``loss_function`` that knows when its logits are a shard.

    Takes the loss function that the model had, which still serves calls without context
    parallelism, and by how much the gradient reduction divides (see `add_core_attention`).
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
            labels: ``[B, S/P]`` or ``[B, S]``, not shifted; ignored if ``shift_labels`` is given.
            vocab_size: ``V``.
            num_items_in_batch: What the sum is divided by, counted over the whole sequence (and
                over accumulated micro-batches); None counts the targets of this call.
            ignore_index: Label of a token without a target.
            shift_labels: ``[B, S/P]`` or ``[B, S]``, shifted on the whole sequence.
            **options: Other keywords of the model call.
        """
        call: GlobalCall | None = options.pop(KEYWORD, None)
        if call is None:
            return self.stock(
                logits=logits,
                labels=labels,
                vocab_size=vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **options,
            )
        if shift_labels is None:
            whole = call.whole(labels)
            shifted = F.pad(whole, (0, 1), value=ignore_index)[:, 1:]
            targets = call.cut(shifted)
        elif shift_labels.shape[-1] == call.global_length:
            targets = call.cut(shift_labels)
        else:
            targets = shift_labels
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
