"""The local attention of all contenders, so that what differs between them is communication."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["attention", "attention_with_lse", "attention_with_lse_backward"]

_ATEN = torch.ops.aten


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Return torch's own attention of ``[B, S, H, D]`` tensors, in that layout."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2)


def attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output and its log-sum-exp, which rings merge by; ``[B, H, S, D]``, no autograd.

    This is the operator that `attention` ends in on CPU.
    """
    out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=None, scale=scale
    )
    return out, lse


def attention_with_lse_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv of a block whose global ``out`` and ``lse`` are given; ``[B, H, S, D]``."""
    dq, dk, dv = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=None, scale=scale
    )
    return dq, dk, dv
