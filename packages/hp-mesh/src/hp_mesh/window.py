"""Which rows of the sequence a rank computes, and in which order they lie.

No torch here: `hp_cp.plan`, `hp_dsa` and `hp_tune` read the same ranges without it.

A *chunk* is ``S / 2P`` rows; head-tail orders pair an early chunk with a late one, so that each
rank has the same number of visible keys under a causal mask. There are two of them::

    P = 4, chunks 0..7              rank 0   rank 1   rank 2   rank 3
    contiguous data                 0 1      2 3      4 5      6 7
    head-tail data (zigzag)         0 7      1 6      2 5      3 4
    head-tail compute on
    contiguous data (tails swapped) 0 7      2 5      4 3      6 1
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "AttentionWindow",
    "Range",
    "balanced_rows",
    "contiguous_rows",
    "head_tail_chunks",
    "head_tail_rows",
    "mirror_rank",
]

Range = tuple[int, int]
"""Half-open ``[start, stop)`` range of rows of the global sequence."""


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """The part of the global attention that one call computes on this rank.

    Attributes:
        query_start: Global position of the first query row.
        query_length: Number of query rows, contiguous from ``query_start``.
        key_length: Number of key rows that the core is handed; row 0 is global position 0.
        global_length: Length of the whole sequence, in tokens.
    """

    query_start: int
    query_length: int
    key_length: int
    global_length: int

    @property
    def query_end(self) -> int:
        """Global position one past the last query row: the causal prefix ends here."""
        return self.query_start + self.query_length


def contiguous_rows(rank: int, size: int, length: int) -> Range:
    """Return the rows of shard ``rank`` when ``length`` rows are cut into ``size`` equal shards."""
    shard = length // size
    return (rank * shard, (rank + 1) * shard)


def mirror_rank(rank: int, size: int) -> int:
    """Return the peer that ``rank`` swaps tails with: ``size - 1 - rank``."""
    return size - 1 - rank


def _chunk(index: int, size: int, length: int) -> Range:
    rows = length // (2 * size)
    return (index * rows, (index + 1) * rows)


def head_tail_rows(rank: int, size: int, length: int) -> tuple[Range, Range]:
    """Return the two chunks that ``rank`` holds of *data* in head-tail (zigzag) order."""
    return (_chunk(rank, size, length), _chunk(2 * size - 1 - rank, size, length))


def head_tail_chunks(size: int) -> tuple[int, ...]:
    """Return the chunks of data in head-tail order, rank after rank: ``0, 2P-1, 1, 2P-2, ..``."""
    return tuple(chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank))


def balanced_rows(rank: int, size: int, length: int) -> tuple[Range, Range]:
    """Return the two chunks that ``rank`` *computes* of contiguous data whose tails are swapped.

    The first is the rank's own head chunk, the second the tail chunk of its mirror rank.
    """
    mirror = mirror_rank(rank, size)
    return (_chunk(2 * rank, size, length), _chunk(2 * mirror + 1, size, length))
