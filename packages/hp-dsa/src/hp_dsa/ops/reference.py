"""The operators' definition: plain torch, whole matrices, gradients by autograd.

Everything is computed document by document, in float64 for float64 inputs and in float32 for the
rest. Arguments are checked by the callers; ``rows`` says which keys a row sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hp_dsa.ops.arguments import check_range
from hp_dsa.ops.autocast import without_autocast
from hp_dsa.ops.contract import AttentionInputs, Gradients, LossInputs
from hp_dsa.ops.rows import Document, Rows

__all__ = [
    "dense_kl_loss",
    "dense_softmax_lse",
    "lightning_indexer",
    "sparse_flash_attention",
    "sparse_kl_loss",
]


def lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    rows: Rows,
    sparse_count: int,
    return_value: bool,
) -> tuple[Tensor, Tensor]:
    """Sort all scores of a row and keep the first ``sparse_count`` visible ones."""
    q, k, w = (_precise(rows.batched(x)) for x in (query, key, weights))
    shape = (rows.batch, rows.num_queries, 1, sparse_count)
    indices = query.new_full(shape, -1, dtype=torch.int32)
    values = q.new_full(shape, -math.inf) + _nothing(q, k, w)
    for document in rows.documents:
        scores = _index_scores(*_index_parts(document, q, k, w))  # [Lq, Lk]
        visible = _visible(rows, document, scores.device)
        count = min(sparse_count, document.key_length)
        # two stable sorts: by score, then what is visible in front; ties keep their positions
        order = scores.argsort(stable=True, dim=-1, descending=True)
        seen_first = visible.gather(-1, order).argsort(stable=True, dim=-1, descending=True)
        order = order.gather(-1, seen_first)[:, :count]
        valid = visible.gather(-1, order)
        best = scores.gather(-1, order)
        document.queries(indices)[:, 0, :count] = order.where(valid, -1).int()
        document.queries(values)[:, 0, :count] = (best + 0.0).where(valid, -math.inf)
    found = rows.unbatched(values).to(query.dtype) if return_value else query.new_empty(0)
    return rows.unbatched(indices), found


def sparse_flash_attention(
    given: AttentionInputs, return_softmax_lse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather the selected keys of every row and attend to them."""
    rows = given.rows
    check_range(rows, given.sparse_indices, given.block_size)
    q, k = _joined(rows, given.query, given.query_rope), _joined(rows, given.key, given.key_rope)
    v = _precise(rows.batched(given.key if given.value is None else given.value))
    indices = rows.batched(given.sparse_indices)
    out = q.new_zeros(*q.shape[:3], v.shape[-1]) + _nothing(q, k, v)
    maximum = q.new_zeros(rows.batch, 1, rows.num_queries, q.shape[2])
    total = torch.zeros_like(maximum)
    for document in rows.documents:
        if document.key_length == 0:
            continue
        tokens, valid = _selected(rows, document, indices, given.block_size)  # [Lq, K]
        scores = given.scale * _einsum(
            "qnd,qkd->qnk", document.queries(q), _taken(document.keys(k), tokens, valid)
        )
        weights, m, z = _softmax(scores, valid[:, None])
        document.queries(out)[:] = _einsum(
            "qnk,qkd->qnd", weights, _taken(document.keys(v), tokens, valid)
        )
        document.queries(maximum, 2)[0] = m.detach()
        document.queries(total, 2)[0] = z.detach()
    result = rows.unbatched(out).to(given.query.dtype)
    if not return_softmax_lse:
        return result, maximum.new_empty(0), maximum.new_empty(0)
    return result, rows.unbatched(maximum), rows.unbatched(total)


def sparse_kl_loss(given: LossInputs, sparse_indices: Tensor, gradients: bool) -> Gradients:
    """Return the loss over the selected keys and, if asked, its gradients (else empty tensors)."""
    rows = given.rows
    check_range(rows, sparse_indices, 1)
    q, k = _joined(rows, given.query, given.query_rope), _joined(rows, given.key, given.key_rope)
    m, z = rows.batched(given.softmax_max), rows.batched(given.softmax_sum)
    indices = rows.batched(sparse_indices)

    def divergence(document: Document, scores: Tensor) -> Tensor:
        tokens, valid = _selected(rows, document, indices, 1)
        logits = given.scale * _einsum(
            "qnd,qkd->qnk", document.queries(q), _taken(document.keys(k), tokens, valid)
        )
        target = _probability(
            logits, document.queries(m, 2)[0], document.queries(z, 2)[0], valid[:, None]
        ).mean(1)
        return _divergence(target, scores.gather(-1, tokens), valid)

    return _summed(given, divergence, gradients)


def dense_softmax_lse(
    query_index: Tensor, key_index: Tensor, weights: Tensor, rows: Rows
) -> tuple[Tensor, Tensor]:
    """Return maximum and sum of the index scores' softmax over the visible keys."""
    inputs = [_precise(rows.batched(x)) for x in (query_index, key_index, weights)]
    maximum = inputs[0].new_zeros(rows.batch, 1, rows.num_queries)
    total = torch.zeros_like(maximum)
    for document in rows.documents:
        if document.key_length == 0:
            continue
        scores = _index_scores(*_index_parts(document, *inputs))
        _, m, z = _softmax(scores, _visible(rows, document, scores.device))
        document.queries(maximum, 2)[0] = m
        document.queries(total, 2)[0] = z
    return rows.unbatched(maximum), rows.unbatched(total)


def dense_kl_loss(
    given: LossInputs,
    index_statistics: tuple[Tensor, Tensor],
    gradients: bool,
) -> Gradients:
    """Return the loss over all visible keys and, if asked, its gradients (else empty tensors).

    The index scores' own statistics are not read: their softmax is part of the definition.
    """
    rows = given.rows
    q, k = _joined(rows, given.query, given.query_rope), _joined(rows, given.key, given.key_rope)
    m, z = rows.batched(given.softmax_max), rows.batched(given.softmax_sum)
    group = q.shape[2] // k.shape[2]

    def divergence(document: Document, scores: Tensor) -> Tensor:
        visible = _visible(rows, document, scores.device)
        keys = document.keys(k).repeat_interleave(group, 1)
        logits = given.scale * _einsum("qnd,knd->qnk", document.queries(q), keys)
        # [N2, Lq, G] -> [Lq, N1]
        own_m, own_z = (document.queries(x, 2).transpose(0, 1).flatten(1) for x in (m, z))
        target = _probability(logits, own_m, own_z, visible[:, None]).mean(1)
        return _divergence(target, scores, visible)

    return _summed(given, divergence, gradients)


class _Product(torch.autograd.Function):
    """`torch.einsum` of two tensors whose backward, too, runs outside of autocast.

    Every letter of an operand is one of the result or of the other operand.
    """

    @staticmethod
    def forward(ctx: Any, equation: str, a: Tensor, b: Tensor) -> Tensor:
        ctx.equation = equation
        ctx.save_for_backward(a, b)
        return torch.einsum(equation, a, b)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, d: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        operands, out = ctx.equation.split("->")
        of_a, of_b = operands.split(",")
        _, a_learns, b_learns = ctx.needs_input_grad
        d_a = _einsum(f"{out},{of_b}->{of_a}", d, b) if a_learns else None
        d_b = _einsum(f"{out},{of_a}->{of_b}", d, a) if b_learns else None
        return None, d_a, d_b


def _einsum(equation: str, a: Tensor, b: Tensor) -> Tensor:
    return cast(Tensor, _Product.apply(equation, a, b))  # type: ignore[no-untyped-call]


def _nothing(*xs: Tensor) -> Tensor:
    """Return 0 that depends on every tensor, whose numbers are not read.

    Where no row sees a key, backward has to run all the same: on other ranks it sends, and waits.
    """
    return torch.stack([x[:0].sum() for x in xs]).sum()


def _precise(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


def _joined(rows: Rows, x: Tensor, rope: Tensor | None) -> Tensor:
    """Return ``x`` beside its rotary part: one dot product is then the sum of two."""
    parts = [x] if rope is None else [x, rope]
    return torch.cat([_precise(rows.batched(part)) for part in parts], -1)


def _visible(rows: Rows, document: Document, device: torch.device) -> Tensor:
    """Return ``[Lq, Lk]``: True where the row sees the key."""
    counts = rows.visible_counts(document, 0, document.query_length, device)
    return torch.arange(document.key_length, device=device) < counts[:, None]


def _index_parts(document: Document, q: Tensor, k: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return document.queries(q), document.keys(k)[:, 0], document.queries(w)


def _index_scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """Score keys: ``sum_n w[q, n] * relu(q[q, n] . k[s])``, ``[Lq, Lk]``."""
    return _einsum("qn,qnk->qk", w, _einsum("qnd,kd->qnk", q, k).relu())


def _selected(rows: Rows, document: Document, indices: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return the tokens that a row's entries stand for, and which of them count.

    Returns:
        ``[Lq, K * block]`` int64, and bool of the same shape: before the row's first -1, visible.
    """
    entries = document.queries(indices)[:, 0].long()
    before_end = (entries >= 0).long().cumprod(-1).bool()
    tokens = entries[..., None] * block + torch.arange(block, device=entries.device)
    counts = rows.visible_counts(document, 0, document.query_length, entries.device)
    valid = before_end[..., None] & (tokens < counts[:, None, None])
    return tokens.where(valid, 0).flatten(1), valid.flatten(1)


def _taken(keys: Tensor, tokens: Tensor, valid: Tensor) -> Tensor:
    """Return the keys of the tokens, ``[Lq, K, D]``, and zeros where a token does not count."""
    return keys[:, 0][tokens].where(valid[..., None], 0.0)


def _softmax(scores: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return softmax over the valid entries, its maximum and its sum; all 0 where there is none."""
    masked = scores.masked_fill(~valid, -math.inf)
    m = masked.detach().amax(-1)
    m = m.where(m > -math.inf, 0.0)
    exponentials = (masked - m[..., None]).exp()
    z = exponentials.sum(-1)
    return exponentials / z.where(z > 0, 1.0)[..., None], m, z


def _probability(logits: Tensor, m: Tensor, z: Tensor, valid: Tensor) -> Tensor:
    """Return attention's probabilities from its statistics ``[Lq, N1]``."""
    z = z.where(z > 0, 1.0)
    shifted = (logits - m[..., None]).masked_fill(~valid, -math.inf)
    return shifted.exp() / z[..., None]


def _divergence(target: Tensor, scores: Tensor, valid: Tensor) -> Tensor:
    """Return ``sum p (log p - log softmax(I))`` over valid entries; the target is a constant."""
    empty = ~valid.any(-1, keepdim=True)
    masked = scores.masked_fill(~valid & ~empty, -math.inf)
    log_q = (masked - masked.logsumexp(-1, keepdim=True)).masked_fill(~valid, 0.0)
    p = target.detach().masked_fill(~valid, 0.0).to(scores.dtype)
    return (torch.xlogy(p, p) - p * log_q).sum()


def _summed(
    given: LossInputs, divergence: Callable[[Document, Tensor], Tensor], gradients: bool
) -> Gradients:
    """Sum ``divergence(document, scores)`` over documents and differentiate it."""
    rows = given.rows
    # hooks of its own: those of activation checkpointing would run the caller's forward again here
    with torch.enable_grad(), saved_tensors_hooks(lambda x: x, lambda x: x):
        inputs = [_precise(rows.batched(x.detach())).requires_grad_() for x in given.of_index]
        loss = inputs[0].new_zeros(1)
        for document in rows.documents:
            if document.key_length:
                scores = _index_scores(*_index_parts(document, *inputs))
                loss = loss + divergence(document, scores)
        if not gradients:
            return *(x.new_empty(0) for x in given.of_index), loss.detach()  # type: ignore[return-value]
        if loss.requires_grad:
            found = torch.autograd.grad(loss, inputs)
        else:  # no document has a key
            found = tuple(torch.zeros_like(x) for x in inputs)
    d_query, d_key, d_weights = (
        rows.unbatched(d).to(x.dtype) for d, x in zip(found, given.of_index, strict=True)
    )
    return d_query, d_key, d_weights, loss.detach()
