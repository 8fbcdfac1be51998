"""What the tiled operators share: tile sizes, selected tokens, index scores and their gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hp_dsa.ops.rows import Document, Rows

__all__ = [
    "SIZES",
    "TORCH_SCORES",
    "IndexScores",
    "Selection",
    "TileSize",
    "add_score_gradient",
    "gathered_rows",
    "head_tile",
    "like_input",
    "logits",
    "precise",
    "query_tile",
    "row_tiles",
    "select",
    "take",
    "taken_keys",
    "tile_size",
    "zeros_like",
]


class TileSize(NamedTuple):
    """How much a device works on at a time.

    Attributes:
        elements: Numbers in an intermediate of a tile of scores.
        rows: Queries of such a tile.
        gathered: Numbers of keys gathered, each row its own.
    """

    elements: int
    rows: int
    gathered: int


SIZES = {"cpu": TileSize(1 << 20, 64, 1 << 22), "cuda": TileSize(1 << 26, 1024, 1 << 27)}
"""By device type: what stays in a cache, and what keeps a GPU busy."""


def tile_size(x: Tensor) -> TileSize:
    """Return the tile size for ``x``'s device; an unknown one gets the smallest."""
    return SIZES.get(x.device.type, SIZES["cpu"])


def precise(x: Tensor) -> Tensor:
    """Return ``x`` in the dtype of the arithmetic: float64 stays, the rest becomes float32."""
    return x if x.dtype is torch.float64 else x.float()


def zeros_like(x: Tensor) -> Tensor:
    """Return dense zeros of ``x``'s shape, precise: where a gradient adds up."""
    dtype = x.dtype if x.dtype is torch.float64 else torch.float32
    return torch.zeros(x.shape, dtype=dtype, device=x.device)


def like_input(rows: Rows, found: Tensor, x: Tensor) -> Tensor:
    """Return a gradient of `Rows.batched` ``x`` in ``x``'s shape and dtype."""
    return rows.unbatched(found).to(x.dtype)


def gathered_rows(x: Tensor, num_tokens: int, num_heads: int, width: int) -> int:
    """Return how many rows may have their ``num_tokens`` keys of ``width`` gathered at once."""
    return max(tile_size(x).gathered // (num_tokens * (width + num_heads)), 1)


def row_tiles(rows: Rows, document: Document, size: int) -> Iterator[tuple[int, int]]:
    """Yield ``[first, last)`` of the document's rows that see a key, at most ``size`` at a time."""
    for first in range(rows.first_seeing(document), document.query_length, max(size, 1)):
        yield first, min(first + max(size, 1), document.query_length)


class Selection(NamedTuple):
    """The tokens of a tile of rows.

    Attributes:
        tokens: ``[rows, K]`` int64; where ``valid`` is False, the row's first valid token, so that
            nothing outside the selection is read. 0 in a row without any.
        valid: bool, same shape.
    """

    tokens: Tensor
    valid: Tensor


def select(entries: Tensor, block: int, visible: Tensor) -> Selection:
    """Return what a tile's entries stand for.

    Args:
        entries: ``[rows, K]``; a row ends at its first -1.
        block: Tokens that an entry stands for.
        visible: ``[rows]``, how many keys each row sees.
    """
    entries = entries.long()
    valid = (entries < 0).cumsum(1) == 0
    if block > 1:
        within = torch.arange(block, device=entries.device)
        entries = (entries[..., None] * block + within).flatten(1)
        valid = valid.repeat_interleave(block, 1)
    valid &= entries < visible[:, None]
    # a maximum of booleans is found at its first place
    first = entries.gather(1, valid.byte().argmax(1, keepdim=True))
    first = first.masked_fill(~valid.any(1, keepdim=True), 0)
    return Selection(entries.where(valid, first), valid)


def take(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return the keys ``[Lk, D]`` of the tokens ``[rows, K]``: ``[rows, K, D]``, precise."""
    return precise(keys.index_select(0, tokens.flatten())).view(*tokens.shape, keys.shape[1])


def query_tile(document: Document, x: Tensor, first: int, last: int) -> Tensor:
    """Return rows ``[first, last)`` of a document, from ``[B, S1, ..]``, precise."""
    return precise(document.queries(x)[first:last])


def taken_keys(document: Document, x: Tensor, tokens: Tensor) -> Tensor:
    """Return the keys of the tokens, from ``[B, S2, 1, D]``: ``[rows, K, D]``, precise."""
    return take(document.keys(x)[:, 0], tokens)


def logits(
    scale: float, q: Tensor, k: Tensor, q_rope: Tensor | None, k_rope: Tensor | None
) -> Tensor:
    """Return ``scale * (q.k + q_rope.k_rope)``.

    Args:
        scale: Factor.
        q: ``[rows, N1, D]``, precise.
        k: ``[rows, K, D]``, each row's own keys, precise.
        q_rope: ``[rows, N1, Dr]`` or None.
        k_rope: ``[rows, K, Dr]`` or None.

    Returns:
        ``[rows, N1, K]``.
    """
    dots = torch.bmm(q, k.mT)
    if q_rope is not None and k_rope is not None:
        dots.baddbmm_(q_rope, k_rope.mT)
    return dots.mul_(scale)


class IndexScores:
    """How a tile of index scores and its gradient are computed; kernels replace it."""

    def forward(self, q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        """Score keys: ``sum_n w[r, n] relu(q[r, n] . k[s])``, a few heads at a time.

        Args:
            q: ``[rows, N1, D]``.
            k: ``[keys, D]``.
            w: ``[rows, N1]``.

        Returns:
            ``[rows, keys]``, precise.
        """
        q, k, w = precise(q), precise(k), precise(w)
        scores = q.new_zeros(q.shape[0], 1, k.shape[0])
        step = head_tile(q.shape[1])
        for head in range(0, q.shape[1], step):
            relu = _dots(q[:, head : head + step], k).relu_()
            scores.baddbmm_(w[:, None, head : head + step], relu)
        return scores.squeeze(1)

    def add_gradient(
        self,
        d_scores: Tensor,
        q: Tensor,
        k: Tensor,
        w: Tensor,
        into: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Add what the gradient of the scores, ``[rows, keys]``, makes of their inputs.

        ``into`` holds the gradients of q, of the tile's keys and of w, precise.
        """
        q, k, w = precise(q), precise(k), precise(w)
        step = head_tile(q.shape[1])
        for head in range(0, q.shape[1], step):
            heads = slice(head, head + step)
            _add_head_gradient(d_scores, q[:, heads], k, w[:, heads], into, heads)


TORCH_SCORES = IndexScores()


def head_tile(num_heads: int) -> int:
    """Return how many index heads are scored in one product."""
    return min(num_heads, 8)


def _dots(q: Tensor, k: Tensor) -> Tensor:
    """Return ``q k`` of rows and heads with shared keys ``[keys, D]``: ``[rows, heads, keys]``."""
    return (q.flatten(0, 1) @ k.T).view(*q.shape[:2], -1)


def _add_head_gradient(
    d_scores: Tensor,
    q: Tensor,
    k: Tensor,
    w: Tensor,
    into: tuple[Tensor, Tensor, Tensor],
    heads: slice,
) -> None:
    d_q, d_k, d_w = into
    relu = _dots(q, k).relu_()
    d_w[:, heads] += torch.bmm(relu, d_scores[..., None]).squeeze(-1)
    d_dots = relu.sign_().mul_(d_scores[:, None]).flatten(0, 1)  # times w, on the smaller factor
    d_q[:, heads].addcmul_((d_dots @ k).view_as(q), w[..., None])
    d_k.addmm_(d_dots.T, (q * w[..., None]).flatten(0, 1))


def add_score_gradient(
    d_scores: Tensor,
    selection: Selection,
    q: Tensor,
    k: Tensor,
    w: Tensor,
    into: tuple[Tensor, Tensor, Tensor],
    relu: Tensor | None = None,
) -> None:
    """Add what the gradient of selected index scores makes of a tile's inputs.

    Args:
        d_scores: ``[rows, K]``, 0 where the selection is not valid.
        selection: The tokens.
        q: ``[rows, N1, D]``, precise.
        k: ``[rows, K, D]``, the selected keys, precise.
        w: ``[rows, N1]``, precise.
        into: Gradients of q ``[rows, N1, D]``, of all keys ``[Lk, D]`` and of w ``[rows, N1]``.
        relu: ``relu(q k)``, ``[rows, N1, K]``, if it is already there; it is overwritten.
    """
    d_q, d_keys, d_w = into
    if relu is None:
        relu = torch.bmm(q, k.mT).relu_()
    d_w += torch.bmm(relu, d_scores[..., None]).squeeze(-1)
    d_dots = relu.sign_().mul_(d_scores[:, None]).mul_(w[..., None])
    d_q += torch.bmm(d_dots, k)
    d_keys.index_add_(0, selection.tokens.flatten(), torch.bmm(d_dots.mT, q).flatten(0, 1))
