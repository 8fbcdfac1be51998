"""The lightning indexer: which keys a query attends to."""

from __future__ import annotations

from torch import Tensor

from hp_dsa.ops.arguments import (
    NO_LIMIT,
    check_count,
    check_dtypes,
    check_shape,
    check_tokens,
    read_rows,
)
from hp_dsa.ops.autocast import cast_by_autocast
from hp_dsa.ops.dispatch import implementation
from hp_dsa.ops.rows import Lengths
from hp_mesh.checks import require
from hp_mesh.overrides import seen_by_views

__all__ = ["check_index_inputs", "lightning_indexer"]

_WHERE = "lightning_indexer"


@seen_by_views
@cast_by_autocast("query", "key")
def lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Lengths | None = None,
    actual_seq_lengths_key: Lengths | None = None,
    block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = NO_LIMIT,
    next_tokens: int = NO_LIMIT,
    return_value: bool = False,
) -> tuple[Tensor, Tensor]:
    """Select for each query the ``sparse_count`` visible keys of the largest index score.

    The score of key ``s`` for query ``t`` is ``sum_j weights[t, j] * relu(query[t, j] . key[s])``.
    Keys come in descending score, equal scores in ascending position (``-0.0`` equals ``0.0``, NaN
    counts as the largest), so that ranks that see the same keys select the same ones.

    Args:
        query: ``[B, S1, N1, D]``, or ``[T1, N1, D]`` for TND.
        key: ``[B, S2, 1, D]`` or ``[T2, 1, D]``.
        weights: ``[B, S1, N1]`` or ``[T1, N1]``; any scale is already in them. Their dtype may
            differ from the query's.
        actual_seq_lengths_query: Valid lengths, ``B`` numbers (BSND, default: all), or cumulative
            ends without a leading 0 (TND, required); a list or an integer tensor.
        actual_seq_lengths_key: As for the query; a document's two lengths may differ.
        block_table: Paged keys are for inference: must be None.
        layout_query: ``"BSND"`` or ``"TND"``.
        layout_key: The same as ``layout_query``.
        sparse_count: ``K``, entries of a row.
        sparse_mode: 0, every key of the row's document; 3, causal with the last query seeing the
            last key. There is no offset: hand over the keys up to the last query's own.
        pre_tokens: Must be its default.
        next_tokens: Must be its default.
        return_value: Also return the scores; a gradient flows through them to all three inputs.

    Returns:
        ``sparse_indices`` int32 ``[B, S1, 1, K]`` or ``[T1, 1, K]``, counted from the start of the
        row's own document, -1 behind the visible keys; and ``sparse_values`` of the same shape in
        the query's dtype, ``-inf`` behind the visible keys, or an empty tensor.
    """
    check_tokens(_WHERE, pre_tokens, next_tokens)
    require(
        block_table is None,
        _WHERE,
        "block_table (given) must be None",
        "paged keys are for inference; pass the keys themselves",
    )
    check_count(_WHERE, sparse_count)
    rows = read_rows(
        _WHERE,
        query,
        key,
        {"layout_query": layout_query, "layout_key": layout_key},
        sparse_mode,
        {
            "actual_seq_lengths_query": actual_seq_lengths_query,
            "actual_seq_lengths_key": actual_seq_lengths_key,
        },
    )
    check_index_inputs(_WHERE, query, key, weights, ("query", "key"))
    return implementation(query).lightning_indexer(
        query, key, weights, rows, sparse_count, return_value
    )


def check_index_inputs(
    where: str, query: Tensor, key: Tensor, weights: Tensor, names: tuple[str, str]
) -> None:
    """Require the indexer's three inputs to fit each other; layouts are already checked."""
    check_dtypes(where, **{names[0]: query, names[1]: key})
    check_dtypes(where, weights=weights)  # float32 beside bfloat16 is usual
    check_shape(
        where,
        names[1],
        key,
        (*key.shape[:-2], 1, query.shape[-1]),
        f"one index head of {names[0]}'s size",
    )
    check_shape(where, "weights", weights, tuple(query.shape[:-1]), f"{names[0]}'s shape without D")
