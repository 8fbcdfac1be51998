"""DeepSeek Sparse Attention's operators: torch_npu's arguments, any device, exact gradients.

`reference` defines them in plain torch; `tiled` is what CPU and CUDA run; on an npu tensor the
calls go to torch_npu. ``HP_DSA=reference|tiled|triton|npu`` forces one; the Triton kernels are for
CUDA and run only when asked for. See `dispatch.implementation`.

Under ``torch.autocast`` queries, keys, values and rotary parts are cast to its dtype, as for
torch's own attention; sums and statistics inside stay float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_mesh.lazy import lazy_names

if TYPE_CHECKING:
    from hp_dsa.ops.attention import sparse_flash_attention
    from hp_dsa.ops.dispatch import implementation
    from hp_dsa.ops.indexer import lightning_indexer
    from hp_dsa.ops.loss import (
        dense_lightning_indexer_grad_kl_loss,
        dense_lightning_indexer_kl_loss,
        dense_lightning_indexer_softmax_lse,
        sparse_lightning_indexer_grad_kl_loss,
        sparse_lightning_indexer_kl_loss,
    )

__all__ = [
    "dense_lightning_indexer_grad_kl_loss",
    "dense_lightning_indexer_kl_loss",
    "dense_lightning_indexer_softmax_lse",
    "implementation",
    "lightning_indexer",
    "sparse_flash_attention",
    "sparse_lightning_indexer_grad_kl_loss",
    "sparse_lightning_indexer_kl_loss",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "dense_lightning_indexer_grad_kl_loss": "hp_dsa.ops.loss",
        "dense_lightning_indexer_kl_loss": "hp_dsa.ops.loss",
        "dense_lightning_indexer_softmax_lse": "hp_dsa.ops.loss",
        "implementation": "hp_dsa.ops.dispatch",
        "lightning_indexer": "hp_dsa.ops.indexer",
        "sparse_flash_attention": "hp_dsa.ops.attention",
        "sparse_lightning_indexer_grad_kl_loss": "hp_dsa.ops.loss",
        "sparse_lightning_indexer_kl_loss": "hp_dsa.ops.loss",
    },
)
