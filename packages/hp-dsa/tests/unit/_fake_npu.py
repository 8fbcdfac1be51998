# ruff: noqa: ANN001, ANN202
"""A stand-in for torch_npu: its DSA operators' signatures, computed by the tiled operators."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hp_dsa.ops import tiled
from hp_dsa.ops.contract import AttentionInputs, LossInputs
from hp_dsa.ops.rows import Rows

MAX = (1 << 63) - 1


class Npu(ModuleType):
    """torch_npu's five operators, signature for signature; ``calls`` holds what they were given."""

    def __init__(self) -> None:
        super().__init__("torch_npu")
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def _take(self, name: str, given: dict[str, Any], lengths: type) -> None:
        given = {key: value for key, value in given.items() if key != "self"}
        for key, value in given.items():
            if isinstance(value, Tensor):
                assert value.is_contiguous(), key
            if key.startswith("actual_seq") and value is not None:
                assert isinstance(value, lengths), key
                assert lengths is list or value.dtype is torch.int32
        self.calls.append((name, given))

    def npu_lightning_indexer(
        self, query, key, weights, *, actual_seq_lengths_query=None, actual_seq_lengths_key=None,
        block_table=None, layout_query="BSND", layout_key="BSND", sparse_count=2048, sparse_mode=3,
        pre_tokens=MAX, next_tokens=MAX, return_value=False,
    ):  # fmt: skip
        self._take("indexer", locals(), Tensor)
        rows = rows_of(
            query, key, layout_query, sparse_mode, actual_seq_lengths_query, actual_seq_lengths_key
        )
        return tiled.lightning_indexer(query, key, weights, rows, sparse_count, return_value)

    def npu_sparse_flash_attention(
        self, query, key, value, sparse_indices, scale_value, *, block_table=None,
        actual_seq_lengths_query=None, actual_seq_lengths_kv=None, query_rope=None, key_rope=None,
        sparse_block_size=1, layout_query="BSND", layout_kv="BSND", sparse_mode=3, pre_tokens=MAX,
        next_tokens=MAX, attention_mode=0, return_softmax_lse=False, sinks=None,
    ):  # fmt: skip
        self._take("attention", locals(), Tensor)
        assert attention_mode == 2 and sparse_indices.dtype is torch.int32
        rows = rows_of(
            query, key, layout_query, sparse_mode, actual_seq_lengths_query, actual_seq_lengths_kv
        )
        given = AttentionInputs(
            query, key, None if value is key else value, sparse_indices, scale_value, rows,
            query_rope, key_rope, sparse_block_size,
        )  # fmt: skip
        return tiled.sparse_flash_attention(given, return_softmax_lse)

    def npu_sparse_lightning_indexer_grad_kl_loss(
        self, query, key, query_index, key_index, weights, sparse_indices, softmax_max, softmax_sum,
        scale_value, *, query_rope=None, key_rope=None, actual_seq_qlen=None, actual_seq_klen=None,
        layout="BSND", sparse_mode=3, pre_tokens=MAX, next_tokens=MAX, sinks=None,
    ):  # fmt: skip
        self._take("sparse loss", locals(), list)
        rows = rows_of(query, key, layout, sparse_mode, actual_seq_qlen, actual_seq_klen)
        given = LossInputs(
            query, key, query_index, key_index, weights, softmax_max, softmax_sum, scale_value,
            rows, query_rope, key_rope,
        )  # fmt: skip
        return tiled.sparse_kl_loss(given, sparse_indices, True)

    def npu_dense_lightning_indexer_softmax_lse(
        self, query_index, key_index, weights, *, actual_seq_qlen=None, actual_seq_klen=None,
        layout="BSND", sparse_mode=3, pre_tokens=MAX, next_tokens=MAX,
    ):  # fmt: skip
        self._take("dense lse", locals(), list)
        rows = rows_of(
            query_index, key_index, layout, sparse_mode, actual_seq_qlen, actual_seq_klen
        )
        return tiled.dense_softmax_lse(query_index, key_index, weights, rows)

    def npu_dense_lightning_indexer_grad_kl_loss(
        self, query, key, query_index, key_index, weights, softmax_max, softmax_sum,
        softmax_max_index, softmax_sum_index, scale_value, *, query_rope=None, key_rope=None,
        actual_seq_qlen=None, actual_seq_klen=None, layout="BSND", sparse_mode=3, pre_tokens=MAX,
        next_tokens=MAX,
    ):  # fmt: skip
        self._take("dense loss", locals(), list)
        rows = rows_of(query, key, layout, sparse_mode, actual_seq_qlen, actual_seq_klen)
        given = LossInputs(
            query, key, query_index, key_index, weights, softmax_max, softmax_sum, scale_value,
            rows, query_rope, key_rope,
        )  # fmt: skip
        return tiled.dense_kl_loss(given, (softmax_max_index, softmax_sum_index), True)


def rows_of(query: Tensor, key: Tensor, layout: str, mode: int, q: Any, k: Any) -> Rows:
    tnd = layout == "TND"
    return Rows(
        "npu",
        layout,  # type: ignore[arg-type]
        mode,
        1 if tnd else query.shape[0],
        query.shape[0 if tnd else 1],
        key.shape[0 if tnd else 1],
        q,
        k,
    )
