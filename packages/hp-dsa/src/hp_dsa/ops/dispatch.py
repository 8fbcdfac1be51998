"""Which implementation runs: the one place that looks at the device."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Protocol, cast

from torch import Tensor

from hp_dsa.ops.rows import Rows
from hp_mesh.checks import fail

__all__ = ["Gradients", "Operators", "implementation"]

_HOMES = {
    "reference": "hp_dsa.ops.reference",
    "tiled": "hp_dsa.ops.tiled",
    "triton": "hp_dsa.ops.launch",
    "npu": "hp_dsa._npu",
}

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
"""``d_query_index, d_key_index, d_weights`` and the loss ``[1]``."""


class Operators(Protocol):
    """What an implementation offers, arguments checked before; `reference` says what each means."""

    def lightning_indexer(
        self,
        query: Tensor,
        key: Tensor,
        weights: Tensor,
        rows: Rows,
        sparse_count: int,
        return_value: bool,
    ) -> tuple[Tensor, Tensor]:
        """See `reference.lightning_indexer`."""

    def sparse_flash_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        sparse_indices: Tensor,
        scale_value: float,
        rows: Rows,
        query_rope: Tensor | None,
        key_rope: Tensor | None,
        sparse_block_size: int,
        return_softmax_lse: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `reference.sparse_flash_attention`."""

    def sparse_kl_loss(
        self,
        query: Tensor,
        key: Tensor,
        query_index: Tensor,
        key_index: Tensor,
        weights: Tensor,
        sparse_indices: Tensor,
        softmax_max: Tensor,
        softmax_sum: Tensor,
        scale_value: float,
        rows: Rows,
        query_rope: Tensor | None,
        key_rope: Tensor | None,
        gradients: bool,
    ) -> Gradients:
        """See `reference.sparse_kl_loss`."""

    def dense_softmax_lse(
        self, query_index: Tensor, key_index: Tensor, weights: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """See `reference.dense_softmax_lse`."""

    def dense_kl_loss(
        self,
        query: Tensor,
        key: Tensor,
        query_index: Tensor,
        key_index: Tensor,
        weights: Tensor,
        softmax_max: Tensor,
        softmax_sum: Tensor,
        softmax_max_index: Tensor,
        softmax_sum_index: Tensor,
        scale_value: float,
        rows: Rows,
        query_rope: Tensor | None,
        key_rope: Tensor | None,
        gradients: bool,
    ) -> Gradients:
        """See `reference.dense_kl_loss`."""


def implementation(x: Tensor) -> Operators:
    """Return the operators for ``x``'s device: ``HP_DSA``, torch_npu on npu, or tiled."""
    name = os.environ.get("HP_DSA") or ("npu" if x.device.type == "npu" else "tiled")
    if name not in _HOMES:
        raise fail("hp_dsa.ops", f"HP_DSA ({name!r}) must be one of {', '.join(_HOMES)}")
    if name == "triton":
        _require_triton(x.device.type)
    return cast(Operators, importlib.import_module(_HOMES[name]))


def _require_triton(device_type: str) -> None:
    if importlib.util.find_spec("triton") is None:
        raise ImportError(
            "hp_dsa.ops: HP_DSA (triton) must name installed kernels, but triton cannot be "
            "imported; install hp-dsa[cuda], or use HP_DSA=tiled"
        )
    if device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise fail(
            "hp_dsa.ops",
            f"HP_DSA (triton) must be used with tensors on cuda, not on {device_type}",
            "use HP_DSA=tiled, or TRITON_INTERPRET=1 to debug the kernels",
        )
