"""The operators as a boundary sees them: which argument is what, and what comes back. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["NPU", "OPERATORS", "Operator", "Result"]

Result = Literal["rows", "attention", "statistics", "keys", "sum"]
"""What an output is: rows of the queries, the same with the query's heads, softmax statistics,
a share of a gradient of keys, a share of a sum."""


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator; all names are those of its arguments.

    Attributes:
        positional: Arguments that may come by position, in order; the first is the query side.
        rows: Sharded along the sequence.
        keys: Whole sequence, to be cut to the window; the first has the key's length.
        statistics: Sharded along the statistics' own sequence dim.
        lengths: Lengths of the queries and of the keys.
        layouts: Arguments that name the layout.
        lengths_are_tensors: Whether torch_npu takes lengths as int32 tensors, not as lists.
        results: Its outputs; a single one is not in a tuple.
    """

    positional: tuple[str, ...]
    rows: tuple[str, ...]
    keys: tuple[str, ...]
    statistics: tuple[str, ...]
    lengths: tuple[str, str]
    layouts: tuple[str, ...]
    lengths_are_tensors: bool
    results: tuple[Result, ...]


_INDEXER = Operator(
    positional=("query", "key", "weights"),
    rows=("query", "weights"),
    keys=("key",),
    statistics=(),
    lengths=("actual_seq_lengths_query", "actual_seq_lengths_key"),
    layouts=("layout_query", "layout_key"),
    lengths_are_tensors=True,
    results=("rows", "rows"),
)
_ATTENTION = Operator(
    positional=("query", "key", "value", "sparse_indices", "scale_value"),
    rows=("query", "sparse_indices", "query_rope"),
    keys=("key", "value", "key_rope"),
    statistics=(),
    lengths=("actual_seq_lengths_query", "actual_seq_lengths_kv"),
    layouts=("layout_query", "layout_kv"),
    lengths_are_tensors=True,
    results=("attention", "statistics", "statistics"),
)
_LENGTHS = ("actual_seq_qlen", "actual_seq_klen")
_GRADIENTS: tuple[Result, ...] = ("rows", "keys", "rows", "sum")


def _sparse(results: tuple[Result, ...]) -> Operator:
    return Operator(
        positional=(
            *("query", "key", "query_index", "key_index", "weights", "sparse_indices"),
            *("softmax_max", "softmax_sum", "scale_value"),
        ),
        rows=("query", "query_index", "weights", "sparse_indices", "query_rope"),
        keys=("key", "key_index", "key_rope"),
        statistics=("softmax_max", "softmax_sum"),
        lengths=_LENGTHS,
        layouts=("layout",),
        lengths_are_tensors=False,
        results=results,
    )


def _dense(results: tuple[Result, ...]) -> Operator:
    statistics = ("softmax_max", "softmax_sum", "softmax_max_index", "softmax_sum_index")
    return Operator(
        positional=(
            *("query", "key", "query_index", "key_index", "weights"),
            *statistics,
            "scale_value",
        ),
        rows=("query", "query_index", "weights", "query_rope"),
        keys=("key", "key_index", "key_rope"),
        statistics=statistics,
        lengths=_LENGTHS,
        layouts=("layout",),
        lengths_are_tensors=False,
        results=results,
    )


_DENSE_LSE = Operator(
    positional=("query_index", "key_index", "weights"),
    rows=("query_index", "weights"),
    keys=("key_index",),
    statistics=(),
    lengths=_LENGTHS,
    layouts=("layout",),
    lengths_are_tensors=False,
    results=("statistics", "statistics"),
)

OPERATORS: Mapping[str, Operator] = {
    "lightning_indexer": _INDEXER,
    "sparse_flash_attention": _ATTENTION,
    "sparse_lightning_indexer_kl_loss": _sparse(("sum",)),
    "sparse_lightning_indexer_grad_kl_loss": _sparse(_GRADIENTS),
    "dense_lightning_indexer_softmax_lse": _DENSE_LSE,
    "dense_lightning_indexer_kl_loss": _dense(("sum",)),
    "dense_lightning_indexer_grad_kl_loss": _dense(_GRADIENTS),
}
"""Those of `hp_dsa.ops`, by name."""

NPU: Mapping[str, Operator] = {
    f"npu::npu_{name}": operator
    for name, operator in OPERATORS.items()
    if not name.endswith("indexer_kl_loss")
}
"""Those of torch_npu, by qualified name."""
