"""Sparse attention over selected keys, in the absorbed (latent) form."""

from __future__ import annotations

from torch import Tensor

from hp_dsa.ops.arguments import (
    NO_LIMIT,
    check_dtypes,
    check_indices,
    check_shape,
    check_tokens,
    read_rows,
    read_scale,
)
from hp_dsa.ops.autocast import cast_by_autocast
from hp_dsa.ops.contract import AttentionInputs
from hp_dsa.ops.dispatch import implementation
from hp_dsa.ops.rows import Lengths
from hp_mesh.checks import fail, require, require_positive
from hp_mesh.overrides import seen_by_views

__all__ = ["check_rope", "sparse_flash_attention"]

_WHERE = "sparse_flash_attention"


@seen_by_views
@cast_by_autocast("query", "key", "value", "query_rope", "key_rope")
def sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Lengths | None = None,
    actual_seq_lengths_kv: Lengths | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = NO_LIMIT,
    next_tokens: int = NO_LIMIT,
    attention_mode: int = 0,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend each query to its selected keys: ``softmax(scale * (q.k + q_rope.k_rope)) v``.

    A row's selection ends at its first -1; an entry that the row does not see is skipped. A row
    without any key gives zeros, and no gradient.

    Args:
        query: ``[B, S1, N1, D]`` or ``[T1, N1, D]``.
        key: ``[B, S2, 1, D]`` or ``[T2, 1, D]``: one head, shared by all of the query's.
        value: ``[B, S2, 1, Dv]`` or ``[T2, 1, Dv]``; None, or the key itself, for the latent form.
        sparse_indices: int32 ``[B, S1, 1, K]`` or ``[T1, 1, K]``, from `lightning_indexer`.
        scale_value: Factor on the scores: the un-absorbed head size to the power -1/2.
        block_table: Paged keys are for inference: must be None.
        actual_seq_lengths_query: As for `lightning_indexer`.
        actual_seq_lengths_kv: As for `lightning_indexer`.
        query_rope: ``[.., N1, Dr]``, the rotary part of the query; None with ``key_rope``.
        key_rope: ``[.., 1, Dr]``.
        sparse_block_size: ``b``: index ``i`` stands for the keys ``[i * b, (i + 1) * b)``, cut at
            what the row sees.
        layout_query: ``"BSND"`` or ``"TND"``.
        layout_kv: The same as ``layout_query``.
        sparse_mode: 0 or 3, as for `lightning_indexer`.
        pre_tokens: Must be its default.
        next_tokens: Must be its default.
        attention_mode: 0 and 2 both mean the absorbed form, the only one there is.
        return_softmax_lse: Also return the softmax's statistics, which the indexer's loss needs.
        sinks: Attention sinks are not supported: must be None.

    Returns:
        The output ``[.., N1, Dv]`` in the query's dtype, and ``softmax_max`` and ``softmax_sum`` of
        the scaled scores, natural base, ``[B, 1, S1, N1]`` or ``[1, T1, N1]`` in float32 (float64
        for float64 inputs), or empty tensors. The statistics carry no gradient.
    """
    check_tokens(_WHERE, pre_tokens, next_tokens)
    for name, given, way_out in (
        ("block_table", block_table, "paged keys are for inference; pass the keys themselves"),
        ("sinks", sinks, "no backend differentiates them"),
    ):
        require(given is None, _WHERE, f"{name} (given) must be None", way_out)
    require(
        attention_mode in (0, 2),
        _WHERE,
        f"attention_mode ({attention_mode!r}) must be 2, the absorbed form, or its default 0",
    )
    require_positive(_WHERE, "sparse_block_size", sparse_block_size)
    rows = read_rows(
        _WHERE,
        query,
        key,
        {"layout_query": layout_query, "layout_kv": layout_kv},
        sparse_mode,
        {
            "actual_seq_lengths_query": actual_seq_lengths_query,
            "actual_seq_lengths_kv": actual_seq_lengths_kv,
        },
    )
    check_dtypes(_WHERE, query=query, key=key, value=value)
    one_head = (*key.shape[:-2], 1)
    check_shape(_WHERE, "key", key, (*one_head, query.shape[-1]), "one head of query's size")
    if value is not None:
        shape = (*one_head, *value.shape[-1:])
        check_shape(_WHERE, "value", value, shape, "one head on key's rows")
    check_rope(_WHERE, query, key, query_rope, key_rope)
    scale = read_scale(_WHERE, scale_value)
    check_indices(_WHERE, sparse_indices, (*query.shape[:-2], 1), "[.., 1, K] on query's rows")
    inputs = AttentionInputs(
        query=query,
        key=key,
        value=None if value is key else value,
        sparse_indices=sparse_indices,
        scale=scale,
        rows=rows,
        query_rope=query_rope,
        key_rope=key_rope,
        block_size=sparse_block_size,
    )
    return implementation(query).sparse_flash_attention(inputs, return_softmax_lse)


def check_rope(
    where: str, query: Tensor, key: Tensor, query_rope: Tensor | None, key_rope: Tensor | None
) -> None:
    """Require both rotary parts or none, on the rows and heads of query and key."""
    if query_rope is None and key_rope is None:
        return
    if query_rope is None or key_rope is None:
        missing = "query_rope" if query_rope is None else "key_rope"
        raise fail(where, f"{missing} (None) must come together with the other rotary part")
    check_dtypes(where, query=query, query_rope=query_rope, key_rope=key_rope)
    size = query_rope.shape[-1:]
    check_shape(where, "query_rope", query_rope, (*query.shape[:-1], *size), "on query's heads")
    check_shape(where, "key_rope", key_rope, (*key.shape[:-1], *size), "on key's heads, same Dr")
