"""What the documentation of the sparse attention operators allows; see `limits`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .recording import Call

__all__ = ["OPERATORS", "check_dsa"]

_HALVES = (torch.bfloat16, torch.float16)
_LARGE = tuple(range(3072, 8193, 1024))
_NO_LIMIT = 2**63 - 1


def check_dsa(call: Call) -> None:
    """Assert the documented limits of one call of a sparse attention operator."""
    given = call.given
    for name, value in given.items():
        if isinstance(value, Tensor):
            assert value.is_contiguous(), f"{name} must be dense"
            assert value.device.type == "npu", f"{name} on {value.device}"
            if name in _ACTIVATIONS:
                assert value.dtype in _HALVES, f"{name} in {value.dtype}"
    assert given["sparse_mode"] in (0, 3), given["sparse_mode"]
    assert given["pre_tokens"] == given["next_tokens"] == _NO_LIMIT
    OPERATORS[call.operator](given)


_ACTIVATIONS = (
    *("query", "key", "value", "weights", "query_rope", "key_rope"),
    *("query_index", "key_index"),
)


def _tensors_or_none(given: dict[str, Any], layout: str, *names: str) -> None:
    for name in names:
        value = given[name]
        assert value is not None or layout == "BSND", f"{name} is needed in TND"
        assert value is None or (isinstance(value, Tensor) and value.dtype == torch.int32), name


def _lists_or_none(given: dict[str, Any]) -> None:
    for name in ("actual_seq_qlen", "actual_seq_klen"):
        value = given[name]
        assert value is not None or given["layout"] == "BSND", f"{name} is needed in TND"
        assert value is None or all(isinstance(n, int) for n in value), name


def _check_indexer(given: dict[str, Any]) -> None:
    layout = given["layout_query"]
    assert given["layout_key"] == layout and given["block_table"] is None
    names = ("actual_seq_lengths_query", "actual_seq_lengths_key")
    _tensors_or_none(given, layout, *names)
    _check_heads(given["query"], given["key"], given["weights"], 64)
    count = given["sparse_count"]
    assert 1 <= count <= 2048 or count in _LARGE, f"sparse_count {count}"


def _check_heads(query: Tensor, key: Tensor, weights: Tensor, most: int) -> None:
    assert query.shape[-1] == key.shape[-1] == 128, f"{query.shape}, {key.shape}"
    assert 1 <= query.shape[-2] <= most and key.shape[-2] == 1, f"{query.shape}, {key.shape}"
    assert weights.shape == query.shape[:-1], f"weights {weights.shape} of {query.shape}"


def _check_attention(given: dict[str, Any]) -> None:
    layout = given["layout_query"]
    assert given["layout_kv"] == layout and given["block_table"] is None
    names = ("actual_seq_lengths_query", "actual_seq_lengths_kv")
    _tensors_or_none(given, layout, *names)
    query, key, indices = given["query"], given["key"], given["sparse_indices"]
    assert given["attention_mode"] == 2 and given["sinks"] is None
    assert query.shape[-1] == key.shape[-1] == 512 and key.shape[-2] == 1
    assert query.shape[-2] in {1 << n for n in range(8)}, f"{query.shape[-2]} heads"
    assert given["value"] is not None and given["value"].shape == key.shape
    assert given["query_rope"].shape == (*query.shape[:-1], 64)
    assert given["key_rope"].shape == (*key.shape[:-1], 64)
    assert indices.dtype == torch.int32 and indices.shape[:-1] == (*query.shape[:-2], 1)


def _check_index(given: dict[str, Any]) -> None:
    _lists_or_none(given)
    query = given["query_index"]
    _check_heads(query, given["key_index"], given["weights"], 64)
    assert query.shape[-2] in (8, 16, 32, 64), f"{query.shape[-2]} index heads"
    rows = query.shape[1 if given["layout"] == "BSND" else 0]
    assert rows <= 8192, f"{rows} queries"


def _check_loss(given: dict[str, Any]) -> None:
    _check_index(given)
    query, key, batched = given["query"], given["key"], given["layout"] == "BSND"
    assert query.shape[-2] in (32, 64, 128), f"{query.shape[-2]} heads"
    assert key.shape[1 if batched else 0] <= 131072, f"{key.shape} keys"
    rows = query.shape[1 if batched else 0]
    lead = (query.shape[0],) if batched else ()
    for name in ("softmax_max", "softmax_sum"):
        stats = given[name]
        assert stats.dtype == torch.float32, f"{name} in {stats.dtype}"
        assert stats.shape == (*lead, 1, rows, query.shape[-2]), f"{name} {stats.shape}"
    for name in ("softmax_max_index", "softmax_sum_index"):
        if name in given:
            assert given[name].shape == (*lead, 1, rows) and given[name].dtype == torch.float32


def _check_sparse_loss(given: dict[str, Any]) -> None:
    _check_loss(given)
    indices = given["sparse_indices"]
    assert indices.dtype == torch.int32 and indices.shape[-1] in (1024, 2048, *_LARGE)


OPERATORS = {
    "npu_lightning_indexer": _check_indexer,
    "npu_sparse_flash_attention": _check_attention,
    "npu_sparse_lightning_indexer_grad_kl_loss": _check_sparse_loss,
    "npu_dense_lightning_indexer_softmax_lse": _check_index,
    "npu_dense_lightning_indexer_grad_kl_loss": _check_loss,
}
"""What our door calls, and what each call is held to."""
