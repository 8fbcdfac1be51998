"""The memory-lean operators: what CPU and CUDA run.

Nothing of size queries times keys is ever held: scores live in tiles, the top-k is running, keys
are gathered for a few rows at a time, and backward computes what it needs again. Sums run in
float32 (float64 for float64 inputs) whatever the inputs' dtype.
"""

from __future__ import annotations

from hp_dsa.ops.tiled_attention import sparse_flash_attention
from hp_dsa.ops.tiled_indexer import lightning_indexer
from hp_dsa.ops.tiled_loss import dense_kl_loss, dense_softmax_lse, sparse_kl_loss

__all__ = [
    "dense_kl_loss",
    "dense_softmax_lse",
    "lightning_indexer",
    "sparse_flash_attention",
    "sparse_kl_loss",
]
