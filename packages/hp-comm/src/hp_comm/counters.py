"""Count what this rank sends, by kind of collective.

A counter belongs to a rank and not to a thread: the backward pass of an accelerator runs in a
thread of its own, and in tests several ranks share one process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist

__all__ = ["Traffic", "TrafficRecord", "record", "traffic"]


@dataclass(frozen=True, slots=True)
class TrafficRecord:
    """One collective as this rank saw it.

    Attributes:
        kind: ``"all_to_all"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, ``"p2p"``
            or ``"preflight"``.
        group_size: Ranks that took part.
        bytes_sent: Bytes that left this rank; the share that it keeps is not counted.
    """

    kind: str
    group_size: int
    bytes_sent: int


@dataclass(slots=True)
class Traffic:
    """What one rank sent while the counter was open."""

    records: list[TrafficRecord] = field(default_factory=list)

    def count(self, kind: str | None = None) -> int:
        """Return the number of collectives of ``kind``, or of all."""
        return sum(kind in (None, r.kind) for r in self.records)

    def bytes(self, kind: str | None = None) -> int:
        """Return the bytes sent by collectives of ``kind``, or by all."""
        return sum(r.bytes_sent for r in self.records if kind in (None, r.kind))

    def summary(self) -> dict[str, tuple[int, int]]:
        """Return ``{kind: (count, bytes sent)}``."""
        kinds = sorted({r.kind for r in self.records})
        return {kind: (self.count(kind), self.bytes(kind)) for kind in kinds}


_lock = threading.Lock()
_open: list[tuple[int, Traffic]] = []


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Count the collectives that hp-comm starts on this rank, forward and backward, in the block.

    Example::

        with traffic() as sent:
            seq_to_head(q, group, seq_dim=1, head_dim=2).sum().backward()
        assert sent.count("all_to_all") == 2
    """
    entry = (_rank(), Traffic())
    with _lock:
        _open.append(entry)
    try:
        yield entry[1]
    finally:
        with _lock:
            _open[:] = [other for other in _open if other is not entry]


def record(kind: str, group_size: int, bytes_sent: int) -> None:
    """Tell the open counters of this rank about a collective that is about to start."""
    if not _open:
        return
    rank = _rank()
    with _lock:
        for owner, counter in _open:
            if owner == rank:
                counter.records.append(TrafficRecord(kind, group_size, bytes_sent))
