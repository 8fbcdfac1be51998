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

import torch
from torch import Tensor

from hp_dsa.ops.arguments import NO_LIMIT, check_tokens, read_rows
from hp_dsa.ops.autocast import cast_by_autocast
from hp_dsa.ops.contract import Gradients
from hp_dsa.ops.dispatch import implementation
from hp_dsa.ops.indexer import check_index_inputs
from hp_dsa.ops.rows import Lengths
from hp_dsa.ops.summed_loss import dense_run, sparse_run, summed_loss
from hp_mesh.overrides import seen_by_views

__all__ = [
    "dense_lightning_indexer_grad_kl_loss",
    "dense_lightning_indexer_kl_loss",
    "dense_lightning_indexer_softmax_lse",
    "sparse_lightning_indexer_grad_kl_loss",
    "sparse_lightning_indexer_kl_loss",
]

_CAST = ("query", "key", "query_index", "key_index", "query_rope", "key_rope")


@seen_by_views
@cast_by_autocast(*_CAST)
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
    run = sparse_run("sparse_lightning_indexer_kl_loss", **locals())
    return summed_loss(run, query_index, key_index, weights)


@seen_by_views
@cast_by_autocast(*_CAST)
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
    run = sparse_run("sparse_lightning_indexer_grad_kl_loss", **locals())
    with torch.no_grad():
        return run(True)


@seen_by_views
@cast_by_autocast("query_index", "key_index")
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
@cast_by_autocast(*_CAST)
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
    run = dense_run("dense_lightning_indexer_kl_loss", **locals())
    return summed_loss(run, query_index, key_index, weights)


@seen_by_views
@cast_by_autocast(*_CAST)
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
    run = dense_run("dense_lightning_indexer_grad_kl_loss", **locals())
    with torch.no_grad():
        return run(True)
