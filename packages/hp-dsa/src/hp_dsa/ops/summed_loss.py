"""What the losses share: checks of their arguments, and the sum as one node of autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from hp_dsa.ops.arguments import (
    check_dtypes,
    check_indices,
    check_shape,
    check_tokens,
    read_rows,
    read_scale,
)
from hp_dsa.ops.attention import check_rope
from hp_dsa.ops.dispatch import Gradients, implementation
from hp_dsa.ops.indexer import check_index_inputs
from hp_dsa.ops.rows import Lengths, Rows
from hp_mesh.checks import require, require_divisible

__all__ = ["Run", "dense_run", "sparse_run", "summed_loss"]

Run = Callable[[Tensor, Tensor, Tensor, bool], Gradients]
"""``(query_index, key_index, weights, gradients) -> (gradients or empty tensors, loss)``."""


class _SummedLoss(torch.autograd.Function):
    """The loss, with gradients that were computed along with it: nothing else is kept.

    What the pass over the scores yields is the gradient as well as the sum, so that keeping three
    tensors of the indexer's inputs' size replaces keeping eight inputs and a second pass.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query_index: Tensor,
        key_index: Tensor,
        weights: Tensor,
        run: Run,
        gradients: bool,
    ) -> Tensor:
        *found, loss = run(query_index, key_index, weights, gradients)
        ctx.save_for_backward(*found)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            (found * upstream).to(found.dtype) if needed else None
            for found, needed in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        ]
        return *scaled, None, None


def summed_loss(run: Run, query_index: Tensor, key_index: Tensor, weights: Tensor) -> Tensor:
    """Return ``[1]``, the loss, recorded by autograd if anything of the indexer asks for it."""
    inputs = (query_index, key_index, weights)
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    applied = _SummedLoss.apply(*inputs, run, gradients)  # type: ignore[no-untyped-call]
    return cast(Tensor, applied)


def _rows(
    where: str,
    query: Tensor,
    key: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    *,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    actual_seq_qlen: Lengths | None,
    actual_seq_klen: Lengths | None,
    layout: str,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
) -> Rows:
    """Check what the two losses have in common."""
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
    return rows


def _check_statistics(rows: Rows, num_heads: int, num_kv_heads: int, **given: Tensor) -> None:
    """Require attention's statistics on its heads, the indexer's on one."""
    batch = (rows.batch,) if rows.layout == "BSND" else ()
    group = require_divisible(rows.where, "query's heads", num_heads, "key's heads", num_kv_heads)
    for name, x in given.items():
        check_dtypes(rows.where, **{name: x})
        of_index = name.endswith("_index")
        shape = (*batch, 1 if of_index else num_kv_heads, rows.num_queries)
        if not of_index:
            shape = (*shape, group)
        check_shape(rows.where, name, x, shape, "heads before rows, as the operators return it")


def sparse_run(
    query: Tensor,
    key: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    sparse_indices: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    scale_value: float,
    *,
    where: str,
    sinks: Tensor | None,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    **options: Any,
) -> Run:
    """Check the sparse losses' arguments and return what computes them."""
    require(sinks is None, where, "sinks (given) must be None", "no backend supports them")
    rows = _rows(
        where,
        query,
        key,
        query_index,
        key_index,
        weights,
        query_rope=query_rope,
        key_rope=key_rope,
        **options,
    )
    check_shape(where, "key", key, (*key.shape[:-2], 1, query.shape[-1]), "one head like query's")
    check_indices(where, sparse_indices, (*query.shape[:-2], 1), "[.., 1, K] on query's rows")
    _check_statistics(rows, query.shape[-2], 1, softmax_max=softmax_max, softmax_sum=softmax_sum)
    scale = read_scale(where, scale_value)
    return lambda query_index, key_index, weights, gradients: implementation(query).sparse_kl_loss(
        query.detach(),
        key.detach(),
        query_index,
        key_index,
        weights,
        sparse_indices,
        softmax_max.detach(),
        softmax_sum.detach(),
        scale,
        rows,
        None if query_rope is None else query_rope.detach(),
        None if key_rope is None else key_rope.detach(),
        gradients,
    )


def dense_run(
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
    *,
    where: str,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    **options: Any,
) -> Run:
    """Check the dense losses' arguments and return what computes them."""
    rows = _rows(
        where,
        query,
        key,
        query_index,
        key_index,
        weights,
        query_rope=query_rope,
        key_rope=key_rope,
        **options,
    )
    heads = key.shape[-2]
    check_shape(where, "key", key, (*key.shape[:-1], query.shape[-1]), "of query's head size")
    _check_statistics(
        rows,
        query.shape[-2],
        heads,
        softmax_max=softmax_max,
        softmax_sum=softmax_sum,
        softmax_max_index=softmax_max_index,
        softmax_sum_index=softmax_sum_index,
    )
    scale = read_scale(where, scale_value)
    return lambda query_index, key_index, weights, gradients: implementation(query).dense_kl_loss(
        query.detach(),
        key.detach(),
        query_index,
        key_index,
        weights,
        softmax_max.detach(),
        softmax_sum.detach(),
        softmax_max_index.detach(),
        softmax_sum_index.detach(),
        scale,
        rows,
        None if query_rope is None else query_rope.detach(),
        None if key_rope is None else key_rope.detach(),
        gradients,
    )
