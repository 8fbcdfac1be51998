"""Door to torch_npu's fused attention; torch_npu is imported on the first call, never before."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

__all__ = [
    "COMPRESSED",
    "causal_attention",
    "compressed_causal_mask",
    "packed_attention",
    "takes",
]

COMPRESSED = 2048
_LARGEST_HEAD_SIZE = 768
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def takes(q: Tensor, v: Tensor) -> bool:
    """Whether the kernel's documented limits allow this call."""
    return q.dtype in _DTYPES and q.shape[-1] == v.shape[-1] <= _LARGEST_HEAD_SIZE


_masks: dict[torch.device, Tensor] = {}


def compressed_causal_mask(device: torch.device) -> Tensor:
    """Return the ``[2048, 2048]`` mask, True above the diagonal, that modes 2, 3 and 4 expect.

    Made once per device, 4 MiB. The kernel keeps it for its backward, also when the first to ask
    for it was a call under ``torch.inference_mode``; what a tracer asks for is its own.
    """
    if type(torch.empty(0, device=device)) is not Tensor:
        return _made(device)
    if device not in _masks:
        with torch.inference_mode(False):
            _masks[device] = _made(device)
    return _masks[device]


def _made(device: torch.device) -> Tensor:
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=device).triu_(1)


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout_p: float
) -> Tensor:
    """Compute bottom-right causal attention: the last row sees the last key.

    Args:
        q: ``[B, H, Lq, D]``.
        k: ``[B, Hkv, K, D]``, cut to the causal prefix of the last row.
        v: ``[B, Hkv, K, D]``.
        scale: Factor on the scores; the kernel's own default is 1, ours ``1 / sqrt(D)``.
        dropout_p: Probability of dropping a weight, drawn from the NPU's default generator.

    Returns:
        ``[B, H, Lq, D]``.
    """
    torch_npu = importlib.import_module("torch_npu")
    result = torch_npu.npu_fusion_attention(
        q,
        k,
        v,
        q.shape[1],
        "BNSD",
        atten_mask=compressed_causal_mask(q.device),
        scale=1.0 / math.sqrt(q.shape[-1]) if scale is None else scale,
        keep_prob=1.0 - dropout_p,
        sparse_mode=3,
    )
    return cast(Tensor, result[0])


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_ends: Sequence[int],
    key_ends: Sequence[int],
    causal: bool,
    window: int | None,
    scale: float | None,
) -> Tensor:
    """Compute attention of documents in layout TND; arguments as `hp_cp.attention.packed` has them.

    Returns:
        ``[Lq, H, D]``.
    """
    torch_npu = importlib.import_module("torch_npu")
    masked: dict[str, Any] = {}
    if causal:
        masked = {"atten_mask": compressed_causal_mask(q.device), "sparse_mode": 3}
        if window is not None:
            masked |= {"sparse_mode": 4, "pre_tockens": window - 1, "next_tockens": 0}
    result = torch_npu.npu_fusion_attention(
        q,
        k,
        v,
        q.shape[1],
        "TND",
        scale=1.0 / math.sqrt(q.shape[-1]) if scale is None else scale,
        actual_seq_qlen=list(query_ends),
        actual_seq_kvlen=list(key_ends),
        **masked,
    )
    return cast(Tensor, result[0])
