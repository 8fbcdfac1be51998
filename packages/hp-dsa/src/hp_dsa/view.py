"""What a DSA operator may know about its rank while it runs inside a boundary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from hp_comm import merge_head_tail, split_head_tail
from hp_dsa.late_errors import LateErrors
from hp_dsa.plan import DSAPlan
from hp_mesh.documents import KeyWindow, batch_window, packed_window
from hp_mesh.view import View

__all__ = ["DSAView", "Lengths"]

Lengths = tuple[Sequence[int] | None, Sequence[int] | None]
"""Lengths of queries and of keys for the whole sequence."""


@dataclass(eq=False, kw_only=True)
class DSAView(View):
    """The view inside a DSA boundary.

    Attributes:
        plan: The style's plan.
        group: The CP ranks.
        rank: CP rank.
        local_length: Query rows that this rank holds.
        num_keys: Key rows of the whole sequence.
        call_index: How many calls of the boundary went before.
        late_errors: Where calls after the first leave what they find wrong on a device.
    """

    plan: DSAPlan
    group: ProcessGroup
    rank: int
    local_length: int
    num_keys: int
    call_index: int = 0
    late_errors: LateErrors = field(default_factory=LateErrors)

    @property
    def cp_axis(self) -> int:
        """The CP axis of the mesh inside."""
        return self.cp_axes[0]

    @property
    def num_queries(self) -> int:
        """Query rows of the whole sequence."""
        return self.local_length * self.plan.cp_size

    def windows(self, batch: int, lengths: Lengths, causal: bool) -> tuple[KeyWindow, ...]:
        """Return what each call of an operator is handed: the one place that knows."""
        queries, keys = lengths
        rows = self.plan.rows(self.rank, self.num_queries)
        if self.plan.layout == "TND":
            assert queries is not None and keys is not None, "checked by the caller"
            return tuple(packed_window(row, queries, keys, causal=causal) for row in rows)
        return tuple(
            batch_window(
                row,
                self.num_queries,
                self.num_keys,
                batch=batch,
                query_lengths=queries,
                key_lengths=keys,
                causal=causal,
            )
            for row in rows
        )

    def take_rows(self, plain: Tensor, dim: int) -> Tensor:
        """Return the rows that this rank holds, in the order of its data."""
        rows = self.plan.rows(self.rank, self.num_queries)
        return torch.cat([plain.narrow(dim, start, end - start) for start, end in rows], dim)

    def split_rows(self, x: Tensor, dim: int, count: int) -> tuple[Tensor, ...]:
        """Return the rows of each of ``count`` windows; without balance, tails are the mirror's."""
        if count == 1:
            return (x,)
        return split_head_tail(x, self.group, seq_dim=dim, trade=self.plan.swaps_tails)

    def join_rows(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Undo `split_rows`."""
        if len(parts) == 1:
            return parts[0]
        head, tail = parts
        return merge_head_tail(head, tail, self.group, seq_dim=dim, trade=self.plan.swaps_tails)

    def placements(
        self, cp: Placement, foreign: Sequence[Placement] | None = None
    ) -> tuple[Placement, ...]:
        """Return ``cp`` on the CP axis behind ``foreign``, which are replicated by default."""
        return (*(foreign or [Replicate()] * self.cp_axis), cp)

    def key_grads(self, placements: Sequence[Placement], query: Tensor) -> tuple[Placement, ...]:
        """Return the layout of a key's gradient: a share of a CP rank's rows, a TP rank's heads."""
        grads = list(self.partial_grads(placements))
        of_query = getattr(query, "placements", ())
        for axis, placement in enumerate(of_query):
            is_heads = isinstance(placement, Shard) and placement.dim > self.plan.seq_dim
            if axis != self.cp_axis and is_heads and grads[axis].is_replicate():
                grads[axis] = Partial()
        return tuple(grads)
