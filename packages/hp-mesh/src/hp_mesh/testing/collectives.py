"""Count the collectives that really run, whoever starts them.

A dispatch mode sees every spelling: ``dist.*`` (sync or async, ``*_tensor`` and ``*_single``,
lists), functional collectives, DTensor, FSDP2, p2p alone or batched. It counts for its own thread;
backward on CPU runs in the calling thread, so one ``with`` covers forward and backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

from hp_mesh.testing._watch import Watch, tensors_in

__all__ = ["Collective", "count_collectives"]

_KINDS = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "send": "p2p",
    "isend": "p2p",
    "batch_p2p_ops": "p2p",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
    "scatter_": "scatter",
    "gather_": "gather",
    "reduce_": "reduce",
}
_SILENT = {
    "recv_",
    "recv_any_source_",
    "irecv",
    "wait_tensor",
    "check_for_nan",
    "_wrap_tensor_autograd",
    "mesh_get_process_group",
}
"""Ops of the same namespaces that send nothing."""
_NAMESPACES = {"c10d", "_c10d_functional", "_dtensor"}
# which argument holds what this rank contributes; the first one where it isn't said
_INPUT_AT = {
    "_allgather_base_": 1,
    "allgather_": 1,
    "allgather_coalesced_": 1,
    "allgather_into_tensor_coalesced_": 1,
    "_reduce_scatter_base_": 1,
    "reduce_scatter_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
    "alltoall_": 1,
    "alltoall_base_": 1,
    "scatter_": 1,
    "gather_": 1,
    "batch_p2p_ops": 3,
}


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective as this rank took part in it.

    Attributes:
        kind: ``"all_to_all"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, ``"p2p"``
            (a send; receives are not counted), ``"broadcast"``, ``"barrier"``, ``"preflight"``
            (an all-gather of bytes), or one of ``"scatter"``, ``"gather"``, ``"reduce"``.
        op: The operator as torch names it, ``"c10d::alltoall_base_"``.
        dtype: Dtype of what is sent.
        group_size: Number of ranks that take part.
        bytes_sent: Bytes that leave this rank, its own share excluded: an all-gather sends its
            shard to ``P-1`` peers, a reduce-scatter ``P-1`` of its ``P`` parts, an all-reduce
            both one after the other, an all-to-all all but the part that stays.
        ranks: Global ranks of the group, so that axes of a mesh can be told apart.
    """

    kind: str
    op: str
    dtype: torch.dtype | None
    group_size: int
    bytes_sent: int
    ranks: tuple[int, ...] = ()


class count_collectives(Watch):  # type: ignore[no-untyped-call]
    """Record the collectives of the block; the object is also the context manager's value.

    Example::

        with count_collectives() as counted:
            y = module(x)
            y.sum().backward()
        assert counted.count("all_to_all") == 4
    """

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Collective] = []

    def count(self, kind: str | None = None) -> int:
        """Return how many collectives of ``kind`` ran; of every kind but preflight for None."""
        return len(self._of(kind))

    def bytes(self, kind: str | None = None) -> int:
        """Return the bytes that left this rank in collectives of ``kind``."""
        return sum(record.bytes_sent for record in self._of(kind))

    def summary(self) -> dict[str, int]:
        """Return ``{kind: count}`` of the kinds that ran, preflight left out, sorted by kind."""
        return dict(sorted(Counter(record.kind for record in self._of(None)).items()))

    def _of(self, kind: str | None) -> list[Collective]:
        if kind is None:
            return [record for record in self.records if record.kind != "preflight"]
        return [record for record in self.records if record.kind == kind]

    def before(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Any) -> None:
        """Record the operator if it is a collective."""
        if func.namespace in _NAMESPACES:
            name = func._schema.name.partition("::")[2]
            if name not in _SILENT:
                self.records.append(_describe(func._schema.name, name, args))


def _describe(op: str, name: str, args: tuple[Any, ...]) -> Collective:
    if name not in _KINDS:
        raise NotImplementedError(f"count_collectives: no kind is known for {op}")
    kind = _KINDS[name]
    group = _group(args)
    size = group.size()
    tensors = list(tensors_in(args[_INPUT_AT.get(name, 0)]))
    dtype = tensors[0].dtype if tensors else None
    if kind == "all_gather" and dtype == torch.uint8:
        kind = "preflight"
    ranks = tuple(dist.get_process_group_ranks(group))
    return Collective(kind, op, dtype, size, _bytes_sent(name, kind, args, tensors, group), ranks)


def _group(args: Sequence[Any]) -> dist.ProcessGroup:
    """Find the group among the arguments: an object for c10d, a name for functional ones."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg)
        if isinstance(arg, dist.ProcessGroup):
            return arg
    found: dist.ProcessGroup = _resolve_process_group(args[-1])
    return found


def _bytes_sent(
    name: str, kind: str, args: Sequence[Any], tensors: Sequence[Tensor], group: dist.ProcessGroup
) -> int:
    size, rank = group.size(), group.rank()
    total = sum(t.numel() * t.element_size() for t in tensors)
    match kind:
        case "all_gather" | "preflight":
            return total * (size - 1)
        case "reduce_scatter":
            return total * (size - 1) // size
        case "all_reduce":
            return 2 * total * (size - 1) // size
        case "all_to_all":
            return total - _stays(name, args, tensors, rank, size)
        case "p2p":
            if name != "batch_p2p_ops":
                return total
            sent = [t for way, t in zip(args[0], tensors, strict=True) if way == "isend"]
            return sum(t.numel() * t.element_size() for t in sent)
        case "broadcast":
            return total * (size - 1) if rank == args[2 if name == "broadcast_" else 1] else 0
        case "scatter":
            return total * (size - 1) // size
        case "gather" | "reduce":
            return 0 if rank == args[3] else total
    return 0


def _stays(name: str, args: Sequence[Any], tensors: Sequence[Tensor], rank: int, size: int) -> int:
    """Return the bytes of an all-to-all that a rank sends to itself."""
    if name == "alltoall_":
        return tensors[rank].numel() * tensors[rank].element_size()
    x = tensors[0]
    splits = {"alltoall_base_": 4, "all_to_all_single": 2}.get(name)
    sent: Sequence[int] = args[splits] if splits is not None else ()
    if not sent:
        return x.numel() * x.element_size() // size
    row = x.numel() // x.shape[0] if x.shape[0] else 0
    return sent[rank] * row * x.element_size()
