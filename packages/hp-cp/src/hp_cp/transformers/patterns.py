"""Attention that needs no mask: windows and documents that transformers describes by a function.

A mask of ``S / P`` rows over ``S`` keys is what a description becomes otherwise. The two patterns
of causal models are told apart by the functions that transformers makes them of; any other
function, padding, and dropout keep the mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.masking_utils import causal_mask_function

from hp_cp.packed import packed_attention
from hp_cp.sliding import sliding_window_attention
from hp_cp.windowed import Halo
from hp_mesh.open_views import current_view

if TYPE_CHECKING:
    from hp_cp.transformers.call import GlobalCall
    from hp_cp.transformers.masks import MaskDescription

__all__ = ["Pattern", "attend_without_mask", "pattern_of"]


@dataclass(frozen=True, slots=True)
class Pattern:
    """Causal attention.

    Attributes:
        window: How many keys a query sees, its own included; None for all up to its own.
    """

    window: int | None


def pattern_of(function: Callable[..., Any]) -> Pattern | None:
    """Return what transformers' mask function shows, or None if it is another than the two."""
    if function is causal_mask_function:
        return Pattern(None)
    if getattr(function, "__qualname__", "") != "and_masks.<locals>.and_mask":
        return None
    parts = inspect.getclosurevars(function).nonlocals.get("mask_functions", ())
    if len(parts) != 2 or parts[1] is not causal_mask_function:
        return None
    if parts[0].__qualname__ != "sliding_window_overlay.<locals>.inner_mask":
        return None
    window = inspect.getclosurevars(parts[0]).nonlocals.get("sliding_window")
    return Pattern(window) if isinstance(window, int) else None


def attend_without_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: MaskDescription,
    call: GlobalCall,
    options: dict[str, Any],
) -> Tensor | None:
    """Compute a window or documents by their operator; None where a mask, or none, does it.

    Args:
        query: ``[B, H, S, D]``.
        key: ``[B, Hkv, S, D]``.
        value: ``[B, Hkv, S, Dv]``.
        mask: What transformers described.
        call: The global facts of the model call.
        options: What the layer passes to its attention function.

    Returns:
        ``[B, S, H, Dv]``.
    """
    view = current_view()
    if view is not None and view.streamed is not None and not isinstance(view.streamed, Halo):
        return None  # kv_chunks: plain attention with a mask takes K and V part by part
    pattern = pattern_of(mask.arguments["mask_function"])
    if pattern is None or call.padding is not None or options.get("dropout", 0.0) > 0.0:
        return None
    if mask.arguments["kv_length"] != call.global_length:
        return None  # a mask of something else, which will be refused
    scale = options.get("scaling")
    if call.documents is None:
        if pattern.window is None or pattern.window >= call.global_length:
            return None  # plain causal attention
        out = sliding_window_attention(query, key, value, pattern.window, scale=scale)
        return out.transpose(1, 2).contiguous()
    if call.cu_seqlens is None or query.shape[0] != 1:
        return None
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [S, H, D]
    packed = packed_attention(q, k, v, call.cu_seqlens, sliding_window=pattern.window, scale=scale)
    return packed.unsqueeze(0)
