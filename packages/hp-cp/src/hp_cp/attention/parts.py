"""Parts of K and V on the wire: each is gathered, and its gradients are summed, behind another."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from hp_comm import Handle, gather_seq
from hp_comm.reductions import scatter_seq_given
from hp_mesh.window import Range

__all__ = ["Prefetch", "ShardSums", "rows_of"]

_SEQ = 2  # of [B, H, S, D]


def rows_of(x: Tensor, rows: Range) -> Tensor:
    """Return a view of some rows of ``x``, ``[B, H, S, D]``."""
    return x[:, :, rows[0] : rows[1]]


class Prefetch:
    """The parts of K and V in order, each gathered while the one before it is at work.

    Attributes:
        slices: The rows of each shard that the parts hold.
    """

    def __init__(
        self, group: ProcessGroup, slices: tuple[Range, ...], k: Tensor, v: Tensor
    ) -> None:
        self.slices = slices
        self._group, self._shards = group, (k, v)
        self._left = list(slices)
        self._next: Handle[tuple[Tensor, ...]] | None = None
        self._start()

    def take(self) -> tuple[Tensor, Tensor]:
        """Return the next part, ``[B, Hkv, P rows, D]``, and start the gather of the one behind."""
        handle, self._next = self._next, None
        assert handle is not None, "there are as many parts as slices"
        k, v = handle.wait()
        self._start()
        return k, v

    def drop(self) -> None:
        """Finish what is in flight after an error: the other ranks take part in it."""
        if self._next is not None:
            self._next.wait()
            self._next = None

    def _start(self) -> None:
        if self._left:
            rows = self._left.pop(0)
            self._next = gather_seq(
                [rows_of(x, rows) for x in self._shards],
                self._group,
                seq_dim=_SEQ,
                dense=False,  # rows first, as it arrives: no second copy of a part
                async_op=True,
            )


class ShardSums:
    """The gradients of the shards of k and v: each part is summed over the ranks behind the next.

    Args:
        group: The ranks.
        shards: Take the gradients, ``[B, Hkv, S/P, D]``; none if nobody wants them.
    """

    def __init__(self, group: ProcessGroup, shards: list[Tensor]) -> None:
        self._group, self._shards = group, shards
        self._sent: tuple[Range, Handle[tuple[Tensor, ...]]] | None = None

    def begin(self, part: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Return zeros for this rank's share of one part, laid out for the wire."""
        if not self._shards:
            return ()
        return tuple(
            x.new_zeros(x.shape[_SEQ], *x.shape[:_SEQ], x.shape[-1]).movedim(0, _SEQ) for x in part
        )

    def end(self, rows: Range, share: tuple[Tensor, ...]) -> None:
        """Send the share of a part, and take what came of the one before."""
        self.drop()
        if share:
            given = [x.movedim(_SEQ, 0) for x in share]
            self._sent = rows, scatter_seq_given(given, self._group, seq_dim=0)

    def drop(self) -> None:
        """Take what is in flight."""
        if self._sent is not None:
            (rows, handle), self._sent = self._sent, None
            for shard, summed in zip(self._shards, handle.wait(), strict=True):
                rows_of(shard, rows).copy_(summed.movedim(0, _SEQ))
