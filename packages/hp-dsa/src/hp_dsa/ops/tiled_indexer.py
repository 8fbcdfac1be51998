"""The indexer over tiles of queries and keys, with a running top-k."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hp_dsa.ops.autocast import without_autocast
from hp_dsa.ops.rows import Document, Rows
from hp_dsa.ops.tiles import (
    TORCH_SCORES,
    IndexScores,
    Selection,
    add_score_gradient,
    gathered_rows,
    head_tile,
    like_input,
    precise,
    row_tiles,
    take,
    tile_size,
    zeros_like,
)
from hp_dsa.ops.topk import RunningTopK

__all__ = ["lightning_indexer"]


def lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    rows: Rows,
    sparse_count: int,
    return_value: bool,
    scores: IndexScores = TORCH_SCORES,
) -> tuple[Tensor, Tensor]:
    """See `reference.lightning_indexer`.

    Memory: a tile of scores, and its running top-k; key tiles that no row of a query tile sees are
    skipped. The gradient of the values is recomputed from the selected keys.
    """
    if not return_value:
        with torch.no_grad():
            return _search(query, key, weights, rows, sparse_count, scores)[0], query.new_empty(0)
    found = _Indexer.apply(  # type: ignore[no-untyped-call]
        query, key, weights, rows, sparse_count, scores
    )
    return cast(tuple[Tensor, Tensor], found)


class _Indexer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        weights: Tensor,
        rows: Rows,
        count: int,
        scores: IndexScores,
    ) -> tuple[Tensor, Tensor]:
        indices, values = _search(query, key, weights, rows, count, scores)
        ctx.save_for_backward(query, key, weights, indices)
        ctx.rows = rows
        ctx.mark_non_differentiable(indices)
        return indices, values

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, _: Tensor, d_values: Tensor) -> tuple[Tensor | None, ...]:
        query, key, weights, indices = ctx.saved_tensors
        gradients = _gradients(query, key, weights, indices, d_values, ctx.rows)
        return *gradients, None, None, None


def _search(
    query: Tensor, key: Tensor, weights: Tensor, rows: Rows, count: int, scores: IndexScores
) -> tuple[Tensor, Tensor]:
    q, k, w = (rows.batched(x) for x in (query, key, weights))
    shape = (rows.batch, rows.num_queries, 1, count)
    indices = torch.full(shape, -1, dtype=torch.int32, device=query.device)
    values = query.new_full(shape, -math.inf)
    for document in rows.documents:
        own_q, own_w = document.queries(q), document.queries(w)
        own_k = document.keys(k)[:, 0]
        own_indices, own_values = document.queries(indices), document.queries(values)
        for first, last in row_tiles(rows, document, tile_size(q).rows):
            tile = own_q[first:last], own_k, own_w[first:last]
            columns, best = _search_tile(rows, document, first, tile, count, scores)
            visible = rows.visible_counts(document, first, last, query.device)[:, None]
            hidden = torch.arange(columns.shape[1], device=query.device) >= visible
            found = slice(0, columns.shape[1])
            own_indices[first:last, 0, found] = columns.masked_fill_(hidden, -1).int()
            own_values[first:last, 0, found] = best.masked_fill_(hidden, -math.inf).to(values.dtype)
    return rows.unbatched(indices), rows.unbatched(values)


def _search_tile(
    rows: Rows,
    document: Document,
    first: int,
    tile: tuple[Tensor, Tensor, Tensor],
    count: int,
    index_scores: IndexScores,
) -> tuple[Tensor, Tensor]:
    """Return columns and scores of the best keys for the rows from ``first`` on."""
    q, k, w = tile
    end = rows.visible(document, first + q.shape[0] - 1)  # no row of the tile sees more
    certain = rows.visible(document, first)  # every row sees these
    width = max(tile_size(q).elements // (q.shape[0] * head_tile(q.shape[1])), 1)
    best = RunningTopK(count)
    for start in range(0, end, width):
        stop = min(start + width, end)
        scores = index_scores.forward(q, k[start:stop], w)
        if stop > certain:
            visible = rows.visible_counts(document, first, first + q.shape[0], q.device)
            hidden = torch.arange(start, stop, device=q.device) >= visible[:, None]
            scores.masked_fill_(hidden, -math.inf)
        best.add(scores, start)
    return best.result()


def _gradients(
    query: Tensor, key: Tensor, weights: Tensor, indices: Tensor, d_values: Tensor, rows: Rows
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, w, found, upstream = (rows.batched(x) for x in (query, key, weights, indices, d_values))
    d_q, d_k, d_w = (zeros_like(x) for x in (q, k, w))
    size = gathered_rows(q, found.shape[-1], 2 * q.shape[-2], 2 * q.shape[-1])
    for document in rows.documents:
        own = [document.queries(x) for x in (q, w, found, upstream, d_q, d_w)]
        own_k, d_keys = document.keys(k)[:, 0], document.keys(d_k)[:, 0]
        for first, last in row_tiles(rows, document, size):
            q_tile, w_tile, entries, d_scores, dq_tile, dw_tile = (x[first:last] for x in own)
            valid = entries[:, 0] >= 0
            tokens = entries[:, 0].long().where(valid, entries[:, 0, :1].long())
            add_score_gradient(
                precise(d_scores[:, 0]).where(valid, 0.0),
                Selection(tokens, valid),
                precise(q_tile),
                take(own_k, tokens),
                precise(w_tile),
                (dq_tile, d_keys, dw_tile),
            )
    return like_input(rows, d_q, query), like_input(rows, d_k, key), like_input(rows, d_w, weights)
