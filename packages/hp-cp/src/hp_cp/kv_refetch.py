"""``keep_kv=False``: how the gathered K and V of one call are gathered again in backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from hp_comm import Handle, gather_seq
from hp_mesh.refetch import Refetch

__all__ = ["GatheredKV"]


class GatheredKV(Refetch):
    """The gathered K and V of one call, or of one group of its heads.

    Args:
        where: Name of the style, for messages.
        group: The ranks that gather.
        shards: K and V of this rank before the gather.
        watched: Other tensors that show the data of ``shards``; a change of theirs is one too.
        gathered: K and V as attention is to see them.
        seq_dim: Dim of the gather.
        head_dim: Dim of ``index``.
        index: KV head of each query head, taken after the gather; None to leave heads as they are.
        dense: As the first gather was asked.
        overlap: Whether something can run beside the second gather.
    """

    def __init__(
        self,
        where: str,
        group: ProcessGroup,
        shards: Sequence[Tensor],
        watched: Sequence[Tensor],
        gathered: Sequence[Tensor],
        *,
        seq_dim: int,
        head_dim: int,
        index: Tensor | None,
        dense: bool,
        overlap: bool,
    ) -> None:
        super().__init__(where, ("k", "v"), "keep_kv", shards, watched, gathered, overlap=overlap)
        self.group = group
        self.seq_dim, self.head_dim, self.index = seq_dim, head_dim, index
        self.dense = dense

    def start(self, shards: Sequence[Tensor], *, overlap: bool) -> Handle[tuple[Tensor, ...]]:
        """Gather K and V again."""
        if overlap:
            return gather_seq(
                shards, self.group, seq_dim=self.seq_dim, dense=self.dense, async_op=True
            )
        rows = gather_seq(shards, self.group, seq_dim=self.seq_dim, dense=self.dense)
        return Handle.ready(self.where, rows)

    def finish(self, result: Any) -> tuple[Tensor, ...]:
        """Give each query head a KV head of its own where they do not share them evenly."""
        if self.index is None:
            return tuple(result)
        return tuple(x.index_select(self.head_dim, self.index) for x in result)
