"""Whether all ranks hold the same rows, which the shards of one sequence never do.

A rank that is handed the whole sequence cannot know it: a shard looks the same. But then all ranks
hold the same rows, and a few elements of each, compared as bits, say so.
"""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_mesh._torch import in_backward

__all__ = ["FINGERPRINT_BYTES", "NO_FINGERPRINT", "LocalRows", "RowsWatch"]

FINGERPRINT_BYTES = 16
NO_FINGERPRINT = bytes(FINGERPRINT_BYTES)
_ROWS = 32
_COLUMNS = 8

_warned: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


@dataclass(frozen=True, eq=False)
class LocalRows:
    """A tensor that must be another part of one sequence on each rank.

    Attributes:
        name: What the caller knows it as.
        x: This rank's rows, ``[..., S/P, ...]``, of any dtype and strides.
        seq_dim: Dim of the rows.
    """

    name: str
    x: Tensor
    seq_dim: int

    def fingerprint(self) -> bytes:
        """Return `FINGERPRINT_BYTES` that follow from the bits of a few elements all over ``x``.

        They are zeros, which say nothing, where the rows that were looked at are alike: padding,
        one token again and again, a single row. Such shards are equal however they were cut. Waits
        for the device that holds ``x``.
        """
        if self.x.numel() == 0:
            return NO_FINGERPRINT
        rows = self.x.detach().movedim(self.seq_dim, 0)
        width = rows.numel() // len(rows)
        places = _spread(len(rows), _ROWS)[:, None] * width + _spread(width, _COLUMNS)
        found = rows[torch.unravel_index(places.to(rows.device), rows.shape)]  # [rows, columns]
        bits = found.cpu().contiguous().view(torch.uint8)
        if torch.equal(bits, bits[:1].expand_as(bits)):
            return NO_FINGERPRINT
        return blake2b(bytes(bits.flatten().tolist()), digest_size=FINGERPRINT_BYTES).digest()


class RowsWatch:
    """Looks whether one boundary is handed the same rows on all ranks; in its second call at most.

    The first call may be one of placeholders: pipelines learn shapes from uninitialised tensors,
    which may well be alike. It can only rule the mistake out, as it does for real shards; if it did
    not, the second call decides. What follows is not looked at. A recomputation is no call of its
    own: under activation checkpointing pipelines hand the same placeholders over once more.
    """

    def __init__(self) -> None:
        self._is_open = True
        self._calls = 0

    def begin_call(self) -> bool:
        """Count the call under way and return whether to look at it; the same on all ranks."""
        if not self._is_open or in_backward():
            return False
        self._calls += 1
        return self._calls <= 2

    def take(self, where: str, group: ProcessGroup, local: LocalRows, found: Tensor) -> None:
        """Take note of the fingerprints of all ranks, ``found`` ``[P, FINGERPRINT_BYTES]``.

        Warns once for the group. A warning and no error: a trial whose ranks are seeded alike does
        this on purpose.
        """
        self._is_open = torch.equal(found, found[:1].expand_as(found))
        if not self._is_open or self._calls == 1 or not bool(found.any()) or group in _warned:
            return
        _warned.add(group)
        warnings.warn(
            f"{where}: {local.name} (shape {list(local.x.shape)}) must be another part of the "
            f"sequence on each of the {len(found)} ranks, and has the same rows on all of them; "
            "cut the whole sequence with hp_mesh.shard_sequence, or seed the random data of a "
            "trial by rank",
            stacklevel=3,
        )


def _spread(size: int, count: int) -> Tensor:
    """Return at most ``count`` different indices of ``size``, from the first to the last."""
    count = min(size, count)
    return torch.arange(count) * (size - 1) // max(count - 1, 1)
