"""Which keys a query row sees: documents, their lengths, and the causal rule, for both layouts.

An operator works document by document; a batch row of BSND is one document, a packed TND stream
is cut into several by its cumulative lengths. Causality is aligned at the end of a document: its
last query sees its last key (``sparse_mode=3``), so that rows ``[a, e)`` of a longer sequence are
expressed by handing over the keys ``[0, e)``, and by nothing else.

    Lq = 3, Lk = 5      key 0 1 2 3 4        Lq = 3, Lk = 2      key 0 1
    query 0                 x x x . .        query 0                 . .    sees nothing
    query 1                 x x x x .        query 1                 x .
    query 2                 x x x x x        query 2                 x x
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hp_mesh.checks import read_integers, require

__all__ = ["Document", "Layout", "Lengths", "Rows"]

Layout = Literal["BSND", "TND"]
Lengths = Sequence[int] | Tensor
_CAUSAL = 3


class Document(NamedTuple):
    """Queries and keys that belong together, as places in tensors with a leading batch dim."""

    batch: int
    query_start: int
    query_length: int
    key_start: int
    key_length: int

    def queries(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return the document's part of a query-side tensor ``[B, ..]``, sequence on ``dim``."""
        return x[self.batch].narrow(dim - 1, self.query_start, self.query_length)

    def keys(self, x: Tensor) -> Tensor:
        """Return the document's part of a key-side tensor ``[B, S2, ..]``: ``[Lk, ..]``."""
        return x[self.batch, self.key_start : self.key_start + self.key_length]


@dataclass(frozen=True)
class Rows:
    """The rows of one call and what each of them sees.

    Attributes:
        where: The operator, for messages.
        layout: ``"BSND"`` or ``"TND"``.
        sparse_mode: 0 (a row sees every key of its document) or 3 (causal, aligned at the end).
        batch: ``B``; 1 for TND.
        num_queries: ``S1`` or ``T1``.
        num_keys: ``S2`` or ``T2``.
        query_lengths: As the caller gave them: valid lengths (BSND) or cumulative ends (TND).
        key_lengths: As ``query_lengths``.
        names: The two arguments' names, for messages.
    """

    where: str
    layout: Layout
    sparse_mode: int
    batch: int
    num_queries: int
    num_keys: int
    query_lengths: Lengths | None = None
    key_lengths: Lengths | None = None
    names: tuple[str, str] = ("actual_seq_lengths_query", "actual_seq_lengths_key")

    @cached_property
    def documents(self) -> tuple[Document, ...]:
        """The documents in order; the first look reads lengths that are tensors to the host."""
        query = self._lengths(0, self.query_lengths, self.num_queries)
        key = self._lengths(1, self.key_lengths, self.num_keys)
        if self.layout == "BSND":
            return tuple(
                Document(b, 0, lq, 0, lk) for b, (lq, lk) in enumerate(zip(query, key, strict=True))
            )
        require(
            len(query) == len(key),
            self.where,
            f"{self.names[0]} ({len(query)} ends) must have as many entries as "
            f"{self.names[1]} ({len(key)} ends)",
            "a document without local queries repeats the end before it",
        )
        return tuple(
            Document(0, qa, qe - qa, ka, ke - ka)
            for (qa, qe), (ka, ke) in zip(pairwise([0, *query]), pairwise([0, *key]), strict=True)
        )

    def check_lengths(self) -> None:
        """Refuse lengths that do not add up; tensors among them are read to the host."""
        _ = self.documents

    def visible(self, document: Document, row: int) -> int:
        """Return how many of the document's keys its query ``row`` sees: a prefix."""
        if self.sparse_mode != _CAUSAL:
            return document.key_length
        end = document.key_length - document.query_length + row + 1
        return min(max(end, 0), document.key_length)

    def visible_counts(
        self, document: Document, first: int, last: int, device: torch.device
    ) -> Tensor:
        """Return `visible` of the rows ``[first, last)``, ``[last - first]`` int64."""
        if self.sparse_mode != _CAUSAL:
            return torch.full((last - first,), document.key_length, device=device)
        ends = torch.arange(first + 1, last + 1, device=device)
        return (ends + document.key_length - document.query_length).clamp(0, document.key_length)

    def first_seeing(self, document: Document) -> int:
        """Return the first row that sees a key; the document's length if none does."""
        if document.key_length == 0:
            return document.query_length
        if self.sparse_mode != _CAUSAL:
            return 0
        return max(document.query_length - document.key_length, 0)

    def batched(self, x: Tensor) -> Tensor:
        """Return ``x`` with a batch dim in front; statistics too, in both layouts."""
        return x.unsqueeze(0) if self.layout == "TND" else x

    def unbatched(self, x: Tensor) -> Tensor:
        """Undo `batched`."""
        return x.squeeze(0) if self.layout == "TND" else x

    def _lengths(self, side: int, given: Lengths | None, length: int) -> list[int]:
        name, size = self.names[side], ("S1", "S2")[side] if self.layout == "BSND" else "T"
        if given is None:
            require(
                self.layout == "BSND",
                self.where,
                f'{name} (None) must hold the cumulative ends of the documents for layout "TND"',
                f"pass [{length}] for a single document",
            )
            return [length] * self.batch
        numbers = read_integers(self.where, name, given)
        if self.layout == "BSND":
            require(
                len(numbers) == self.batch and all(0 <= n <= length for n in numbers),
                self.where,
                f"{name} ({numbers}) must hold a valid length of at most {size} ({length}) for "
                f"each of B ({self.batch}) rows",
            )
            return numbers
        require(
            bool(numbers) and all(a <= b for a, b in pairwise([0, *numbers])),
            self.where,
            f"{name} ({numbers}) must be cumulative ends that do not fall",
            "no leading 0, no single lengths",
        )
        require(
            numbers[-1] == length,
            self.where,
            f"{name} (last end {numbers[-1]}) must end at the tensor's length ({length})",
            "make padding a document of its own, or cut the tensor",
        )
        return numbers
