"""The exchanges of sequence parallelism among all ranks, on any strides, with gradients.

======================  ==========================================  ===========================
function                from -> to                                  backward
======================  ==========================================  ===========================
`seq_to_head`           ``[B, S/P, H, D]`` -> ``[B, S, H/P, D]``    one all-to-all, mirrored
`head_to_seq`           ``[B, S, H/P, D]`` -> ``[B, S/P, H, D]``    one all-to-all, mirrored
`gather_seq`            ``[B, S/P, H, D]`` -> ``[B, S, H, D]``      one reduce-scatter, summed
======================  ==========================================  ===========================

All dims are where ``seq_dim`` and ``head_dim`` say. Arguments are checked before anything is sent.
What every rank must say alike (``lengths``, ``heads``, dtypes, which tensors need gradients) is not
compared over ranks here: that is `hp_comm.preflight`'s task, once for a whole boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

from torch import Tensor
from torch.distributed import ProcessGroup

from hp_comm import arguments, cuts
from hp_comm.autograd import as_given, move_tensors
from hp_comm.handle import Handle
from hp_comm.kernels.arithmetic import HeadWork, prepare
from hp_comm.prepared import listed_works, prepared, weights_of
from hp_comm.transfers import Exchange, Gather
from hp_mesh.checks import require_divisible
from hp_mesh.sequence import Order

__all__ = ["Heads", "gather_seq", "head_to_seq", "seq_to_head"]

Heads = Sequence[Sequence[int]]
"""Per rank of the group, the positions on the head dim that it gets (or has)."""

Tensors = tuple[Tensor, ...]
Work = HeadWork | Sequence[HeadWork | None] | None


def _hashable(lengths: Sequence[int] | None) -> Sequence[int] | None:
    return tuple(lengths) if isinstance(lengths, list) else lengths


def _alone(where: str, results: Sequence[Tensor], *, single: bool, async_op: bool) -> Any:
    """Return what the only rank of a group has: nothing is sent."""
    value = as_given(results, single=single)
    return Handle.ready(where, value) if async_op else value


@overload
def seq_to_head(
    x: Tensor,
    group: ProcessGroup,
    *,
    seq_dim: int,
    head_dim: int,
    heads: Heads | None = ...,
    lengths: Sequence[int] | None = ...,
    dense: bool = ...,
    work: Work = ...,
    async_op: Literal[False] = ...,
) -> Tensor: ...
@overload
def seq_to_head(
    x: Tensor,
    group: ProcessGroup,
    *,
    seq_dim: int,
    head_dim: int,
    heads: Heads | None = ...,
    lengths: Sequence[int] | None = ...,
    dense: bool = ...,
    work: Work = ...,
    async_op: Literal[True],
) -> Handle[Tensor]: ...
@overload
def seq_to_head(
    x: Sequence[Tensor],
    group: ProcessGroup,
    *,
    seq_dim: int,
    head_dim: int,
    heads: Sequence[Heads | None] | None = ...,
    lengths: Sequence[int] | None = ...,
    dense: bool = ...,
    work: Work = ...,
    async_op: Literal[False] = ...,
) -> Tensors: ...
@overload
def seq_to_head(
    x: Sequence[Tensor],
    group: ProcessGroup,
    *,
    seq_dim: int,
    head_dim: int,
    heads: Sequence[Heads | None] | None = ...,
    lengths: Sequence[int] | None = ...,
    dense: bool = ...,
    work: Work = ...,
    async_op: Literal[True],
) -> Handle[Tensors]: ...
def seq_to_head(
    x: Tensor | Sequence[Tensor],
    group: ProcessGroup,
    *,
    seq_dim: int,
    head_dim: int,
    heads: Any = None,
    lengths: Sequence[int] | None = None,
    dense: bool = True,
    work: Work = None,
    async_op: bool = False,
) -> Any:
    """Trade the sequence shard for some of the heads of the whole sequence.

    Args:
        x: ``[B, S/P, H, D]``, or several such tensors. Tensors of one dtype travel in one
            all-to-all; their head counts and head sizes may differ.
        group: The ``P`` ranks.
        seq_dim: Dim of ``x`` that holds the sequence.
        head_dim: Dim of ``x`` that holds the heads.
        heads: Heads that each rank gets: ``heads[p]`` for a tensor, ``heads[t][p]`` for several
            (None for those that are cut evenly). A head may go to several ranks, which is how
            fewer KV heads than ranks are served, or to none. Default: consecutive equal parts.
        lengths: Local sequence lengths of the ranks. Default: all as long as this rank's.
        dense: Whether each result must be dense. If not, tensors that differ in their heads only
            come as slices of the one buffer that was received, rows first: no copy after the
            exchange, and the results share one storage.
        work: QK-norm and rotary embedding, done to this rank's rows while they are packed: a
            `HeadWork` for a tensor, a list with one, or None, each for several.
        async_op: Return a `Handle` and let the transfer overlap with what comes next.

    Returns:
        ``[B, S, H_r, D]`` for the ``H_r`` heads of this rank, in the order given; a tuple
        for several. Backward sends one all-to-all per dtype and sums the gradients of a head that
        went to several ranks.
    """
    where = "seq_to_head"
    xs, single = arguments.tensors_of(where, "x", x), isinstance(x, Tensor)
    size, rank = arguments.group_of(where, group)
    tables = arguments.head_tables(where, len(xs), heads, single=single)
    shapes = tuple(one.shape for one in xs)
    cut = cuts.sequence_to_heads(
        where, shapes, seq_dim, head_dim, tables, _hashable(lengths), size, rank, dense
    )
    works = listed_works(where, work, xs, head_dim, single=single)
    if size == 1:
        ready = [
            one if w is None else prepare(one, w)
            for one, w in zip(xs, works or [None] * len(xs), strict=True)
        ]
        places = [cuts.take(one, send) for one, send in zip(ready, cut.sends, strict=True)]
        return _alone(where, places, single=single, async_op=async_op)
    exchange = Exchange(where, group, **vars(cut))
    if works is None:
        return move_tensors(exchange, xs, single=single, async_op=async_op)
    move = prepared(exchange, works, seq_dim % xs[0].ndim)
    inputs = [*xs, *weights_of(works)]
    return move_tensors(move, inputs, single=single, async_op=async_op)


@overload
def head_to_seq(
    x: Tensor,
    group: ProcessGroup,
    *,
    seq_dim: int,
    head_dim: int,
    lengths: Sequence[int] | None = ...,
    heads: Heads | None = ...,
    async_op: Literal[False] = ...,
) -> Tensor: ...
@overload
def head_to_seq(
    x: Tensor,
    group: ProcessGroup,
    *,
    seq_dim: int,
    head_dim: int,
    lengths: Sequence[int] | None = ...,
    heads: Heads | None = ...,
    async_op: Literal[True],
) -> Handle[Tensor]: ...
@overload
def head_to_seq(
    x: Sequence[Tensor],
    group: ProcessGroup,
    *,
    seq_dim: int,
    head_dim: int,
    lengths: Sequence[int] | None = ...,
    heads: Sequence[Heads | None] | None = ...,
    async_op: Literal[False] = ...,
) -> Tensors: ...
@overload
def head_to_seq(
    x: Sequence[Tensor],
    group: ProcessGroup,
    *,
    seq_dim: int,
    head_dim: int,
    lengths: Sequence[int] | None = ...,
    heads: Sequence[Heads | None] | None = ...,
    async_op: Literal[True],
) -> Handle[Tensors]: ...
def head_to_seq(
    x: Tensor | Sequence[Tensor],
    group: ProcessGroup,
    *,
    seq_dim: int,
    head_dim: int,
    lengths: Sequence[int] | None = None,
    heads: Any = None,
    async_op: bool = False,
) -> Any:
    """Trade this rank's heads of the whole sequence for all heads of its sequence shard.

    Args:
        x: ``[B, S, H_r, D]``, or several such tensors; those of one dtype travel together.
        group: The ``P`` ranks.
        seq_dim: Dim of ``x`` that holds the sequence.
        head_dim: Dim of ``x`` that holds the heads.
        lengths: Sequence lengths that the ranks get. Default: ``S / P`` each.
        heads: Heads that each rank has, as in `seq_to_head`; each head on one rank. Default: as
            many on every rank, in rank order.
        async_op: Return a `Handle` and let the transfer overlap with what comes next.

    Returns:
        ``[B, S/P, H, D]``, dense; a tuple for several. Backward sends one all-to-all per dtype.
    """
    where = "head_to_seq"
    xs, single = arguments.tensors_of(where, "x", x), isinstance(x, Tensor)
    size, rank = arguments.group_of(where, group)
    tables = arguments.head_tables(where, len(xs), heads, single=single)
    shapes = tuple(one.shape for one in xs)
    cut = cuts.heads_to_sequence(
        where, shapes, seq_dim, head_dim, tables, _hashable(lengths), size, rank
    )
    if size == 1:
        places = [cuts.put_back(one, place) for one, place in zip(xs, cut.receives, strict=True)]
        return _alone(where, places, single=single, async_op=async_op)
    exchange = Exchange(where, group, **vars(cut))
    return move_tensors(exchange, xs, single=single, async_op=async_op)


@overload
def gather_seq(
    x: Tensor,
    group: ProcessGroup,
    *,
    seq_dim: int,
    lengths: Sequence[int] | None = ...,
    order: Order = ...,
    dense: bool = ...,
    async_op: Literal[False] = ...,
) -> Tensor: ...
@overload
def gather_seq(
    x: Tensor,
    group: ProcessGroup,
    *,
    seq_dim: int,
    lengths: Sequence[int] | None = ...,
    order: Order = ...,
    dense: bool = ...,
    async_op: Literal[True],
) -> Handle[Tensor]: ...
@overload
def gather_seq(
    x: Sequence[Tensor],
    group: ProcessGroup,
    *,
    seq_dim: int,
    lengths: Sequence[int] | None = ...,
    order: Order = ...,
    dense: bool = ...,
    async_op: Literal[False] = ...,
) -> Tensors: ...
@overload
def gather_seq(
    x: Sequence[Tensor],
    group: ProcessGroup,
    *,
    seq_dim: int,
    lengths: Sequence[int] | None = ...,
    order: Order = ...,
    dense: bool = ...,
    async_op: Literal[True],
) -> Handle[Tensors]: ...
def gather_seq(
    x: Tensor | Sequence[Tensor],
    group: ProcessGroup,
    *,
    seq_dim: int,
    lengths: Sequence[int] | None = None,
    order: Order = "contiguous",
    dense: bool = True,
    async_op: bool = False,
) -> Any:
    """Gather the whole sequence on every rank.

    Args:
        x: ``[B, S/P, H, D]``, or several such tensors: one all-gather each, all of them started
            before the first is waited for.
        group: The ``P`` ranks.
        seq_dim: Dim of ``x`` that holds the sequence.
        lengths: Local sequence lengths of the ranks. Default: all as long as this rank's. Unequal
            ones are padded to the longest on the wire.
        order: How the data lies on the ranks: consecutive shards, or head-tail (zigzag) pairs of
            chunks, which are put in the order of the sequence as they are unpacked.
        dense: Whether each result must be dense. If not, it is what arrived, rows first, without
            the copy that a batch in front of the sequence asks for. Head-tail data is copied once
            all the same, and dense.
        async_op: Return a `Handle` and let the transfer overlap with what comes next.

    Returns:
        ``[B, S, H, D]``; a tuple for several. Backward is one reduce-scatter each: the
        gradient of a shard is the *sum* of what all ranks found for it, in the gradient's dtype,
        never divided.
    """
    where = "gather_seq"
    xs, single = arguments.tensors_of(where, "x", x), isinstance(x, Tensor)
    size, rank = arguments.group_of(where, group)
    arguments.require_order(where, order)
    parts, shapes = [], []
    for one in xs:
        arguments.require_addable_gradient(where, one)
        s = arguments.one_dim(where, one.shape, "seq_dim", seq_dim)
        shape = list(one.shape)
        if order == "head_tail":
            require_divisible(where, f"local length (dim {s} of x)", shape[s], "2", 2)
            shape[s] *= size
            part = cuts.chunks_of_ranks(where, shape[s], s, lengths, size)
        else:
            part = cuts.lengths_of_ranks(where, one.shape, s, lengths, size, rank)
            shape[s] = sum(part.counts)
        parts.append(part)
        shapes.append(tuple(shape))
    if size == 1:
        return _alone(where, xs, single=single, async_op=async_op)
    gather = Gather(where, group, tuple(parts), tuple(shapes), not dense)
    return move_tensors(gather, xs, single=single, async_op=async_op)
