"""Attention on one rank's rows: plain tensors in, plain tensors out, no communication.

The global view of `hp_mesh` unwraps the DTensors, calls these functions with the rank's window and
wraps what they return. Names are resolved on first use, so that importing one costs only its file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_mesh.lazy import lazy_names

if TYPE_CHECKING:
    from hp_cp.attention.fusion import rewrite_fusion_attention
    from hp_cp.attention.masks import cut_mask
    from hp_cp.attention.rng import dropout_seed
    from hp_cp.attention.sdpa import window_sdpa
    from hp_cp.attention.tiled import tiled_attention

__all__ = [
    "cut_mask",
    "dropout_seed",
    "rewrite_fusion_attention",
    "tiled_attention",
    "window_sdpa",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "cut_mask": "hp_cp.attention.masks",
        "dropout_seed": "hp_cp.attention.rng",
        "rewrite_fusion_attention": "hp_cp.attention.fusion",
        "tiled_attention": "hp_cp.attention.tiled",
        "window_sdpa": "hp_cp.attention.sdpa",
    },
)
