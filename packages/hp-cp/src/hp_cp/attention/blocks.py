r"""Which blocks of scores are seen when keys come in parts; no torch.

A part is a slice of every rank's shard, so its keys are several runs of the sequence. Under a
causal mask the rows of a rank see some runs whole, the run that starts among them below a diagonal,
and later ones not at all; each block is one call of a kernel that knows one causal rule (row 0 sees
key 0)::

    P = 3, two slices, part 1, rank 1        runs of part 1:  of rank 0   of rank 1   of rank 2
                                 rows  first slice           [ all    ]
                                       second slice          [ all    ]  [ \       ]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hp_mesh.window import Range

__all__ = ["Block", "by_runs", "causal_blocks", "key_runs", "slices_of"]


class Block(NamedTuple):
    """Rows and keys of one kernel call, counted from the rank's first row and the part's first key.

    Attributes:
        rows: Half-open range of the rank's rows.
        keys: Half-open range of the part's keys.
        causal: Whether row ``i`` of the block sees its keys ``<= i`` only.
    """

    rows: Range
    keys: Range
    causal: bool


def slices_of(length: int, count: int) -> tuple[Range, ...]:
    """Cut ``length`` rows into ``count`` consecutive slices, the first ones longer by at most 1."""
    short, longer = divmod(length, count)
    ends = [(i + 1) * short + min(i + 1, longer) for i in range(count)]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def key_runs(part: Range, shard: int, ranks: int) -> tuple[Range, ...]:
    """Return the keys of the sequence that a part holds: slice ``part`` of each shard."""
    return tuple((r * shard + part[0], r * shard + part[1]) for r in range(ranks))


def causal_blocks(rows: Range, runs: Sequence[Range]) -> list[Block]:
    """Return the blocks in which ``rows`` of the sequence see the ascending ``runs`` of keys.

    No block has a row without a key, so that each has a log-sum-exp.
    """
    first, last = rows
    blocks: list[Block] = []
    seen = at = 0  # keys that all rows see so far; where the run starts in the part
    for start, stop in runs:
        # row i sees keys <= i: the run's keys before the first row, and the first row's own
        whole = max(min(stop, first) - start, 0)
        seen += whole
        low, high = start + whole, min(stop, last)
        if low < high:
            blocks.append(Block((low - first, high - first), (at + whole, at + high - start), True))
            if high < last:
                blocks.append(
                    Block((high - first, last - first), (at + whole, at + high - start), False)
                )
        at += stop - start
    if seen:
        blocks.insert(0, Block((0, last - first), (0, seen), False))
    return blocks


def by_runs(blocks: Sequence[Block], run: int) -> list[Block]:
    """Cut blocks over several runs of ``run`` keys into one block for each."""
    return [
        Block(block.rows, (start, min(start + run, block.keys[1])), block.causal)
        for block in blocks
        for start in range(*block.keys, block.keys[1] - block.keys[0] if block.causal else run)
    ]
