"""Sums over the ranks, for what each of them computed a share of.

====================  ==================================  ======================================
function              result                              backward
====================  ==================================  ======================================
`scatter_seq`         this rank's rows of the sum         one all-gather
`scatter_seq_given`   the same, later                     none: for code that is backward itself
`sum_shares`          the sum, the same on all ranks      nothing: each rank goes on with its
                                                          share
====================  ==================================  ======================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_comm import _torch, arguments, cuts
from hp_comm.autograd import run
from hp_comm.counters import record
from hp_comm.failures import Naming
from hp_comm.handle import Handle
from hp_comm.transfers import ReduceScatter
from hp_mesh.sequence import Order

__all__ = ["scatter_seq", "scatter_seq_given", "sum_shares", "summed"]


def scatter_seq(
    x: Tensor, group: ProcessGroup, *, seq_dim: int, order: Order = "contiguous"
) -> Tensor:
    """Sum ``x`` over the ranks and return this rank's rows of the sum: what mirrors `gather_seq`.

    Args:
        x: ``[B, S, H, D]``, this rank's share of a sum.
        group: The ``P`` ranks.
        seq_dim: Dim of ``x`` that holds the sequence.
        order: Which rows are this rank's, as in `gather_seq`; ``x`` is in natural order.

    Returns:
        ``[B, S/P, H, D]``, summed in the dtype of ``x``.
    """
    where = "scatter_seq"
    arguments.require_tensor(where, "x", x)
    arguments.require_addable(where, x)
    size, _ = arguments.group_of(where, group)
    dim = arguments.one_dim(where, x.shape, "seq_dim", seq_dim)
    arguments.require_order(where, order)
    if order == "head_tail":
        cut = cuts.chunks_of_ranks(where, x.shape[dim], dim, None, size)
    else:
        cut = cuts.rows_to_ranks(where, x.shape, dim, None, size)
    if size == 1:
        return x
    return run(ReduceScatter(where, group, (cut,), (tuple(x.shape),)), [x])[0]


def scatter_seq_given(
    xs: Sequence[Tensor], group: ProcessGroup, *, seq_dim: int
) -> Handle[tuple[Tensor, ...]]:
    """Start to sum tensors over the ranks; `Handle.wait` returns this rank's rows of the sums.

    Args:
        xs: ``[S, B, H, D]`` each, this rank's shares of sums; given away: what is dense and has its
            rows first is sent where it lies, so nobody may write to it. They get no gradients.
        group: The ``P`` ranks.
        seq_dim: Dim of ``xs`` that holds the sequence.

    Returns:
        A handle of ``[S/P, B, H, D]`` each, summed in the dtype of the tensor.
    """
    where = "scatter_seq_given"
    size, _ = arguments.group_of(where, group)
    given = [x.detach() for x in xs]
    if size == 1:
        return Handle.ready(where, tuple(given))
    shapes = tuple(tuple(x.shape) for x in given)
    dims = [arguments.one_dim(where, shape, "seq_dim", seq_dim) for shape in shapes]
    parts = tuple(
        cuts.rows_to_ranks(where, x.shape, dim, None, size)
        for x, dim in zip(given, dims, strict=True)
    )
    pending = ReduceScatter(where, group, parts, shapes).start_given(given)
    return Handle(where, pending, pending.finish)


def summed(where: str, x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of ``x`` over the ranks, outside autograd; one all-reduce."""
    size, total = _torch.group_size(group), x.detach().clone()
    if size > 1:
        record("all_reduce", size, 2 * total.numel() * total.element_size() * (size - 1) // size)
        with Naming(where, "all_reduce", group):
            _torch.sum_over_ranks(total, group)
    return total


class _SumShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return summed("sum_shares", x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def sum_shares(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum ``x`` over the ranks; each rank's gradient stays the gradient of its own share.

    For a loss that all ranks call ``backward`` on and whose parameter gradients are summed over the
    ranks afterwards, as FSDP does.

    Args:
        x: This rank's share, any shape, the same on all ranks.
        group: The ranks.

    Returns:
        The sum, in the dtype of ``x``. Backward sends nothing.
    """
    where = "sum_shares"
    arguments.require_tensor(where, "x", x)
    arguments.require_addable(where, x)
    size, _ = arguments.group_of(where, group)
    if size == 1:
        return x
    return cast(Tensor, cast(Any, _SumShares).apply(x, group))
