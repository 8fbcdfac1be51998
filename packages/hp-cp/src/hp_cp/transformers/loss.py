"""The loss of a model whose attention is context parallel."""

from __future__ import annotations

from hp_comm.causal_loss import CausalLoss
from hp_cp.transformers.call import KEYWORD

__all__ = ["GlobalCausalLoss"]


class GlobalCausalLoss(CausalLoss):
    """A causal LM's ``loss_function`` that knows when its logits are a shard.

    Takes the loss function that the model had, which still serves calls without context
    parallelism, and by how much the gradient reduction divides (see `add_core_attention`). Labels
    may be those of this rank, ``[B, S/P]``, or of the whole sequence, ``[B, S]``.
    """

    keyword = KEYWORD
