"""A call with too many queries as several calls: each with its queries and the keys they see.

Because causality is aligned at the end of a document, a part of the queries goes with a prefix of
its document's keys. Outputs of rows follow one another; gradients of keys are added.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from torch import Tensor

from hp_dsa.ops.rows import Document, Rows

__all__ = ["Part", "query_parts"]


@dataclass(frozen=True)
class Part:
    """Queries ``[first, last)`` and keys ``[key_first, key_last)`` on the sequence dim.

    Attributes:
        first: First query, in every row of the batch.
        last: End of the queries.
        key_first: First key.
        key_last: End of the keys.
        rows: What the part's rows see; ready for an operator.
    """

    first: int
    last: int
    key_first: int
    key_last: int
    rows: Rows

    def queries(self, x: Tensor, *, heads_first: bool = False) -> Tensor:
        """Cut a query-side tensor in the caller's layout; statistics have ``heads_first``."""
        dim = (1 if self.rows.layout == "BSND" else 0) + heads_first
        return x.narrow(dim, self.first, self.last - self.first)

    def keys(self, x: Tensor) -> Tensor:
        """Cut a key-side tensor in the caller's layout."""
        dim = 1 if self.rows.layout == "BSND" else 0
        return x.narrow(dim, self.key_first, self.key_last - self.key_first)


def query_parts(rows: Rows, limit: int) -> Iterator[Part]:
    """Yield parts of at most ``limit`` queries; those that see no key at all are left out."""
    if rows.num_queries <= limit:
        yield Part(0, rows.num_queries, 0, rows.num_keys, rows)
        return
    for first in range(0, rows.num_queries, limit):
        last = min(first + limit, rows.num_queries)
        cut = [_cut(rows, document, first, last) for document in rows.documents]
        part = (_of_batch if rows.layout == "BSND" else _of_stream)(rows, cut, first, last)
        if part.key_last > part.key_first:
            yield part


def _cut(rows: Rows, document: Document, first: int, last: int) -> Document:
    """Return the document's queries in ``[first, last)``, and the keys that they see."""
    start = min(max(first - document.query_start, 0), document.query_length)
    stop = min(max(last - document.query_start, 0), document.query_length)
    seen = rows.visible(document, stop - 1) if stop > start else 0
    return document._replace(
        query_start=document.query_start + start, query_length=stop - start, key_length=seen
    )


def _of_batch(rows: Rows, cut: list[Document], first: int, last: int) -> Part:
    num_keys = max(document.key_length for document in cut)
    is_plain = all(
        document.query_length == last - first and document.key_length == num_keys
        for document in cut
    )
    return Part(
        first,
        last,
        0,
        num_keys,
        replace(
            rows,
            num_queries=last - first,
            num_keys=num_keys,
            query_lengths=None if is_plain else [document.query_length for document in cut],
            key_lengths=None if is_plain else [document.key_length for document in cut],
        ),
    )


def _of_stream(rows: Rows, cut: list[Document], first: int, last: int) -> Part:
    """Keep the documents from the first to the last with queries here.

    All but the last see all their keys, so that the keys kept are one range; a document without
    queries between them keeps its own.
    """
    with_queries = [number for number, document in enumerate(cut) if document.query_length]
    kept = range(with_queries[0], with_queries[-1] + 1)
    documents = [
        cut[number]
        if number == kept[-1]
        else cut[number]._replace(key_length=rows.documents[number].key_length)
        for number in kept
    ]
    query_ends = [*accumulate(document.query_length for document in documents)]
    key_ends = [*accumulate(document.key_length for document in documents)]
    key_first = documents[0].key_start
    return Part(
        first,
        last,
        key_first,
        key_first + key_ends[-1],
        replace(
            rows,
            num_queries=last - first,
            num_keys=key_ends[-1],
            query_lengths=query_ends,
            key_lengths=key_ends,
        ),
    )
