"""The operators with Triton kernels where time goes; the rest is tiled torch.

Index scores are one kernel for all heads; attention reads the selected keys from where they lie and
gathers nothing into memory. float64 takes the tiled operators. Gradients of attention's keys are
added with atomics: with `torch.use_deterministic_algorithms` the tiled operator runs instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hp_dsa.ops import _triton, tiled_attention, tiled_indexer, tiled_loss
from hp_dsa.ops.autocast import without_autocast
from hp_dsa.ops.contract import AttentionInputs, Gradients, LossInputs
from hp_dsa.ops.rows import Rows
from hp_dsa.ops.tiled_loss import sparse_kl_loss
from hp_dsa.ops.tiles import IndexScores, zeros_like

__all__ = [
    "dense_kl_loss",
    "dense_softmax_lse",
    "lightning_indexer",
    "sparse_flash_attention",
    "sparse_kl_loss",
]


class _Scores(IndexScores):
    """Index scores by kernels; operands keep their dtype, sums are float32."""

    def forward(self, q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        rows, heads, size = q.shape
        out = torch.empty(rows, k.shape[0], dtype=torch.float32, device=q.device)
        grid = (_blocks(rows, 64), _blocks(k.shape[0], 64))
        _triton.index_scores[grid](
            q, k, w, out, rows, k.shape[0], size, q.stride(0), q.stride(1), k.stride(0),
            w.stride(0), w.stride(1), out.stride(0),
            HEADS=heads, BLOCK_ROWS=64, BLOCK_KEYS=64, BLOCK_D=_padded(size),
        )  # fmt: skip
        return out

    def add_gradient(
        self,
        d_scores: Tensor,
        q: Tensor,
        k: Tensor,
        w: Tensor,
        into: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        d_q, d_k, d_w = into
        rows, heads, size = q.shape
        num_keys, block = k.shape[0], _padded(size)
        strides = (q.stride(0), q.stride(1), k.stride(0), w.stride(0), w.stride(1))
        sizes = (rows, num_keys, size, d_scores.stride(0), *strides)
        _triton.index_scores_backward_rows[_blocks(rows, 32), heads](
            d_scores, q, k, w, d_q, d_w, *sizes, d_q.stride(0), d_q.stride(1), d_w.stride(0),
            d_w.stride(1), BLOCK_ROWS=32, BLOCK_KEYS=64, BLOCK_D=block,
        )  # fmt: skip
        _triton.index_scores_backward_keys[_blocks(num_keys, 32),](
            d_scores, q, k, w, d_k, *sizes, d_k.stride(0),
            HEADS=heads, BLOCK_ROWS=64, BLOCK_KEYS=32, BLOCK_D=block,
        )  # fmt: skip


def lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    rows: Rows,
    sparse_count: int,
    return_value: bool,
) -> tuple[Tensor, Tensor]:
    """See `reference.lightning_indexer`."""
    return tiled_indexer.lightning_indexer(
        query, key, weights, rows, sparse_count, return_value, _scores_for(query)
    )


def dense_softmax_lse(
    query_index: Tensor, key_index: Tensor, weights: Tensor, rows: Rows
) -> tuple[Tensor, Tensor]:
    """See `reference.dense_softmax_lse`."""
    scores = _scores_for(query_index)
    return tiled_loss.dense_softmax_lse(query_index, key_index, weights, rows, scores)


def dense_kl_loss(
    given: LossInputs, index_statistics: tuple[Tensor, Tensor], gradients: bool
) -> Gradients:
    """See `reference.dense_kl_loss`."""
    scores = _scores_for(given.query_index)
    return tiled_loss.dense_kl_loss(given, index_statistics, gradients, scores)


def sparse_flash_attention(
    given: AttentionInputs, return_softmax_lse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.sparse_flash_attention`."""
    if given.query.dtype is torch.float64 or torch.are_deterministic_algorithms_enabled():
        return tiled_attention.sparse_flash_attention(given, return_softmax_lse)
    return tiled_attention.attend(_Attention, given, return_softmax_lse)


class _Flat(NamedTuple):
    """Attention's tensors as the kernels read them: dense, batch and sequence one dim."""

    query: Tensor  # [T1, N1, D]
    key: Tensor  # [T2, D]
    value: Tensor | None  # [T2, Dv]
    query_rope: Tensor | None  # [T1, N1, Dr]
    key_rope: Tensor | None  # [T2, Dr]


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
        x = _flat(rows, given)
        chosen = _merged(rows, indices.int())[:, 0].contiguous()
        T, N = x.query.shape[:2]
        starts, counts = _row_places(rows, query.device)
        out = torch.empty(
            *query.shape[:-1], _values(x).shape[-1], dtype=query.dtype, device=query.device
        )
        maximum, total = (torch.empty(T, N, dtype=torch.float32, device=query.device) for _ in "ab")
        ends = torch.empty(T, dtype=torch.int32, device=query.device)
        head_block = _head_block(N)
        if T:
            _triton.sparse_attention[T, _blocks(N, head_block)](
                *_pointers(x), chosen, starts, counts, out, maximum, total, ends, scale, N,
                chosen.shape[1], *_sizes(x), BLOCK=block, BLOCK_HEADS=head_block, **_constants(x),
            )  # fmt: skip
        ctx.save_for_backward(*given, chosen, starts, counts, ends, out, maximum, total)
        ctx.options = (scale, rows, block)
        found = [_statistics(rows, s) for s in (maximum, total)]
        ctx.mark_non_differentiable(*found)
        return out, found[0], found[1]

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, d_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        *given, chosen, starts, counts, ends, out, maximum, total = ctx.saved_tensors
        scale, rows, block = ctx.options
        x = _flat(rows, tuple(given))
        d_o = _merged(rows, d_out).contiguous()
        T, N = x.query.shape[:2]
        delta = torch.empty_like(maximum)
        d_query = torch.empty_like(x.query)
        d_query_rope = None if x.query_rope is None else torch.empty_like(x.query_rope)
        d_key = zeros_like(x.key)
        d_value, d_key_rope = (None if y is None else zeros_like(y) for y in (x.value, x.key_rope))
        head_block = _head_block(N)
        options: dict[str, Any] = {"BLOCK": block, "BLOCK_HEADS": head_block, **_constants(x)}
        rows_of = (chosen, starts, counts, ends)
        if T:
            _triton.sparse_attention_backward_rows[T, _blocks(N, head_block)](
                *_pointers(x), *rows_of, out, maximum, total, d_o, delta, d_query, _or(
                    d_query_rope, d_query
                ), scale, N, chosen.shape[1], *_sizes(x), **options,
            )  # fmt: skip
            grid = (T, _blocks(chosen.shape[1] * block, options["BLOCK_TOKENS"]))
            _triton.sparse_attention_backward_keys[grid](
                *_pointers(x), *rows_of, maximum, total, d_o, delta, d_key, _or(d_value, d_key),
                _or(d_key_rope, d_key), scale, chosen.shape[1], *_sizes(x), N=N, **options,
            )  # fmt: skip
        found = (d_query, d_key, d_value, d_query_rope, d_key_rope)
        gradients = [
            None if y is None or d is None else d.view(y.shape).to(y.dtype)
            for d, y in zip(found, given, strict=True)
        ]
        return *gradients, None, None, None, None


def _scores_for(query: Tensor) -> IndexScores:
    return IndexScores() if query.dtype is torch.float64 else _Scores()


def _merged(rows: Rows, x: Tensor) -> Tensor:
    """Return ``[B, S, ..]`` or ``[T, ..]`` with batch and sequence as one dim."""
    return rows.batched(x).flatten(0, 1)


def _flat(rows: Rows, given: tuple[Tensor | None, ...]) -> _Flat:
    query, *keys = (None if x is None else _merged(rows, x).contiguous() for x in given)
    key, value, query_rope, key_rope = keys
    assert query is not None and key is not None, "always given"
    one = [None if x is None else x[:, 0] for x in (key, value, key_rope)]
    return _Flat(query, cast(Tensor, one[0]), one[1], query_rope, one[2])


def _statistics(rows: Rows, x: Tensor) -> Tensor:
    """Return ``[T1, N1]`` as ``[B, 1, S1, N1]`` or ``[1, T1, N1]``."""
    return rows.unbatched(x.view(rows.batch, 1, rows.num_queries, x.shape[-1]))


def _row_places(rows: Rows, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return where each row's document begins among all keys, and how many of them it sees."""
    starts = torch.zeros(rows.batch, rows.num_queries, dtype=torch.int32)
    counts = torch.zeros_like(starts)
    for document in rows.documents:
        document.queries(starts).fill_(document.batch * rows.num_keys + document.key_start)
        document.queries(counts).copy_(
            rows.visible_counts(document, 0, document.query_length, starts.device)
        )
    return starts.flatten().to(device), counts.flatten().to(device)


def _values(x: _Flat) -> Tensor:
    return x.key if x.value is None else x.value


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """Return a pointer for an argument that the kernel does not read."""
    return other if x is None else x


def _pointers(x: _Flat) -> tuple[Tensor, ...]:
    return (
        x.query,
        x.key,
        _values(x),
        _or(x.query_rope, x.query),
        _or(x.key_rope, x.key),
    )


def _sizes(x: _Flat) -> tuple[int, int, int]:
    return x.key.shape[-1], _values(x).shape[-1], 0 if x.key_rope is None else x.key_rope.shape[-1]


def _constants(x: _Flat) -> dict[str, Any]:
    size, value_size, rope_size = _sizes(x)
    return {
        "LATENT": x.value is None,
        "ROPE": x.key_rope is not None,
        "BLOCK_TOKENS": 32 if x.key.element_size() < 4 else 16,
        "BLOCK_D": _padded(size),
        "BLOCK_DV": _padded(value_size),
        "BLOCK_DR": _padded(rope_size),
        # a latent of 512 fills the registers of 8 warps, and 16 tokens of it in float32 the
        # shared memory of one stage
        "num_warps": 8,
        "num_stages": 1,
    }


def _head_block(num_heads: int) -> int:
    """Return heads of a program: a product of matrices has at least 16 rows."""
    return 16 if num_heads <= 16 else 32


def _padded(size: int) -> int:
    return max(16, 1 << max(size - 1, 0).bit_length())


def _blocks(length: int, block: int) -> int:
    return -(-length // block)
