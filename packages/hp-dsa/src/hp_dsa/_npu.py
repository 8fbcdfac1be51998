"""Door to torch_npu's DSA operators; torch_npu is imported on the first call, never before.

Spellings and types are the kernels': the indexer and attention take lengths as int32 tensors, the
losses as lists of integers; keys must be dense; documented limits are refused here, by name, or
kept by splitting the call. What a limit refuses still runs with ``HP_DSA=tiled``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from hp_dsa.ops.contract import AttentionInputs, Gradients, LossInputs
from hp_dsa.ops.rows import Lengths, Rows
from hp_dsa.ops.split import Part, query_parts
from hp_mesh.checks import fail

__all__ = [
    "dense_kl_loss",
    "dense_softmax_lse",
    "lightning_indexer",
    "sparse_flash_attention",
    "sparse_kl_loss",
]

_DTYPES = (torch.bfloat16, torch.float16)
_LARGE_COUNTS = tuple(range(3072, 8193, 1024))
_INDEX_COUNTS = (*range(1, 2049), *_LARGE_COUNTS)
_LOSS_COUNTS = (1024, 2048, *_LARGE_COUNTS)
_LOSS_QUERIES = 8192
_LOSS_KEYS = 131072
_TILED = "or HP_DSA=tiled, which has no such limit"


def lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    rows: Rows,
    sparse_count: int,
    return_value: bool,
) -> tuple[Tensor, Tensor]:
    """Call ``npu_lightning_indexer``; its values are differentiable."""
    _check_lengths(rows)
    _require_dtype(rows, query=query, key=key, weights=weights)
    _require(rows, "N1", query.shape[-2], range(1, 65), "1 to 64 index heads")
    _require(rows, "D", query.shape[-1], (128,), "an index head size of 128")
    _require(
        rows, "sparse_count", sparse_count, _INDEX_COUNTS, "1 to 2048, or 3072 to 8192 by 1024"
    )
    found = _torch_npu().npu_lightning_indexer(
        query.contiguous(),
        key.contiguous(),
        weights.contiguous(),
        actual_seq_lengths_query=_tensor(rows.query_lengths, query),
        actual_seq_lengths_key=_tensor(rows.key_lengths, query),
        layout_query=rows.layout,
        layout_key=rows.layout,
        sparse_count=sparse_count,
        sparse_mode=rows.sparse_mode,
        return_value=return_value,
    )
    return cast(tuple[Tensor, Tensor], tuple(found))


def sparse_flash_attention(
    given: AttentionInputs, return_softmax_lse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Call ``npu_sparse_flash_attention`` in its absorbed mode.

    Indices are not checked: that would wait for the device. The kernel skips what a row cannot see.
    """
    rows, query = given.rows, given.query
    query_rope, key_rope = given.query_rope, given.key_rope
    _check_lengths(rows)
    if query_rope is None or key_rope is None:
        raise fail(
            rows.where,
            "query_rope and key_rope (None) must be given on npu",
            f"pass them, {_TILED}",
        )
    _require_dtype(rows, query=query, key=given.key, query_rope=query_rope, key_rope=key_rope)
    _require(rows, "N1", query.shape[-2], [1 << n for n in range(8)], "a power of two up to 128")
    _require(rows, "D", query.shape[-1], (512,), "a latent of 512")
    _require(rows, "Dr", query_rope.shape[-1], (64,), "a rotary part of 64")
    key = given.key.contiguous()
    value = key if given.value is None else given.value.contiguous()  # None needs CANN 9.2
    _require(rows, "Dv", value.shape[-1], (512,), "a value of 512")
    differentiable = torch.is_grad_enabled() and any(
        x.requires_grad for x in (query, key, value, query_rope, key_rope)
    )
    out, maximum, total = _torch_npu().npu_sparse_flash_attention(
        query.contiguous(),
        key,
        value,
        given.sparse_indices.int().contiguous(),
        given.scale,
        actual_seq_lengths_query=_tensor(rows.query_lengths, query),
        actual_seq_lengths_kv=_tensor(rows.key_lengths, query),
        query_rope=query_rope.contiguous(),
        key_rope=key_rope.contiguous(),
        sparse_block_size=given.block_size,
        layout_query=rows.layout,
        layout_kv=rows.layout,
        sparse_mode=rows.sparse_mode,
        attention_mode=2,  # the default, 0, is not implemented
        # its backward reads them, so that they are needed whether the caller wants them or not
        return_softmax_lse=return_softmax_lse or differentiable,
    )
    if not return_softmax_lse:
        maximum, total = maximum.new_empty(0), total.new_empty(0)
    return out, maximum.detach(), total.detach()


def sparse_kl_loss(given: LossInputs, sparse_indices: Tensor, gradients: bool) -> Gradients:
    """Call ``npu_sparse_lightning_indexer_grad_kl_loss``, for 8192 queries at a time."""
    _require_loss(given)
    _require(given.rows, "K", sparse_indices.shape[-1], _LOSS_COUNTS, "1024, 2048, ... 8192 keys")

    def call(part: Part) -> Sequence[Tensor]:
        return cast(
            Sequence[Tensor],
            _torch_npu().npu_sparse_lightning_indexer_grad_kl_loss(
                *_operands(part, given),
                part.queries(sparse_indices).int().contiguous(),
                *_statistics(part, given.softmax_max, given.softmax_sum),
                given.scale,
                **_rope(part, given),
                **_options(part.rows),
            ),
        )

    return _added(given, call, gradients)


def dense_softmax_lse(
    query_index: Tensor, key_index: Tensor, weights: Tensor, rows: Rows
) -> tuple[Tensor, Tensor]:
    """Call ``npu_dense_lightning_indexer_softmax_lse``, for 8192 queries at a time."""
    rows.check_lengths()
    _require_dtype(rows, query_index=query_index, key_index=key_index, weights=weights)
    _require_index(rows, query_index)
    sequence = 2 if rows.layout == "BSND" else 1
    shape = [1, rows.num_queries]
    shape = [rows.batch, *shape] if rows.layout == "BSND" else shape
    found = [query_index.new_zeros(shape, dtype=_wide(query_index)) for _ in range(2)]
    for part in query_parts(rows, _LOSS_QUERIES):
        results = _torch_npu().npu_dense_lightning_indexer_softmax_lse(
            part.queries(query_index).contiguous(),
            part.keys(key_index).contiguous(),
            part.queries(weights).contiguous(),
            **_options(part.rows),
        )
        for whole, result in zip(found, results, strict=True):
            whole.narrow(sequence, part.first, part.last - part.first).copy_(result)
    return found[0], found[1]


def dense_kl_loss(
    given: LossInputs,
    index_statistics: tuple[Tensor, Tensor],
    gradients: bool,
) -> Gradients:
    """Call ``npu_dense_lightning_indexer_grad_kl_loss``, for 8192 queries at a time."""
    _require_loss(given)

    def call(part: Part) -> Sequence[Tensor]:
        return cast(
            Sequence[Tensor],
            _torch_npu().npu_dense_lightning_indexer_grad_kl_loss(
                *_operands(part, given),
                *_statistics(part, given.softmax_max, given.softmax_sum, *index_statistics),
                given.scale,
                **_rope(part, given),
                **_options(part.rows),
            ),
        )

    return _added(given, call, gradients)


def _torch_npu() -> Any:
    try:
        return importlib.import_module("torch_npu")
    except ImportError as error:
        raise ImportError(
            "hp_dsa.ops: HP_DSA (npu) must name operators that are installed, but torch_npu cannot "
            f"be imported ({error}); install hp-dsa[npu] beside CANN, or use HP_DSA=tiled"
        ) from error


def _check_lengths(rows: Rows) -> None:
    """Check lengths that the host has; those on the device are not waited for."""
    given = (rows.query_lengths, rows.key_lengths)
    if not any(isinstance(x, Tensor) and x.device.type != "cpu" for x in given):
        rows.check_lengths()


def _tensor(lengths: Lengths | None, like: Tensor) -> Tensor | None:
    """Return lengths as the indexer and attention take them; a tensor is not read to the host."""
    if lengths is None or isinstance(lengths, Tensor):
        return None if lengths is None else lengths.to(like.device, torch.int32)
    return torch.tensor(lengths, dtype=torch.int32, device=like.device)


def _options(rows: Rows) -> dict[str, Any]:
    """Return the losses' common arguments: lengths as lists."""
    return {
        "actual_seq_qlen": _listed(rows.query_lengths),
        "actual_seq_klen": _listed(rows.key_lengths),
        "layout": rows.layout,
        "sparse_mode": rows.sparse_mode,
    }


def _listed(lengths: Lengths | None) -> list[int] | None:
    if lengths is None:
        return None
    return [int(n) for n in (lengths.tolist() if isinstance(lengths, Tensor) else lengths)]


def _operands(part: Part, given: LossInputs) -> tuple[Tensor, ...]:
    """Return what both losses take first, in their order."""
    return (
        part.queries(given.query).contiguous(),
        part.keys(given.key).contiguous(),
        part.queries(given.query_index).contiguous(),
        part.keys(given.key_index).contiguous(),
        part.queries(given.weights).contiguous(),
    )


def _statistics(part: Part, *statistics: Tensor) -> tuple[Tensor, ...]:
    return tuple(part.queries(x, heads_first=True).contiguous() for x in statistics)


def _rope(part: Part, given: LossInputs) -> dict[str, Any]:
    if given.query_rope is None or given.key_rope is None:
        return {}
    return {
        "query_rope": part.queries(given.query_rope).contiguous(),
        "key_rope": part.keys(given.key_rope).contiguous(),
    }


def _wide(x: Tensor) -> torch.dtype:
    """Return the dtype of sums: float32 for what the kernels take."""
    return torch.promote_types(x.dtype, torch.float32)


def _added(
    given: LossInputs, call: Callable[[Part], Sequence[Tensor]], gradients: bool
) -> Gradients:
    """Add up the parts of a loss: rows' gradients beside each other, keys' in float32."""
    rows, inputs = given.rows, given.of_index
    parts = query_parts(rows, _LOSS_QUERIES)
    if rows.num_queries <= _LOSS_QUERIES:
        *found, loss = call(next(parts))
    else:
        loss = inputs[0].new_zeros(1, dtype=_wide(inputs[0]))
        dtypes = (inputs[0].dtype, _wide(inputs[1]), inputs[2].dtype)
        found = [
            torch.zeros(x.shape, dtype=dtype, device=x.device)
            for x, dtype in zip(inputs, dtypes, strict=True)
        ]
        for part in parts:
            d_query, d_key, d_weights, of_part = call(part)
            part.queries(found[0]).copy_(d_query)
            part.keys(found[1]).add_(d_key)
            part.queries(found[2]).copy_(d_weights)
            loss = loss + of_part
    if not gradients:
        found = [x.new_empty(0) for x in inputs]
    a, b, c = (d.to(x.dtype) for d, x in zip(found, inputs, strict=True))
    return a, b, c, loss


def _require(rows: Rows, name: str, value: int, known: Sequence[int], words: str) -> None:
    if value not in known:
        raise fail(rows.where, f"{name} ({value}) must be {words} on npu", f"change it, {_TILED}")


def _require_dtype(rows: Rows, **tensors: Tensor) -> None:
    for name, x in tensors.items():
        if x.dtype not in _DTYPES:
            raise fail(
                rows.where,
                f"{name} ({x.dtype}) must be bfloat16 or float16 on npu",
                f"cast it, {_TILED}",
            )


def _require_loss(given: LossInputs) -> None:
    """Require what the two losses have in common."""
    rows = given.rows
    rows.check_lengths()  # the kernel takes lists as they are
    names = ("query", "key", "query_index", "key_index", "weights")
    _require_dtype(rows, **{name: getattr(given, name) for name in names})
    _require(rows, "N1", given.query.shape[-2], (32, 64, 128), "32, 64 or 128 heads")
    _require_index(rows, given.query_index)


def _require_index(rows: Rows, query_index: Tensor) -> None:
    _require(rows, "N1 of query_index", query_index.shape[-2], (8, 16, 32, 64), "8, 16, 32 or 64")
    _require(rows, "D of query_index", query_index.shape[-1], (128,), "an index head size of 128")
    _require(rows, "S2", rows.num_keys, range(_LOSS_KEYS + 1), f"at most {_LOSS_KEYS} keys")
