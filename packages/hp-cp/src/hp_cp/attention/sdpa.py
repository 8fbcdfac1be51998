"""``F.scaled_dot_product_attention`` for one rank's query rows against the whole key sequence.

Causality is that of the global matrix: row ``i`` of the *sequence* sees keys ``<= i``. Keys that no
local row sees are cut off before any compute, and no path holds ``Lq * K`` scores under a causal
flag; `choose_path` says which path runs when.
"""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from hp_cp.attention import _flash_cpu, _npu, rng
from hp_cp.attention.inputs import prepare
from hp_cp.attention.masks import cut_mask, refuse_flag_beside_mask
from hp_cp.attention.tiled import tiled_attention
from hp_mesh.checks import fail
from hp_mesh.window import AttentionWindow, Range

__all__ = ["choose_path", "window_sdpa"]

_MATH = SDPBackend.MATH.value  # an enum's value is looked up slowly

Path = Literal["torch", "prefix_and_diagonal", "lower_right", "npu", "tiled"]


def window_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: AttentionWindow,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_seed: int | None = None,
    heads: Range | None = None,
    num_heads: int | None = None,
    where: str = "scaled_dot_product_attention",
) -> Tensor:
    """Compute the window's rows of the global attention.

    Args:
        q: ``[..., H, Lq, D]``, the rows ``window.query_start`` to ``window.query_end``.
        k: ``[..., Hkv, K, D]``, all keys, row 0 at global position 0.
        v: ``[..., Hkv, K, Dv]``.
        window: Where the rows lie.
        attn_mask: Bool (True = visible) or float, rows of the whole sequence or of this rank.
        dropout_p: Probability of dropping an attention weight.
        is_causal: Row at global position ``i`` sees keys ``<= i``.
        scale: Factor on the scores, ``1 / sqrt(D)`` by default.
        enable_gqa: Allows ``Hkv < H``, as in torch.
        dropout_seed: From `hp_cp.attention.rng.dropout_seed`; None draws one for this call.
        heads: This rank's query heads among ``num_heads``, to cut a mask with all heads.
        num_heads: Number of query heads of the whole tensor.
        where: Name of the op, for errors.

    Returns:
        ``[..., H, Lq, Dv]``. Inputs of any strides; nothing is cast except as autocast says.
    """
    refuse_flag_beside_mask(attn_mask, is_causal)
    if not 0.0 <= dropout_p <= 1.0:
        raise fail(where, f"dropout_p ({dropout_p}) must be between 0 and 1")
    if attn_mask is not None:
        attn_mask = cut_mask(attn_mask, window, heads=heads, num_heads=num_heads, where=where)
    if attn_mask is None and dropout_p == 0.0 and _is_whole(q, k, v, window, enable_gqa):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    q, k, v, mask, shape = prepare(q, k, v, attn_mask, window, enable_gqa, where)
    whole_k, whole_v = k, v
    seen = min(window.query_end, window.key_length)
    if is_causal and seen < k.shape[2]:
        k, v = k[:, :, :seen], v[:, :, :seen]
    seed = None
    if dropout_p > 0.0:
        seed = rng.dropout_seed(()) if dropout_seed is None else dropout_seed

    path = choose_path(q, k, v, window, mask, dropout_p, is_causal)
    if path == "tiled":
        offset = window.query_start if is_causal else None
        out = tiled_attention(
            q,
            k,
            v,
            mask=mask,
            causal_offset=offset,
            dropout_p=dropout_p,
            seed=seed or 0,
            scale=scale,
        )
    elif path == "prefix_and_diagonal":
        # whole: backward of a cut would fill and copy a gradient once more
        out = _flash_cpu.causal_rows_attention(q, whole_k, whole_v, window.query_start, scale)
    else:
        with contextlib.nullcontext() if seed is None else rng.seeded(q.device, seed):
            out = _fused(path, q, k, v, mask, dropout_p, is_causal, scale)
    return out.reshape(shape)


def _fused(
    path: Path,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    if path == "npu":
        return _npu.causal_attention(q, k, v, scale, dropout_p)
    bias: Any = mask
    if path == "lower_right":
        # here and not above: importing it loads torch's compiler, in every process
        from torch.nn.attention.bias import causal_lower_right

        bias, is_causal = causal_lower_right(q.shape[2], k.shape[2]), False
    return F.scaled_dot_product_attention(
        q, k, v, bias, dropout_p, is_causal, scale=scale, enable_gqa=_is_gqa(q, k)
    )


def choose_path(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: AttentionWindow,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
) -> Path:
    """Name the way one call is computed; ``k`` and ``v`` are cut to the causal prefix already.

    ============================  =====================  =================  ===================
    causal, and                   CPU                    CUDA               NPU
    ============================  =====================  =================  ===================
    rows from 0, or not causal    torch                  torch              torch, npu
    rows from mid-sequence        prefix_and_diagonal    lower_right        npu (sparse mode 3)
    torch would take math path    tiled                  tiled              tiled
    ============================  =====================  =================  ===================
    """
    device = q.device.type
    ends_at_last_key = k.shape[2] == window.query_end
    if device == "npu":
        if not is_causal:
            return "torch"
        return "npu" if ends_at_last_key and _npu.takes(q, v) else "tiled"
    if not is_causal or window.query_start == 0:
        return "torch" if _is_fused(q, k, v, mask, dropout_p, is_causal) else "tiled"
    if device == "cpu" and _is_fused(q, k, v, None, dropout_p, False):
        return "prefix_and_diagonal"
    if device == "cuda" and ends_at_last_key:
        params = torch.backends.cuda.SDPAParams(q, k, v, None, dropout_p, False, _is_gqa(q, k))
        if torch.backends.cuda.can_use_flash_attention(params):
            return "lower_right"
        if torch.backends.cuda.can_use_efficient_attention(params):
            return "lower_right"
    return "tiled"


def _is_fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool
) -> bool:
    """Whether torch has a kernel for this call that never holds all scores."""
    if q.device.type not in ("cpu", "cuda"):
        return False
    choice = torch._fused_sdp_choice(q, k, v, mask, dropout_p, is_causal, enable_gqa=_is_gqa(q, k))
    return choice != _MATH


def _is_whole(q: Tensor, k: Tensor, v: Tensor, window: AttentionWindow, enable_gqa: bool) -> bool:
    """Whether the window is the whole of 4-D attention, and torch has a fused kernel for it."""
    shared = k.shape[1:-1] == v.shape[1:-1] and q.shape[0] == k.shape[0] == v.shape[0]
    return (
        q.ndim == k.ndim == v.ndim == 4
        and shared
        and (k.shape[1] == q.shape[1] or (enable_gqa and q.shape[1] % k.shape[1] == 0))
        and window.query_start == 0
        and q.shape[2] == k.shape[2] == window.query_length == window.key_length
        and q.dtype == k.dtype == v.dtype
        and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        and q.device.type in ("cpu", "cuda")
        and not torch.is_autocast_enabled(q.device.type)
        and _is_fused(q, k, v, None, 0.0, True)
    )


def _is_gqa(q: Tensor, k: Tensor) -> bool:
    return q.shape[1] != k.shape[1]
