"""The largest scores of a row, found tile by tile: descending score, then ascending position.

`torch.topk` alone chooses among equal scores by the width of its input, and equal scores are no
accident here: every key whose dot products are all negative scores exactly 0. So a float32 score
and its column are packed into one int64 that orders as both do, and no two of them are equal::

    | 32 bits: the score, as an integer that orders like it | 32 bits: 2^31 - 1 - column |

float64 scores leave no room for a column; they go through a stable sort.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["RunningTopK"]

_LOW = (1 << 31) - 1


class RunningTopK:
    """Top ``count`` of rows whose scores arrive in tiles of ascending columns.

    NaN orders as the largest; ``-0.0`` and ``0.0`` are equal. Hidden scores must be ``-inf`` and
    stand behind the visible ones of their row: then they also rank behind a visible ``-inf``.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._best: Tensor | None = None
        self._columns: Tensor | None = None

    def add(self, scores: Tensor, first_column: int) -> None:
        """Take in ``scores`` ``[rows, columns]``, float32 or float64; they may be overwritten."""
        if scores.dtype is torch.float64:
            self._add_sorted(scores, first_column)
            return
        keys = _packed(scores, first_column)
        if self._best is not None:
            keys = torch.cat([self._best, keys], 1)
        if keys.shape[1] > self.count:
            keys = keys.topk(self.count, 1, sorted=False).values
        self._best = keys

    def result(self) -> tuple[Tensor, Tensor]:
        """Return columns, int64, and scores, ``[rows, min(count, columns seen)]``."""
        assert self._best is not None, "there is a tile before there is a result"
        if self._columns is not None:
            return self._columns, self._best
        keys = self._best.sort(1, descending=True).values
        return _LOW - (keys & _LOW), _score(keys)

    def _add_sorted(self, scores: Tensor, first_column: int) -> None:
        last_column = first_column + scores.shape[1]
        columns = torch.arange(first_column, last_column, device=scores.device).expand_as(scores)
        scores = scores + 0.0
        if self._best is not None and self._columns is not None:
            # what was kept comes first: its columns are lower
            scores = torch.cat([self._best, scores], 1)
            columns = torch.cat([self._columns, columns], 1)
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        self._best = scores[:, : self.count].contiguous()
        self._columns = columns.gather(1, order[:, : self.count])


def _packed(scores: Tensor, first_column: int) -> Tensor:
    scores = scores.add_(0.0)  # -0.0 becomes 0.0
    # of either sign, a NaN is to be largest: the positive one is. On a GPU looking costs more
    if scores.device.type != "cpu" or bool(scores.sum().isnan()):
        scores.masked_fill_(scores.isnan(), math.nan)
    bits = scores.view(torch.int32)
    ordered = (bits >> 31).bitwise_and_(_LOW).bitwise_xor_(bits)
    columns = torch.arange(first_column, first_column + scores.shape[1], device=scores.device)
    return ordered.long().mul_(1 << 32).add_(_LOW - columns)


def _score(keys: Tensor) -> Tensor:
    ordered = (keys >> 32).int()
    return (ordered ^ ((ordered >> 31) & _LOW)).view(torch.float32)
