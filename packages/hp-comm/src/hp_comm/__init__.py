"""Collectives for sequence parallelism that return handles and carry gradients.

Names are resolved when they are first used, so ``import hp_comm`` needs neither torch nor a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_mesh.lazy import lazy_names

if TYPE_CHECKING:
    from hp_comm.agreement import preflight
    from hp_comm.collectives import gather_seq, head_to_seq, seq_to_head
    from hp_comm.counters import Traffic, TrafficRecord, traffic
    from hp_comm.failures import CollectiveError
    from hp_comm.halo import fetch_rows
    from hp_comm.handle import Handle
    from hp_comm.head_tail import exchange_head_tail, merge_head_tail, split_head_tail
    from hp_comm.kernels.arithmetic import HeadWork
    from hp_comm.reductions import scatter_seq, sum_shares
    from hp_comm.sequence import count_tokens, global_loss, unshard_sequence

__all__ = [
    "CollectiveError",
    "Handle",
    "HeadWork",
    "Traffic",
    "TrafficRecord",
    "count_tokens",
    "exchange_head_tail",
    "fetch_rows",
    "gather_seq",
    "global_loss",
    "head_to_seq",
    "merge_head_tail",
    "preflight",
    "scatter_seq",
    "seq_to_head",
    "split_head_tail",
    "sum_shares",
    "traffic",
    "unshard_sequence",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "CollectiveError": "hp_comm.failures",
        "Handle": "hp_comm.handle",
        "HeadWork": "hp_comm.kernels.arithmetic",
        "Traffic": "hp_comm.counters",
        "TrafficRecord": "hp_comm.counters",
        "count_tokens": "hp_comm.sequence",
        "exchange_head_tail": "hp_comm.head_tail",
        "fetch_rows": "hp_comm.halo",
        "gather_seq": "hp_comm.collectives",
        "global_loss": "hp_comm.sequence",
        "head_to_seq": "hp_comm.collectives",
        "merge_head_tail": "hp_comm.head_tail",
        "preflight": "hp_comm.agreement",
        "scatter_seq": "hp_comm.reductions",
        "seq_to_head": "hp_comm.collectives",
        "split_head_tail": "hp_comm.head_tail",
        "sum_shares": "hp_comm.reductions",
        "traffic": "hp_comm.counters",
        "unshard_sequence": "hp_comm.sequence",
    },
)
