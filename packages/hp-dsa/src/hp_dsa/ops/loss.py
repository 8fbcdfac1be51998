"""The indexer's training loss: how far its distribution is from attention's, and its gradient.

For each row, ``p`` is attention's probability averaged over heads and ``q`` the softmax of the
index scores; the loss is ``sum p log(p / q)`` over keys and rows: a sum, so that shards add up. It
trains the indexer alone: ``query`` and ``key`` get no gradient. With respect to the scores the
gradient is exactly ``q - p``. *Sparse*: both distributions over the selected keys. *Dense*: over
all visible ones.

Each loss comes twice, with the same arguments: as a loss to call ``backward`` on, and in
torch_npu's form (``_grad_``), which returns the gradients of the sum beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from hp_dsa.ops.arguments import (
    NO_LIMIT,
    check_dtypes,
    check_indices,
    check_shape,
    check_tokens,
    read_rows,
)
from hp_dsa.ops.attention import check_rope
from hp_dsa.ops.dispatch import Gradients, implementation
from hp_dsa.ops.indexer import check_index_inputs
from hp_dsa.ops.rows import Lengths, Rows
from hp_mesh.checks import require, require_divisible
from hp_mesh.overrides import seen_by_views

__all__ = [
    "dense_lightning_indexer_grad_kl_loss",
    "dense_lightning_indexer_kl_loss",
    "dense_lightning_indexer_softmax_lse",
    "sparse_lightning_indexer_grad_kl_loss",
    "sparse_lightning_indexer_kl_loss",
]


@seen_by_views
def sparse_lightning_indexer_kl_loss(
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
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_qlen: Lengths | None = None,
    actual_seq_klen: Lengths | None = None,
    layout: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = NO_LIMIT,
    next_tokens: int = NO_LIMIT,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the summed KL divergence over the selected keys, differentiable for the indexer.

    Args:
        query: Attention's query, ``[B, S1, N1, D]`` or ``[T1, N1, D]``; gets no gradient.
        key: Attention's key, ``[B, S2, 1, D]`` or ``[T2, 1, D]``; gets no gradient.
        query_index: The indexer's query, ``[B, S1, N1i, Di]`` or ``[T1, N1i, Di]``.
        key_index: The indexer's key, ``[B, S2, 1, Di]`` or ``[T2, 1, Di]``.
        weights: ``[B, S1, N1i]`` or ``[T1, N1i]``.
        sparse_indices: ``[B, S1, 1, K]`` or ``[T1, 1, K]``, those that attention used.
        softmax_max: From `sparse_flash_attention`, ``[B, 1, S1, N1]`` or ``[1, T1, N1]``.
        softmax_sum: As ``softmax_max``.
        scale_value: Attention's own.
        query_rope: Attention's own, or None.
        key_rope: Attention's own, or None.
        actual_seq_qlen: Lengths as for `lightning_indexer`.
        actual_seq_klen: Lengths as for `lightning_indexer`.
        layout: ``"BSND"`` or ``"TND"``.
        sparse_mode: 0 or 3, as for `lightning_indexer`.
        pre_tokens: Must be its default.
        next_tokens: Must be its default.
        sinks: Attention sinks are not supported: must be None.

    Returns:
        ``[1]`` float32 (float64 for float64 inputs); rows without a key add nothing.
    """
    run = _sparse(**locals(), where="sparse_lightning_indexer_kl_loss")
    return _loss(run, query_index, key_index, weights)


@seen_by_views
def sparse_lightning_indexer_grad_kl_loss(
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
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_qlen: Lengths | None = None,
    actual_seq_klen: Lengths | None = None,
    layout: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = NO_LIMIT,
    next_tokens: int = NO_LIMIT,
    sinks: Tensor | None = None,
) -> Gradients:
    """Return ``(d_query_index, d_key_index, d_weights, loss)``: torch_npu's form.

    Arguments as for `sparse_lightning_indexer_kl_loss`. The gradients are of the sum itself, in the
    inputs' dtypes and shapes; nothing here is recorded by autograd.
    """
    run = _sparse(**locals(), where="sparse_lightning_indexer_grad_kl_loss")
    with torch.no_grad():
        return run(query_index, key_index, weights, True)


@seen_by_views
def dense_lightning_indexer_softmax_lse(
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    *,
    actual_seq_qlen: Lengths | None = None,
    actual_seq_klen: Lengths | None = None,
    layout: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = NO_LIMIT,
    next_tokens: int = NO_LIMIT,
) -> tuple[Tensor, Tensor]:
    """Return the softmax statistics of the index scores over all visible keys, for the dense loss.

    Arguments as for `sparse_lightning_indexer_kl_loss`.

    Returns:
        ``softmax_max_index`` and ``softmax_sum_index``, ``[B, 1, S1]`` or ``[1, T1]`` in float32
        (float64 for float64 inputs), without gradient; 0 and 0 for a row that sees no key.
    """
    where = "dense_lightning_indexer_softmax_lse"
    check_tokens(where, pre_tokens, next_tokens)
    rows = read_rows(
        where,
        query_index,
        key_index,
        {"layout": layout},
        sparse_mode,
        {"actual_seq_qlen": actual_seq_qlen, "actual_seq_klen": actual_seq_klen},
    )
    check_index_inputs(where, query_index, key_index, weights, ("query_index", "key_index"))
    with torch.no_grad():
        return implementation(query_index).dense_softmax_lse(query_index, key_index, weights, rows)


@seen_by_views
def dense_lightning_indexer_kl_loss(
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
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_qlen: Lengths | None = None,
    actual_seq_klen: Lengths | None = None,
    layout: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = NO_LIMIT,
    next_tokens: int = NO_LIMIT,
) -> Tensor:
    """Return the summed KL divergence over all visible keys, differentiable for the indexer.

    Arguments as for `sparse_lightning_indexer_kl_loss`, but:

    Args:
        query: ``[B, S1, N1, D]`` or ``[T1, N1, D]``.
        key: ``[B, S2, N2, D]`` or ``[T2, N2, D]``; ``N2`` divides ``N1``.
        query_index: The indexer's query.
        key_index: The indexer's key.
        weights: The indexer's weights.
        softmax_max: Dense attention's, ``[B, N2, S1, N1 / N2]`` or ``[N2, T1, N1 / N2]``.
        softmax_sum: As ``softmax_max``.
        softmax_max_index: From `dense_lightning_indexer_softmax_lse`.
        softmax_sum_index: From `dense_lightning_indexer_softmax_lse`.
        scale_value: Attention's own.
        query_rope: ``[.., N1, Dr]`` or None.
        key_rope: ``[.., N2, Dr]`` or None.
        actual_seq_qlen: Lengths as for `lightning_indexer`.
        actual_seq_klen: Lengths as for `lightning_indexer`.
        layout: ``"BSND"`` or ``"TND"``.
        sparse_mode: 0 or 3.
        pre_tokens: Must be its default.
        next_tokens: Must be its default.

    Returns:
        ``[1]`` float32 (float64 for float64 inputs).
    """
    run = _dense(**locals(), where="dense_lightning_indexer_kl_loss")
    return _loss(run, query_index, key_index, weights)


@seen_by_views
def dense_lightning_indexer_grad_kl_loss(
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
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_qlen: Lengths | None = None,
    actual_seq_klen: Lengths | None = None,
    layout: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = NO_LIMIT,
    next_tokens: int = NO_LIMIT,
) -> Gradients:
    """Return ``(d_query_index, d_key_index, d_weights, loss)``: torch_npu's form.

    Arguments as for `dense_lightning_indexer_kl_loss`; gradients as for
    `sparse_lightning_indexer_grad_kl_loss`.
    """
    run = _dense(**locals(), where="dense_lightning_indexer_grad_kl_loss")
    with torch.no_grad():
        return run(query_index, key_index, weights, True)


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


def _loss(run: Run, query_index: Tensor, key_index: Tensor, weights: Tensor) -> Tensor:
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


def _sparse(
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
    return lambda query_index, key_index, weights, gradients: implementation(query).sparse_kl_loss(
        query.detach(),
        key.detach(),
        query_index,
        key_index,
        weights,
        sparse_indices,
        softmax_max.detach(),
        softmax_sum.detach(),
        float(scale_value),
        rows,
        None if query_rope is None else query_rope.detach(),
        None if key_rope is None else key_rope.detach(),
        gradients,
    )


def _dense(
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
        float(scale_value),
        rows,
        None if query_rope is None else query_rope.detach(),
        None if key_rope is None else key_rope.detach(),
        gradients,
    )
