"""Sparse attention over gathered tiles: a few rows with all their keys at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hp_dsa.ops.arguments import check_range
from hp_dsa.ops.autocast import without_autocast
from hp_dsa.ops.contract import AttentionInputs
from hp_dsa.ops.rows import Document, Rows
from hp_dsa.ops.tiles import (
    Selection,
    gathered_rows,
    like_input,
    logits,
    query_tile,
    row_tiles,
    select,
    taken_keys,
    zeros_like,
)

__all__ = ["attend", "sparse_flash_attention"]


def sparse_flash_attention(
    given: AttentionInputs, return_softmax_lse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.sparse_flash_attention`.

    Memory: the keys of a few rows. Backward gathers them again and keeps only the inputs and the
    statistics.
    """
    return attend(_Attention, given, return_softmax_lse)


def attend(
    node: type[torch.autograd.Function], given: AttentionInputs, return_softmax_lse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Check the indices and let ``node`` compute attention."""
    check_range(given.rows, given.sparse_indices, given.block_size)
    out, maximum, total = cast(
        tuple[Tensor, Tensor, Tensor],
        node.apply(  # type: ignore[no-untyped-call]
            given.query,
            given.key,
            given.value,
            given.query_rope,
            given.key_rope,
            given.sparse_indices,
            given.scale,
            given.rows,
            given.block_size,
        ),
    )
    if return_softmax_lse:
        return out, maximum, total
    return out, maximum.new_empty(0), total.new_empty(0)


class _Inputs(NamedTuple):
    """Attention's tensors, with a batch dim."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    query_rope: Tensor | None
    key_rope: Tensor | None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        query_rope: Tensor | None,
        key_rope: Tensor | None,
        indices: Tensor,
        scale: float,
        rows: Rows,
        block: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = (query, key, value, query_rope, key_rope)
        results = _forward(_batched(rows, given), rows.batched(indices), scale, rows, block)
        out, maximum, total = (rows.unbatched(x) for x in results)
        ctx.save_for_backward(*given, indices, maximum, total)
        ctx.options = (scale, rows, block)
        ctx.mark_non_differentiable(maximum, total)
        return out, maximum, total

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, d_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        *given, indices, maximum, total = ctx.saved_tensors
        scale, rows, block = ctx.options
        state = [rows.batched(x) for x in (indices, maximum, total, d_out)]
        found = _backward(_batched(rows, given), state, scale, rows, block)
        gradients = [
            None if x is None or d is None else like_input(rows, d, x)
            for d, x in zip(found, given, strict=True)
        ]
        return *gradients, None, None, None, None


def _batched(rows: Rows, given: Any) -> _Inputs:
    return _Inputs(*(None if x is None else rows.batched(x) for x in given))  # type: ignore[arg-type]


def _is_same(key: Tensor, value: Tensor | None) -> bool:
    """Say whether ``value`` is ``key``'s memory: then its rows are gathered once."""
    return value is None or (
        value.data_ptr() == key.data_ptr()
        and value.shape == key.shape
        and value.stride() == key.stride()
    )


def _width(x: _Inputs) -> int:
    """Return how many numbers are gathered for a token."""
    gathered = [x.key, x.key_rope, None if _is_same(x.key, x.value) else x.value]
    return sum(tensor.shape[-1] for tensor in gathered if tensor is not None)


class _Tile(NamedTuple):
    """A tile of rows, ready: ``scores`` is ``-inf`` where the selection is not valid."""

    selection: Selection
    has_key: Tensor  # [rows, 1, 1]
    q: Tensor  # [rows, N1, D]
    k: Tensor  # [rows, K, D]
    v: Tensor  # [rows, K, Dv]
    q_rope: Tensor | None
    k_rope: Tensor | None
    scores: Tensor  # [rows, N1, K]


def _tiles(
    x: _Inputs, indices: Tensor, scale: float, rows: Rows, block: int, document: Document, size: int
) -> Iterator[tuple[int, int, _Tile]]:
    """Yield first and last row and what is gathered for them; values are fresh or read only."""
    for first, last in row_tiles(rows, document, size):
        selection = select(
            document.queries(indices)[first:last, 0],
            block,
            rows.visible_counts(document, first, last, indices.device),
        )

        tokens = selection.tokens
        q, k = query_tile(document, x.query, first, last), taken_keys(document, x.key, tokens)
        q_rope = k_rope = None
        if x.query_rope is not None and x.key_rope is not None:
            q_rope = query_tile(document, x.query_rope, first, last)
            k_rope = taken_keys(document, x.key_rope, tokens)
        v = (
            k
            if x.value is None or _is_same(x.key, x.value)
            else taken_keys(document, x.value, tokens)
        )
        scores = logits(scale, q, k, q_rope, k_rope)
        scores.masked_fill_(~selection.valid[:, None], -math.inf)
        has_key = selection.valid.any(1)[:, None, None]
        yield first, last, _Tile(selection, has_key, q, k, v, q_rope, k_rope, scores)


def _forward(
    x: _Inputs, indices: Tensor, scale: float, rows: Rows, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    value = x.key if x.value is None else x.value
    B, S1, N1, _ = x.query.shape
    out = x.query.new_zeros(B, S1, N1, value.shape[-1])
    maximum = zeros_like(x.query[..., 0]).unsqueeze(1)  # [B, 1, S1, N1]
    total = torch.zeros_like(maximum)
    num_tokens = indices.shape[-1] * block
    size = gathered_rows(x.query, num_tokens, N1, _width(x))
    for document in rows.documents:
        own_out = document.queries(out)
        own_max, own_sum = document.queries(maximum, 2)[0], document.queries(total, 2)[0]
        for first, last, tile in _tiles(x, indices, scale, rows, block, document, size):
            m = tile.scores.amax(-1, keepdim=True)
            m = m.where(tile.has_key, 0.0)
            exponentials = tile.scores.sub_(m).exp_()
            z = exponentials.sum(-1, keepdim=True)
            result = torch.bmm(exponentials, tile.v).div_(z)
            own_out[first:last] = result.where(tile.has_key, 0.0).to(out.dtype)
            own_max[first:last] = m.squeeze(-1)
            own_sum[first:last] = z.where(tile.has_key, 0.0).squeeze(-1)
    return out, maximum, total


def _backward(
    x: _Inputs,
    state: list[Tensor],
    scale: float,
    rows: Rows,
    block: int,
) -> tuple[Tensor | None, ...]:
    indices, maximum, total, d_out = state
    gradients = _Inputs(*(None if y is None else zeros_like(y) for y in x))  # type: ignore[arg-type]
    # the gradients of what is gathered are as large
    size = gathered_rows(x.query, indices.shape[-1] * block, 2 * x.query.shape[2], 2 * _width(x))
    for document in rows.documents:
        for first, last, tile in _tiles(x, indices, scale, rows, block, document, size):
            m, z = (document.queries(s, 2)[0, first:last, :, None] for s in (maximum, total))
            p = tile.scores.sub_(m).exp_().div_(z.where(z > 0, 1.0)).where(tile.has_key, 0.0)
            d_o = query_tile(document, d_out, first, last).where(tile.has_key, 0.0)
            d_scores = torch.bmm(d_o, tile.v.mT)
            d_scores.sub_((p * d_scores).sum(-1, keepdim=True)).mul_(p).mul_(scale)
            d_scores.masked_fill_(~tile.selection.valid[:, None], 0.0)
            _add_gradients(gradients, document, first, last, tile, p, d_o, d_scores)
    return tuple(gradients)


def _add_gradients(
    into: _Inputs,
    document: Document,
    first: int,
    last: int,
    tile: _Tile,
    p: Tensor,
    d_o: Tensor,
    d_scores: Tensor,
) -> None:
    """Write a tile's gradient of the queries, add those of its keys."""
    tokens = tile.selection.tokens.flatten()

    def add(keys: Tensor, found: Tensor) -> None:
        document.keys(keys)[:, 0].index_add_(0, tokens, found.flatten(0, 1))

    def write(queries: Tensor, k: Tensor) -> None:
        found = torch.bmm(d_scores, k).where(tile.has_key, 0.0)
        document.queries(queries)[first:last] = found

    write(into.query, tile.k)
    # a row without a key may hold anything, and 0 * NaN is no 0
    of_key = torch.bmm(d_scores.mT, tile.q.where(tile.has_key, 0.0))
    of_value = torch.bmm(p.mT, d_o)
    if into.value is None:
        of_key += of_value
    else:
        add(into.value, of_value)
    add(into.key, of_key)
    if into.query_rope is not None and into.key_rope is not None:
        assert tile.q_rope is not None and tile.k_rope is not None, "gathered with the rest"
        write(into.query_rope, tile.k_rope)
        add(into.key_rope, torch.bmm(d_scores.mT, tile.q_rope.where(tile.has_key, 0.0)))
