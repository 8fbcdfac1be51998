"""Torch's collectives in the spelling that the installed torch prefers.

torch 2.13 renames ``all_gather_into_tensor`` and ``reduce_scatter_tensor`` to ``*_single`` and
warns on every call of the old names; older and vendor builds know only those. This is the one file
that cares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

__all__ = [
    "all_gather",
    "all_to_all",
    "group_device",
    "group_rank",
    "group_size",
    "is_known",
    "is_plain_gloo",
    "reduce_scatter",
    "sum_over_ranks",
    "swap",
    "trade",
]

Work = Any  # dist.Work: absent from the public stubs

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_size(group: ProcessGroup) -> int:
    """Return the number of ranks ``P`` in ``group``."""
    return dist.get_world_size(group)


def group_rank(group: ProcessGroup) -> int:
    """Return this rank's place in ``group``."""
    return dist.get_rank(group)


_UNKNOWN = (torch.int16, torch.uint16, torch.uint32, torch.uint64)


def is_known(dtype: torch.dtype) -> bool:
    """Say whether backends know ``dtype``: neither these integers nor 8-bit floats."""
    return dtype not in _UNKNOWN and not (dtype.is_floating_point and dtype.itemsize == 1)


def _as_bytes(x: Tensor) -> Tensor:
    # moving bytes does not need to know what they are
    return x if is_known(x.dtype) else x.view(torch.uint8)


def all_to_all(
    output: Tensor,
    input: Tensor,
    output_sizes: Sequence[int] | None,
    input_sizes: Sequence[int] | None,
    group: ProcessGroup,
    *,
    async_op: bool,
) -> Work | None:
    """Exchange flat dense buffers; sizes in elements, None for equal parts."""
    sent = _as_bytes(input)
    unit = input.itemsize // sent.itemsize
    return dist.all_to_all_single(
        _as_bytes(output),
        sent,
        None if output_sizes is None else [n * unit for n in output_sizes],
        None if input_sizes is None else [n * unit for n in input_sizes],
        group=group,
        async_op=async_op,
    )


def all_gather(
    output: Tensor, input: Tensor, group: ProcessGroup, *, async_op: bool
) -> Work | None:
    """Gather flat dense buffers of one size on dim 0."""
    return _all_gather(_as_bytes(output), _as_bytes(input), group=group, async_op=async_op)


def reduce_scatter(
    output: Tensor,
    input: Tensor,
    group: ProcessGroup,
    *,
    async_op: bool,
) -> Work | None:
    """Sum flat dense buffers over ranks, in their dtype, and keep this rank's part."""
    return _reduce_scatter(output, input, op=dist.ReduceOp.SUM, group=group, async_op=async_op)


def sum_over_ranks(x: Tensor, group: ProcessGroup) -> None:
    """Add ``x`` over the ranks of ``group``, in place."""
    dist.all_reduce(x, op=dist.ReduceOp.SUM, group=group)


def swap(output: Tensor, input: Tensor, peer: int, group: ProcessGroup) -> list[Work]:
    """Start sending ``input`` to rank ``peer`` of ``group`` and receiving ``output`` from it.

    Wait for every work that comes back: gloo returns one per operation, HCCL one for the batch.
    """
    return dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, _as_bytes(input), group=group, group_peer=peer),
            dist.P2POp(dist.irecv, _as_bytes(output), group=group, group_peer=peer),
        ]
    )


def trade(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], group: ProcessGroup
) -> list[Work]:
    """Start a batch of messages: ``(dense buffer, rank of group)`` for each way, or none at all."""
    ops = [
        dist.P2POp(way, _as_bytes(buffer), group=group, group_peer=peer)
        for way, messages in ((dist.isend, sends), (dist.irecv, receives))
        for buffer, peer in messages
    ]
    return dist.batch_isend_irecv(ops) if ops else []


def is_plain_gloo(group: ProcessGroup) -> bool:
    """Say whether ``group`` talks gloo and nothing else."""
    return str(dist.get_backend(group)) == "gloo"


def group_device(group: ProcessGroup) -> torch.device:
    """Return a device that a small buffer can travel from: the CPU if the group serves it."""
    types = {device.type for device in getattr(group, "_device_types", [])}
    if not types or "cpu" in types:
        return torch.device("cpu")
    kind = sorted(types)[0]
    return torch.device(kind, torch.get_device_module(kind).current_device())
