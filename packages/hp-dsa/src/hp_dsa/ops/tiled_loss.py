"""The indexer's losses over tiles, each with its gradient in the same pass."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hp_dsa.ops.arguments import check_range
from hp_dsa.ops.contract import Gradients, LossInputs
from hp_dsa.ops.rows import Document, Rows
from hp_dsa.ops.tiles import (
    TORCH_SCORES,
    IndexScores,
    add_score_gradient,
    gathered_rows,
    head_tile,
    like_input,
    logits,
    precise,
    query_tile,
    row_tiles,
    select,
    taken_keys,
    tile_size,
    zeros_like,
)

__all__ = ["dense_kl_loss", "dense_softmax_lse", "sparse_kl_loss"]


class _Sums:
    """The loss and the gradients that add up over tiles; inputs with a batch dim."""

    def __init__(self, given: LossInputs, gradients: bool) -> None:
        self.given = given
        self.query, self.key, self.weights = (given.rows.batched(x) for x in given.of_index)
        # thousands of tiles: their sums are added in double
        self.loss = torch.zeros(1, dtype=torch.float64, device=self.query.device)
        self.gradients: tuple[Tensor, Tensor, Tensor] | None = None
        if gradients:
            self.gradients = (
                zeros_like(self.query),
                zeros_like(self.key),
                zeros_like(self.weights),
            )

    def of_tile(self, document: Document, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of the gradients: of a tile's queries, all keys, the tile's weights."""
        assert self.gradients is not None, "asked for"
        d_q, d_k, d_w = self.gradients
        return (
            document.queries(d_q)[first:last],
            document.keys(d_k)[:, 0],
            document.queries(d_w)[first:last],
        )

    def result(self) -> Gradients:
        """Return the gradients in the inputs' shapes and dtypes, or empty tensors, and the loss."""
        loss = self.loss.to(precise(self.query[:0]).dtype)
        if self.gradients is None:
            a, b, c = (x.new_empty(0) for x in self.given.of_index)
        else:
            a, b, c = (
                like_input(self.given.rows, d, x)
                for d, x in zip(self.gradients, self.given.of_index, strict=True)
            )
        return a, b, c, loss


def _of_attention(
    given: LossInputs,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return query, key, their statistics and their rotary parts, with a batch dim."""
    batched = given.rows.batched
    return (
        batched(given.query),
        batched(given.key),
        batched(given.softmax_max),
        batched(given.softmax_sum),
        None if given.query_rope is None else batched(given.query_rope),
        None if given.key_rope is None else batched(given.key_rope),
    )


def sparse_kl_loss(given: LossInputs, sparse_indices: Tensor, gradients: bool) -> Gradients:
    """See `reference.sparse_kl_loss`. Memory: the keys of a few rows, and the gradients."""
    rows = given.rows
    check_range(rows, sparse_indices, 1)
    sums = _Sums(given, gradients)
    q, k, m, z, q_rope, k_rope = _of_attention(given)
    indices = rows.batched(sparse_indices)
    num_tokens, heads = indices.shape[-1], q.shape[2] + 2 * sums.query.shape[2]
    width = k.shape[-1] + (0 if k_rope is None else k_rope.shape[-1]) + 2 * sums.key.shape[-1]
    size = gathered_rows(q, num_tokens, heads, width)
    for document in rows.documents:
        for first, last in row_tiles(rows, document, size):
            counts = rows.visible_counts(document, first, last, q.device)
            selection = select(document.queries(indices)[first:last, 0], 1, counts)
            tokens, valid = selection
            scores = logits(
                given.scale,
                query_tile(document, q, first, last),
                taken_keys(document, k, tokens),
                None if q_rope is None else query_tile(document, q_rope, first, last),
                None if k_rope is None else taken_keys(document, k_rope, tokens),
            )
            own_m, own_z = (precise(document.queries(x, 2)[0, first:last]) for x in (m, z))
            target = _attention_share(scores, own_m, own_z).sum(1).div_(q.shape[2])
            target = target.masked_fill_(~valid, 0.0)
            q_index = query_tile(document, sums.query, first, last)
            w = query_tile(document, sums.weights, first, last)
            k_index = taken_keys(document, sums.key, tokens)
            relu = torch.bmm(q_index, k_index.mT).relu_()
            index = torch.bmm(w[:, None], relu).squeeze(1).masked_fill_(~valid, -math.inf)
            has_key = valid.any(1, keepdim=True)
            log_q = index.where(has_key, 0.0).log_softmax(1)
            sums.loss += _divergence(target, log_q.where(valid, 0.0))
            if gradients:
                d_scores = (log_q.exp() - target).masked_fill_(~valid, 0.0)
                into = sums.of_tile(document, first, last)
                add_score_gradient(d_scores, selection, q_index, k_index, w, into, relu)
    return sums.result()


def dense_softmax_lse(
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    rows: Rows,
    index_scores: IndexScores = TORCH_SCORES,
) -> tuple[Tensor, Tensor]:
    """See `reference.dense_softmax_lse`. Memory: a tile of scores."""
    q, k, w = (rows.batched(x) for x in (query_index, key_index, weights))
    maximum = zeros_like(q[..., 0, 0]).unsqueeze(1)  # [B, 1, S1]
    total = torch.zeros_like(maximum)
    area = tile_size(q).elements // head_tile(q.shape[2])
    for document in rows.documents:
        own_max, own_sum = document.queries(maximum, 2)[0], document.queries(total, 2)[0]
        for first, last in row_tiles(rows, document, tile_size(q).rows):
            q_tile, w_tile = (document.queries(x)[first:last] for x in (q, w))
            m = torch.full_like(own_max[first:last], -math.inf)
            z = torch.zeros_like(m)
            for start, stop in _key_tiles(rows, document, first, last, area):
                k_tile = document.keys(k)[start:stop, 0]
                scores = index_scores.forward(q_tile, k_tile, w_tile)
                hidden = _hidden(rows, document, first, last, start, stop, q.device)
                if hidden is not None:
                    scores.masked_fill_(hidden, -math.inf)
                new = torch.maximum(m, scores.amax(1))  # finite from the first tile on
                z = z * (m - new).exp() + scores.sub_(new[:, None]).exp_().sum(1)
                m = new
            own_max[first:last], own_sum[first:last] = m, z
    return rows.unbatched(maximum), rows.unbatched(total)


def dense_kl_loss(
    given: LossInputs,
    index_statistics: tuple[Tensor, Tensor],
    gradients: bool,
    index_scores: IndexScores = TORCH_SCORES,
) -> Gradients:
    """See `reference.dense_kl_loss`. Memory: a tile of scores for a few index heads.

    Attention's heads are added one after the other; no tile of all of them is made.
    """
    rows = given.rows
    sums = _Sums(given, gradients)
    q, k, m, z, q_rope, k_rope = _of_attention(given)
    m_index, z_index = (rows.batched(x) for x in index_statistics)
    area = tile_size(q).elements // head_tile(sums.query.shape[2])
    for document in rows.documents:
        for first, last in row_tiles(rows, document, tile_size(q).rows):
            index_q, index_w = (document.queries(x)[first:last] for x in (sums.query, sums.weights))
            log_z = (
                document.queries(m_index, 2)[0, first:last]
                + document.queries(z_index, 2)[0, first:last].log()
            )
            own_m, own_z = (precise(document.queries(x, 2)[:, first:last]) for x in (m, z))
            for start, stop in _key_tiles(rows, document, first, last, area):
                hidden = _hidden(rows, document, first, last, start, stop, q.device)
                target = _dense_target(
                    given.scale,
                    document.queries(q)[first:last],
                    document.keys(k)[start:stop],
                    None if q_rope is None else document.queries(q_rope)[first:last],
                    None if k_rope is None else document.keys(k_rope)[start:stop],
                    own_m,
                    own_z,
                )
                index_k = document.keys(sums.key)[start:stop, 0]
                log_q = index_scores.forward(index_q, index_k, index_w)
                log_q.sub_(precise(log_z)[:, None])
                if hidden is not None:
                    target.masked_fill_(hidden, 0.0)
                    log_q.masked_fill_(hidden, 0.0)
                sums.loss += _divergence(target, log_q)
                if gradients:
                    d_scores = log_q.exp_().sub_(target)
                    if hidden is not None:
                        d_scores.masked_fill_(hidden, 0.0)
                    d_q, d_keys, d_w = sums.of_tile(document, first, last)
                    into = d_q, d_keys[start:stop], d_w
                    index_scores.add_gradient(d_scores, index_q, index_k, index_w, into)
    return sums.result()


def _key_tiles(
    rows: Rows, document: Document, first: int, last: int, area: int
) -> list[tuple[int, int]]:
    """Return the ranges of keys that a tile of rows sees any of."""
    end, width = rows.visible(document, last - 1), max(area // (last - first), 1)
    return [(start, min(start + width, end)) for start in range(0, end, width)]


def _hidden(
    rows: Rows,
    document: Document,
    first: int,
    last: int,
    start: int,
    stop: int,
    device: torch.device,
) -> Tensor | None:
    """Return where a row does not see a key of the tile; None if every row sees every key."""
    if stop <= rows.visible(document, first):
        return None
    counts = rows.visible_counts(document, first, last, device)
    return torch.arange(start, stop, device=device) >= counts[:, None]


def _attention_share(scores: Tensor, m: Tensor, z: Tensor) -> Tensor:
    """Return attention's probabilities ``[rows, N1, K]`` from its statistics ``[rows, N1]``."""
    return scores.sub_(m[..., None]).exp_().div_(z.where(z > 0, 1.0)[..., None])


def _dense_target(
    scale: float,
    q: Tensor,
    k: Tensor,
    q_rope: Tensor | None,
    k_rope: Tensor | None,
    m: Tensor,
    z: Tensor,
) -> Tensor:
    """Return the mean of attention's probabilities over heads, ``[rows, keys]``.

    Args:
        scale: Attention's scale.
        q: ``[rows, N1, D]``.
        k: ``[keys, N2, D]``.
        q_rope: ``[rows, N1, Dr]`` or None.
        k_rope: ``[keys, N2, Dr]`` or None.
        m: ``[N2, rows, N1 / N2]``, the maximum of the row's scores.
        z: As ``m``, the sum.
    """
    target = torch.zeros(q.shape[0], k.shape[0], dtype=m.dtype, device=q.device)
    group = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        of_kv, in_group = divmod(head, group)
        scores = precise(q[:, head]) @ precise(k[:, of_kv]).T
        if q_rope is not None and k_rope is not None:
            scores.addmm_(precise(q_rope[:, head]), precise(k_rope[:, of_kv]).T)
        own_m, own_z = m[of_kv, :, in_group, None], z[of_kv, :, in_group, None]
        target += scores.mul_(scale).sub_(own_m).exp_().div_(own_z.where(own_z > 0, 1.0))
    return target.div_(q.shape[1])


def _divergence(target: Tensor, log_q: Tensor) -> Tensor:
    """Return ``sum p (log p - log q)`` in double; ``p = 0`` adds nothing."""
    return (torch.xlogy(target, target) - target * log_q).sum(dtype=torch.float64)
