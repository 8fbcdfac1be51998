"""The keys that a range of query rows sees, for packed documents and for batches with lengths.

No torch here. Causality is aligned at the end of a document (its last query sees its last key), so
a part of the queries is told to a kernel by the keys it is handed, and by nothing else: they end
where the last of these queries may look::

    documents      |  a  |     b     | c |        ends of queries and keys: [3, 9, 11]
    rows 0-5       a, b[0:3]                      keys 0-5,   query ends [3, 6], key ends [3, 6]
    rows 6-10      b[3:6], c                      keys 3-10,  query ends [3, 5], key ends [6, 8]

Positions within a document are the same in the window and in the whole sequence, because a window
begins where a document begins: indices of keys need no translation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hp_mesh.window import Range

__all__ = ["KeyWindow", "batch_window", "packed_window"]


@dataclass(frozen=True, slots=True)
class KeyWindow:
    """What one call of an operator is handed, for one range of query rows.

    Attributes:
        rows: Rows of the whole query sequence.
        keys: Rows of the whole key sequence.
        query_lengths: Lengths of the queries as the operator wants them: valid lengths per batch
            row, or cumulative ends of the documents; None for a whole batch.
        key_lengths: The same for the keys.
    """

    rows: Range
    keys: Range
    query_lengths: tuple[int, ...] | None = None
    key_lengths: tuple[int, ...] | None = None

    @property
    def num_rows(self) -> int:
        """Number of query rows."""
        return self.rows[1] - self.rows[0]

    @property
    def num_keys(self) -> int:
        """Number of key rows."""
        return self.keys[1] - self.keys[0]


def batch_window(
    rows: Range,
    num_queries: int,
    num_keys: int,
    *,
    batch: int,
    query_lengths: Sequence[int] | None = None,
    key_lengths: Sequence[int] | None = None,
    causal: bool = True,
) -> KeyWindow:
    """Return the window of ``rows`` of a batch of sequences, each with its valid lengths.

    Args:
        rows: Rows of the query sequence, the same in each batch row.
        num_queries: Length of the whole query sequence.
        num_keys: Length of the whole key sequence.
        batch: Number of batch rows.
        query_lengths: Valid queries of each batch row. Default: all.
        key_lengths: Valid keys of each batch row. Default: all.
        causal: Whether the last valid query sees the last valid key and each one before it one key
            less; otherwise every query sees all keys.
    """
    start, end = rows
    whole = query_lengths is None and key_lengths is None
    queries = [num_queries] * batch if query_lengths is None else list(query_lengths)
    keys = [num_keys] * batch if key_lengths is None else list(key_lengths)
    here = [min(max(q - start, 0), end - start) for q in queries]
    if causal:
        # queries behind these rows are a row's last ones: so are the keys that only they see
        keys = [max(k - max(q - end, 0), 0) for q, k in zip(queries, keys, strict=True)]
    keys = [k if n else 0 for k, n in zip(keys, here, strict=True)]
    last = max(keys, default=0)
    if whole and last:
        return KeyWindow(rows, (0, last))
    # kernels want a key tensor that is not empty, also where no row sees a key
    return KeyWindow(rows, (0, max(last, min(1, num_keys))), tuple(here), tuple(keys))


def packed_window(
    rows: Range, query_ends: Sequence[int], key_ends: Sequence[int], *, causal: bool = True
) -> KeyWindow:
    """Return the window of ``rows`` of a stream of documents.

    Documents without a query among ``rows`` are left out with their keys.

    Args:
        rows: Rows of the packed queries, all of them in a document.
        query_ends: Cumulative ends of the documents' queries, without a leading 0.
        key_ends: Cumulative ends of their keys, as many.
        causal: As in `batch_window`, document by document.
    """
    start, end = rows
    queries = list(pairwise([0, *query_ends]))
    keys = list(pairwise([0, *key_ends]))
    counts = [min(b, end) - max(a, start) for a, b in queries]
    here = [index for index, count in enumerate(counts) if count > 0]
    if not here:
        return KeyWindow(rows, (0, 0), (), ())
    # a document without queries may lie in between: it stays, so that its keys are counted
    local = slice(here[0], here[-1] + 1)
    here_queries = [max(count, 0) for count in counts[local]]
    unseen = [max(b - end, 0) if causal else 0 for _, b in queries[local]]
    here_keys = [max(b - a - cut, 0) for (a, b), cut in zip(keys[local], unseen, strict=True)]
    first = keys[local][0][0]
    if not sum(here_keys) and key_ends[-1]:  # one key that nobody sees: no kernel takes none
        first, here_queries, here_keys = 0, [0, *here_queries], [1, *here_keys]
    return KeyWindow(
        rows,
        (first, first + sum(here_keys)),
        tuple(accumulate(here_queries)),
        tuple(accumulate(here_keys)),
    )
