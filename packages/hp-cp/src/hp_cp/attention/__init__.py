"""Attention on one rank's rows: plain tensors in, plain tensors out, no communication.

The global view of `hp_mesh` unwraps the DTensors, calls these functions with the rank's window and
wraps what they return. Names are resolved on first use, so that importing one costs only its file.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

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

_HOMES = {
    "cut_mask": "masks",
    "dropout_seed": "rng",
    "rewrite_fusion_attention": "fusion",
    "tiled_attention": "tiled",
    "window_sdpa": "sdpa",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
