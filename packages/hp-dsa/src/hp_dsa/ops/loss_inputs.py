"""What the arguments of the losses must be, and what of them an implementation is handed."""

from __future__ import annotations

from torch import Tensor

from hp_dsa.ops.arguments import check_dtypes, check_shape, check_tokens, read_rows, read_scale
from hp_dsa.ops.attention import check_rope
from hp_dsa.ops.contract import LossInputs
from hp_dsa.ops.indexer import check_index_inputs
from hp_dsa.ops.rows import Lengths, Rows
from hp_mesh.checks import fail, require_divisible

__all__ = ["check_statistics", "read_loss_inputs"]

_ATTENTION = "sparse_flash_attention returns with return_softmax_lse=True"


def read_loss_inputs(
    where: str,
    *,
    query: Tensor,
    key: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    scale_value: float,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    actual_seq_qlen: Lengths | None,
    actual_seq_klen: Lengths | None,
    layout: str,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
) -> LossInputs:
    """Check what the two losses have in common; the statistics are the caller's to check."""
    check_tokens(where, pre_tokens, next_tokens)
    rows = read_rows(
        where,
        query,
        key,
        {"layout": layout},
        sparse_mode,
        {"actual_seq_qlen": actual_seq_qlen, "actual_seq_klen": actual_seq_klen},
    )
    check_dtypes(where, query=query, key=key)
    check_rope(where, query, key, query_rope, key_rope)
    for name, x, like in (("query_index", query_index, query), ("key_index", key_index, key)):
        check_shape(
            where,
            name,
            x,
            (*like.shape[:-2], *x.shape[-2:]),
            f"on {name.removesuffix('_index')}'s rows",
        )
    check_index_inputs(where, query_index, key_index, weights, ("query_index", "key_index"))
    _require_there(rows, _ATTENTION, softmax_max=softmax_max, softmax_sum=softmax_sum)
    return LossInputs(
        query=query.detach(),
        key=key.detach(),
        query_index=query_index,
        key_index=key_index,
        weights=weights,
        softmax_max=softmax_max.detach(),
        softmax_sum=softmax_sum.detach(),
        scale=read_scale(where, scale_value),
        rows=rows,
        query_rope=None if query_rope is None else query_rope.detach(),
        key_rope=None if key_rope is None else key_rope.detach(),
    )


def _require_there(rows: Rows, source: str, **given: Tensor | None) -> None:
    """Require statistics that were asked for; ``source`` says of whom."""
    for name, x in given.items():
        if x is None or (x.numel() == 0 and rows.batch * rows.num_queries):
            shown = "None" if x is None else "empty"
            raise fail(rows.where, f"{name} ({shown}) must be what {source}")


def check_statistics(given: LossInputs, **of_index: Tensor) -> None:
    """Require attention's statistics on its heads, the indexer's, by argument name, on one."""
    rows, heads = given.rows, given.key.shape[-2]
    batch = (rows.batch,) if rows.layout == "BSND" else ()
    num_heads = given.query.shape[-2]
    group = require_divisible(rows.where, "query's heads", num_heads, "key's heads", heads)
    _require_there(rows, "dense_lightning_indexer_softmax_lse returns", **of_index)
    of_attention = {"softmax_max": given.softmax_max, "softmax_sum": given.softmax_sum}
    for name, x in {**of_attention, **of_index}.items():
        check_dtypes(rows.where, **{name: x})
        per_head = (1, rows.num_queries) if name in of_index else (heads, rows.num_queries, group)
        shape = (*batch, *per_head)
        check_shape(rows.where, name, x, shape, "heads before rows, as the operators return it")
