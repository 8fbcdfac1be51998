r"""Causal attention within a sliding window, with the first tokens always visible.

Row ``i`` sees keys ``i - window + 1`` to ``i`` and keys ``0`` to ``sinks - 1``, if they are not
after it. Rows are computed in blocks, each with the keys that it sees and a mask of that size::

    keys   0 . . . . . . . . . . .        window 3, 1 sink, blocks of 4 rows
    rows   \
           # \
           # # \
           # # # \                        block 0: keys 0-3
           #   # # \
           #     # # \
           #       # # \
           #         # # \                block 1: key 0 and keys 2-7

Nothing of size rows times keys is allocated, and no key outside the window is read, so that a rank
needs to hold those of its rows' windows only (`KeySpans`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hp_mesh.window import Range

__all__ = ["KeySpans", "band_attention", "band_mask", "seen_keys"]

_ROWS = (64, 1024)
"""Fewest and most rows of a block: a block reads ``window - 1`` keys beside its own."""


@dataclass(frozen=True, slots=True)
class KeySpans:
    """Which keys of the sequence a tensor holds: the first ``sinks``, then ``band``.

    Attributes:
        sinks: Number of keys from position 0 that lie in front of ``band``.
        band: Half-open range of the other keys; begins at ``sinks`` or after it.
    """

    sinks: int
    band: Range

    @property
    def length(self) -> int:
        """Number of keys held."""
        return self.sinks + self.band[1] - self.band[0]

    def positions(self, device: torch.device) -> Tensor:
        """Return the global position of each key held, int64 ``[length]``."""
        first = torch.arange(self.sinks, device=device)
        return torch.cat([first, torch.arange(*self.band, device=device)])

    def place(self, keys: Range) -> Range:
        """Return where the keys at the global positions ``[start, stop)`` lie among those held."""
        start, stop = keys
        if start >= stop:
            return (0, 0)
        low, high = (
            p if p < self.sinks else p - self.band[0] + self.sinks for p in (start, stop - 1)
        )
        held = all(p < self.sinks or p >= self.band[0] for p in (start, stop - 1))
        assert held and high - low == stop - 1 - start and stop <= self.band[1], (
            f"keys {keys} must be among {self}"
        )
        return (low, high + 1)


def band_mask(rows: Tensor, keys: Tensor, window: int, sinks: int = 0) -> Tensor:
    """Return who sees whom, bool ``[rows, keys]``, for global positions of rows and keys."""
    distance = rows[:, None] - keys
    return (distance >= 0) & ((distance < window) | (keys < sinks))


def band_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    start: int,
    spans: KeySpans,
    window: int,
    sinks: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Compute the rows ``start``, ``start + 1``, ... of windowed causal attention.

    Args:
        q: ``[B, H, Lq, D]``.
        k: ``[B, Hkv, K, D]``, the keys of ``spans``; ``Hkv`` divides ``H``.
        v: ``[B, Hkv, K, Dv]``, likewise.
        start: Global position of ``q``'s first row; negative rows see nothing and give 0.
        spans: Positions of the keys; they must hold all that the rows see.
        window: Number of keys that a row sees, itself included.
        sinks: Number of first keys that every row sees.
        scale: Factor on the scores, ``1 / sqrt(D)`` by default.

    Returns:
        ``[B, H, Lq, Dv]``.
    """
    outs: list[Tensor] = []
    masks: dict[tuple[int, ...], Tensor] = {}
    for low, high in _blocks(start, start + q.shape[2], window):
        seen = seen_keys(low, high, window, sinks)
        places = [spans.place(keys) for keys in seen]
        kb, vb = (_joined([x[:, :, a:b] for a, b in places]) for x in (k, v))
        # away from the first keys a mask depends on distances only, and serves the next block too
        key = (high - low, low - seen[-1][0], len(seen), low if seen[0][1] == high else -1)
        if key not in masks:
            keys = torch.cat([torch.arange(a, b, device=q.device) for a, b in seen])
            masks[key] = band_mask(torch.arange(low, high, device=q.device), keys, window, sinks)
        outs.append(_attend(q[:, :, low - start : high - start], kb, vb, masks[key], scale))
    return _joined(outs)


def seen_keys(low: int, high: int, window: int, sinks: int) -> list[Range]:
    """Return the keys that the rows ``[low, high)`` see: one range, or the sinks and the rest."""
    first, last = max(low - window + 1, 0), max(high, 0)
    if min(sinks, last) >= first or not sinks:
        return [(0 if sinks else first, last)]
    return [(0, sinks), (first, last)]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _blocks(start: int, end: int, window: int) -> Iterator[Range]:
    size = min(max(window, _ROWS[0]), _ROWS[1])
    for low in range(start, end, size):
        yield low, min(low + size, end)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    if not k.shape[2]:  # no key at all: zeros, and gradients of zero for whoever waits for them
        zeros = q.new_zeros(*q.shape[:3], v.shape[-1])
        return zeros + (q[:, :, :0].sum() + k.sum() + v.sum())
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
