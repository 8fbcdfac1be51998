"""Attention of packed documents on one rank's rows: each document by itself, by the best kernel.

Causality is aligned at the end of a document, as in flash attention and in ``npu_fusion_attention``
with ``sparse_mode=3``: its last query sees its last key. A part of a document is therefore told by
the keys that it is handed (`hp_mesh.documents`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, cast

import torch
from torch import Tensor

from hp_cp.attention import _npu
from hp_cp.attention.band import KeySpans, band_attention
from hp_cp.attention.sdpa import window_sdpa
from hp_mesh.window import AttentionWindow

__all__ = ["choose_kernel", "packed_rows"]

Kernel = Literal["documents", "varlen", "npu"]

_VARLEN_HEAD_SIZE = 256


def packed_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_ends: Sequence[int],
    key_ends: Sequence[int],
    *,
    causal: bool,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute attention of documents that lie one after the other.

    Args:
        q: ``[Lq, H, D]``.
        k: ``[K, Hkv, D]``; ``Hkv`` divides ``H``.
        v: ``[K, Hkv, Dv]``.
        query_ends: Cumulative ends of the documents' queries, without a leading 0; ends at ``Lq``.
        key_ends: Cumulative ends of their keys, as many; ends at ``K``.
        causal: Whether a query sees no later key than its own, counted from the document's end.
        window: With ``causal``, the number of keys that a query sees, itself included.
        scale: Factor on the scores, ``1 / sqrt(D)`` by default.

    Returns:
        ``[Lq, H, Dv]``. Queries that see no key give 0.
    """
    kernel = choose_kernel(q, v, query_ends, key_ends, causal)
    if kernel == "varlen":
        return _varlen(q, k, v, query_ends, key_ends, causal, window, scale)
    if kernel == "npu":
        return _npu.packed_attention(q, k, v, query_ends, key_ends, causal, window, scale)
    outs = []
    for (a, b), (c, e) in zip(pairwise([0, *query_ends]), pairwise([0, *key_ends]), strict=True):
        if a < b:
            outs.append(_document(q[a:b], k[c:e], v[c:e], causal, window, scale))
    if len(outs) == 1:
        return outs[0]
    return torch.cat(outs) if outs else q.new_zeros(0, q.shape[1], v.shape[2]) + _linked(q, k, v)


def choose_kernel(
    q: Tensor, v: Tensor, query_ends: Sequence[int], key_ends: Sequence[int], causal: bool
) -> Kernel:
    """Name the way a call is computed.

    ========  ==================================================================================
    CPU       document by document, through ``F.scaled_dot_product_attention``
    CUDA      ``torch.nn.attention.varlen`` in half precision with equal head sizes, else as CPU
    NPU       ``npu_fusion_attention`` in TND where its documented limits allow it, else as CPU
    ========  ==================================================================================
    """
    if q.device.type == "cuda":
        half = q.dtype in (torch.float16, torch.bfloat16)
        return "varlen" if half and q.shape[-1] == v.shape[-1] <= _VARLEN_HEAD_SIZE else "documents"
    if q.device.type == "npu" and _npu.takes(q, v):
        lengths = zip(pairwise([0, *query_ends]), pairwise([0, *key_ends]), strict=True)
        # documents without a key, or with fewer keys than causal queries: not documented
        if all((e - c >= b - a) if causal else e > c for (a, b), (c, e) in lengths if b > a):
            return "npu"
    return "documents"


def _document(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None
) -> Tensor:
    """Compute one document, ``[Lq, H, D]``."""
    rows, keys = len(q), len(k)
    if not keys:  # and still ask for the gradients that other ranks wait for
        return q.new_zeros(rows, q.shape[1], v.shape[2]) + _linked(q, k, v)
    start = keys - rows if causal else 0
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, H, L, D]
    if start < 0 or (window is not None and window < keys):
        spans = KeySpans(0, (0, keys))
        width = keys if window is None else window
        out = band_attention(q, k, v, start=start, spans=spans, window=width, scale=scale)
    else:
        here = AttentionWindow(start, rows, keys, keys)
        gqa = q.shape[1] != k.shape[1]
        out = window_sdpa(q, k, v, here, is_causal=causal, scale=scale, enable_gqa=gqa)
    return out.squeeze(0).transpose(0, 1)


def _linked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q[:0].sum() + k[:0].sum() + v[:0].sum()


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_ends: Sequence[int],
    key_ends: Sequence[int],
    causal: bool,
    window: int | None,
    scale: float | None,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    def starts(ends: Sequence[int]) -> tuple[Tensor, int]:
        longest = max((b - a for a, b in pairwise([0, *ends])), default=0)
        return torch.tensor([0, *ends], dtype=torch.int32, device=q.device), longest

    (cu_q, max_q), (cu_k, max_k) = starts(query_ends), starts(key_ends)
    sizes = (-1, -1) if not causal else (-1 if window is None else window - 1, 0)
    out = varlen_attn(
        q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window_size=sizes,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return cast(Tensor, out)  # without return_aux there is no second result
