"""The loss of a causal LM over the whole sequence, from the logits of one shard.

Two things go wrong when a rank computes its own loss: the last token of a shard has its target on
the next rank, and a mean over the rank's tokens weighs them by how many the rank happens to have.
Here targets are shifted on the whole sequence and then cut, and the sum over all ranks is divided
by the number of targets of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_comm.sequence import global_loss

__all__ = ["CausalLoss", "LossFunction", "SequenceCall"]

LossFunction = Callable[..., Tensor]


class SequenceCall(Protocol):
    """The facts of one model call that its loss needs."""

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks that share the sequence; None on one device."""

    def targets(self, labels: Tensor, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
        """Return the next token of each of this rank's, ``[B, S/P]``.

        Args:
            labels: As the model was given them, not shifted.
            shift_labels: Shifted on the whole sequence, ``[B, S/P]`` or ``[B, S]``, or None.
            ignore_index: Target of the last token of the sequence.
        """


class CausalLoss:
    """A causal LM's ``loss_function`` that knows when its logits are a shard.

    Takes the loss function that the model had, which still serves calls on one device, and by how
    much the reduction of gradients divides. `keyword` names the option that brings the facts of a
    call, a `SequenceCall`.
    """

    keyword: ClassVar[str]

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
        call: SequenceCall | None = options.pop(self.keyword, None)
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
        targets = call.targets(labels, shift_labels, ignore_index).reshape(-1).to(logits.device)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        token_losses = F.cross_entropy(
            wide.reshape(-1, vocab_size), targets, ignore_index=ignore_index, reduction="none"
        )
        return global_loss(
            token_losses,
            call.group,
            weights=targets != ignore_index,
            total=num_items_in_batch,
            gradient_divisor=self.gradient_divisor,
        )
