"""Attention modules as users write them for one device; none knows of context parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIMS = {
    "BSHD": (1, 2),
    "BNSD": (2, 1),
    "SBHD": (0, 2),
    "TND": (0, 1),
    "BSH": (1, 2),
    "SBH": (0, 2),
}
"""``(seq_dim, head_dim)`` by layout; in BSH and SBH heads and head size are one dim."""


def heads_first(x: Tensor, layout: str, head_size: int) -> Tensor:
    """Return ``x`` as ``[B, H, S, D]``."""
    match layout:
        case "BSHD":
            return x.transpose(1, 2)
        case "SBHD":
            return x.permute(1, 2, 0, 3)
        case "TND":
            return x.transpose(0, 1).unsqueeze(0)
        case "BSH":
            return x.unflatten(-1, (-1, head_size)).transpose(1, 2)
        case "SBH":
            return x.unflatten(-1, (-1, head_size)).permute(1, 2, 0, 3)
    return x


def heads_back(x: Tensor, layout: str) -> Tensor:
    """Return ``x`` ``[B, H, S, D]`` in ``layout``."""
    match layout:
        case "BSHD":
            return x.transpose(1, 2)
        case "SBHD":
            return x.permute(2, 0, 1, 3)
        case "TND":
            return x.squeeze(0).transpose(0, 1)
        case "BSH":
            return x.transpose(1, 2).flatten(2)
        case "SBH":
            return x.permute(2, 0, 1, 3).flatten(2)
    return x


class Sdpa(nn.Module):
    """``F.scaled_dot_product_attention`` with whatever is passed on to it."""

    def __init__(
        self, layout: str = "BSHD", *, causal: bool = True, head_size: int = 6, **kw: Any
    ) -> None:
        super().__init__()
        self.layout, self.causal, self.head_size, self.kw = layout, causal, head_size, kw

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
    ) -> Tensor:
        q, k, v = (heads_first(x, self.layout, self.head_size) for x in (query, key, value))
        gqa = q.shape[1] != k.shape[1]
        causal = self.causal and attn_mask is None
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, is_causal=causal, enable_gqa=gqa, **self.kw
        )
        return heads_back(out, self.layout)


class Eager(nn.Module):
    """Two matmuls and a softmax; the causal mask takes its sizes from k, as `mask_from` says."""

    def __init__(
        self,
        layout: str = "BSHD",
        *,
        causal: bool = True,
        head_size: int = 6,
        mask_from: str = "k",
    ) -> None:
        super().__init__()
        self.layout, self.causal, self.head_size = layout, causal, head_size
        self.mask_from = mask_from

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
    ) -> Tensor:
        q, k, v = (heads_first(x, self.layout, self.head_size) for x in (query, key, value))
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                scores = scores.masked_fill(~attn_mask, float("-inf"))
            else:
                scores = scores + attn_mask
        elif self.causal:
            S = (q if self.mask_from == "q" else k).shape[2]
            mask = torch.tril(torch.ones(S, S, dtype=torch.bool))
            scores = scores.masked_fill(~mask, float("-inf"))
        return heads_back(scores.softmax(-1) @ v, self.layout)
