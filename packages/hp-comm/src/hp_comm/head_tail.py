"""Balance of causal work by halves: a rank's head, and the tail of its mirror rank, there and back.

======================  ============================================  ========================
function                from -> to                                    backward
======================  ============================================  ========================
`exchange_head_tail`    a tensor -> the mirror rank's                 the same swap
`split_head_tail`       ``[B, S/P, ..]`` -> head, the mirror's tail   `merge_head_tail`
`merge_head_tail`       head, the mirror's tail -> ``[B, S/P, ..]``   `split_head_tail`
======================  ============================================  ========================

A split cuts a tensor where it lies and copies only the half that travels; a merge, which is also
the gradient of a split, lays both halves into one tensor by one `pack`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast, overload

from torch import Tensor
from torch.distributed import ProcessGroup

from hp_comm import arguments
from hp_comm.autograd import move_tensors, run
from hp_comm.handle import Handle
from hp_comm.kernels.ops import pack
from hp_comm.moves import Move, Pending, Transfer
from hp_comm.transfers import Swap
from hp_mesh.checks import require, require_divisible
from hp_mesh.window import mirror_rank

__all__ = ["exchange_head_tail", "merge_head_tail", "split_head_tail"]


@overload
def exchange_head_tail(
    x: Tensor, group: ProcessGroup, *, async_op: Literal[False] = ...
) -> Tensor: ...
@overload
def exchange_head_tail(
    x: Tensor, group: ProcessGroup, *, async_op: Literal[True]
) -> Handle[Tensor]: ...
def exchange_head_tail(x: Tensor, group: ProcessGroup, *, async_op: bool = False) -> Any:
    """Swap a tensor with the mirror rank: rank ``r`` and rank ``P - 1 - r`` trade theirs.

    Args:
        x: What this rank gives away, of one shape and dtype on all ranks.
        group: The ``P`` ranks. With an odd ``P`` the middle rank is its own mirror: no send.
        async_op: Return a `Handle` and let the transfer overlap with what comes next.

    Returns:
        The mirror's tensor, dense; ``x`` itself on a rank that is its own mirror. Backward is the
        same swap.
    """
    where = "exchange_head_tail"
    arguments.require_tensor(where, "x", x)
    size, rank = arguments.group_of(where, group)
    mirror = mirror_rank(rank, size)
    if mirror == rank:
        return Handle.ready(where, x) if async_op else x
    return move_tensors(Swap(where, group, mirror), [x], single=True, async_op=async_op)


def split_head_tail(
    x: Tensor, group: ProcessGroup, *, seq_dim: int, trade: bool = True
) -> tuple[Tensor, Tensor]:
    """Cut this rank's rows into halves and trade the second one with the mirror rank.

    Args:
        x: ``[B, S/P, H, D]``, or any shape with the sequence in ``seq_dim``; an even length there.
        group: The ``P`` ranks.
        seq_dim: Dim of ``x`` that holds the sequence.
        trade: Whether tails are traded; not where the data itself lies in head-tail order.

    Returns:
        ``[B, S/2P, H, D]`` twice: this rank's head, a view of ``x``, and the tail of the mirror
        rank, dense; a view where nothing is traded. Backward is `merge_head_tail`.
    """
    where = "split_head_tail"
    arguments.require_tensor(where, "x", x)
    dim = arguments.one_dim(where, x.shape, "seq_dim", seq_dim)
    require_divisible(where, f"local length (dim {dim} of x)", x.shape[dim], "2", 2)
    return cast(
        tuple[Tensor, Tensor], run(Split(where, group, dim, _peer(where, group, trade)), [x])
    )


def merge_head_tail(
    head: Tensor, tail: Tensor, group: ProcessGroup, *, seq_dim: int, trade: bool = True
) -> Tensor:
    """Give the mirror rank its tail back and put this rank's rows together: undo a split.

    Args:
        head: ``[B, S/2P, H, D]``, what became of this rank's head.
        tail: What became of the mirror's tail, of the same shape and dtype.
        group: The ``P`` ranks.
        seq_dim: Dim of both that holds the sequence.
        trade: As in `split_head_tail`.

    Returns:
        ``[B, S/P, H, D]``, dense. Backward is `split_head_tail`.
    """
    where = "merge_head_tail"
    arguments.require_tensor(where, "head", head)
    arguments.require_tensor(where, "tail", tail)
    dim = arguments.one_dim(where, head.shape, "seq_dim", seq_dim)
    require(
        head.shape == tail.shape and head.dtype == tail.dtype,
        where,
        f"tail ({tuple(tail.shape)}, {tail.dtype}) must have the shape and dtype of head "
        f"({tuple(head.shape)}, {head.dtype})",
    )
    return run(Merge(where, group, dim, _peer(where, group, trade)), [head, tail])[0]


def _peer(where: str, group: ProcessGroup, trade: bool) -> int | None:
    """Return the rank to trade with, or None."""
    size, rank = arguments.group_of(where, group)
    mirror = mirror_rank(rank, size)
    return mirror if trade and mirror != rank else None


@dataclass(frozen=True)
class Split(Move):
    """One tensor -> its head, and the peer's tail; without a peer its own."""

    seq_dim: int
    peer: int | None

    def mirror(self, needed: Sequence[int]) -> Merge:
        """Put the gradients of both halves together, whichever of them there are."""
        return Merge(self.where, self.group, self.seq_dim, self.peer)

    def results(self, needed: Sequence[int]) -> Sequence[int]:
        """Both halves have a gradient if the tensor wants one."""
        return (0, 1) if needed else ()

    def start(self, xs: Sequence[Tensor], *, overlap: bool) -> Pending:
        """Launch the swap of the tail."""
        (x,), half = xs, xs[0].size(self.seq_dim) // 2
        head, tail = (x.narrow(self.seq_dim, start, half) for start in (0, half))
        here = Transfer(nullcontext(), [], None, lambda: [head])
        return Pending([((0,), here), ((1,), _traded(self, tail, overlap))])


@dataclass(frozen=True)
class Merge(Move):
    """Two halves -> one tensor; the second half is the peer's, if there is one."""

    seq_dim: int
    peer: int | None

    def mirror(self, needed: Sequence[int]) -> Split:
        """Take the gradient apart again."""
        return Split(self.where, self.group, self.seq_dim, self.peer)

    def results(self, needed: Sequence[int]) -> Sequence[int]:
        """The whole has a gradient if a half wants one."""
        return (0,) if needed else ()

    def gradients(
        self, arrived: Sequence[Tensor], kept: Sequence[Tensor], needed: Sequence[int]
    ) -> Sequence[Tensor]:
        """Return the halves that are wanted: the peer's takes part whether or not ours is."""
        return [arrived[t] for t in needed]

    def start(self, xs: Sequence[Tensor], *, overlap: bool) -> Pending:
        """Launch the swap of the tail."""
        head, tail = xs
        transfer = _traded(self, tail, overlap)
        arrived = transfer.finish

        def finish() -> list[Tensor]:
            return [_side_by_side(head, arrived()[0], self.seq_dim)]

        transfer.finish = finish
        return Pending([((0,), transfer)])


def _traded(move: Split | Merge, tail: Tensor, overlap: bool) -> Transfer:
    """Start to trade ``tail`` for the peer's."""
    if move.peer is None:
        return Transfer(nullcontext(), [], None, lambda: [tail])
    return Swap(move.where, move.group, move.peer).transfer(tail, overlap=overlap)


def _side_by_side(head: Tensor, tail: Tensor, dim: int) -> Tensor:
    """Return both along ``dim`` in one dense tensor."""
    shape = list(head.shape)
    first = shape[0]
    shape[dim] *= 2
    # one part of all rows; along another dim than the first, both lie in it side by side
    joined = [0, dim] if dim else []
    return pack([head, tail], [0, 0], [first, first], [], joined).view(shape)
