"""Collectives for sequence parallelism that return handles and carry gradients.

Names are resolved when they are first used, so ``import hp_comm`` needs neither torch nor a device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hp_comm.agreement import preflight
    from hp_comm.collectives import exchange_head_tail, gather_seq, head_to_seq, seq_to_head
    from hp_comm.counters import Traffic, TrafficRecord, traffic
    from hp_comm.handle import Handle
    from hp_comm.sequence import count_tokens, global_loss, unshard_sequence

__all__ = [
    "Handle",
    "Traffic",
    "TrafficRecord",
    "count_tokens",
    "exchange_head_tail",
    "gather_seq",
    "global_loss",
    "head_to_seq",
    "preflight",
    "seq_to_head",
    "traffic",
    "unshard_sequence",
]

_HOMES = {
    "Handle": "handle",
    "Traffic": "counters",
    "TrafficRecord": "counters",
    "count_tokens": "sequence",
    "exchange_head_tail": "collectives",
    "gather_seq": "collectives",
    "global_loss": "sequence",
    "head_to_seq": "collectives",
    "preflight": "agreement",
    "seq_to_head": "collectives",
    "traffic": "counters",
    "unshard_sequence": "sequence",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"hp_comm.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
