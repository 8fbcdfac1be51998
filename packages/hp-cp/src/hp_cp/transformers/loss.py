"""The loss of a model whose attention is context parallel."""

from __future__ import annotations

from hp_comm.causal_loss import CausalLoss
from hp_cp.transformers.call import KEYWORD

__all__ = ["GlobalCausalLoss"]


class GlobalCausalLoss(CausalLoss):
    """The loss that `add_core_attention` gives a causal LM.

    Labels may be those of this rank, ``[B, S/P]``, or of the whole sequence, ``[B, S]``.
    """

    keyword = KEYWORD
