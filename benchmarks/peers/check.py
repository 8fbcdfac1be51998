"""One contender on one rank: is it right, what does it send, what does it keep for backward."""

from __future__ import annotations

import gc
import os
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hp_mesh.testing import count_collectives
from peers.adapters.registry import build, find
from peers.cases import Case
from peers.contender import Attention
from peers.oracle import TOLERANCE, Shard, differences, shard

__all__ = ["Findings", "check"]


@dataclass
class Findings:
    """What one rank found out about a contender.

    Attributes:
        status: ``"ok"``, ``"not run"`` (could not be built), ``"raises"`` or ``"wrong"``.
        reason: In words, if it is not ok.
        off: Largest relative differences to the oracle.
        sent: ``{"forward": {"count", "bytes", "preflight", kinds...}, "backward": ...}``.
        saved_bytes: Bytes of the storages that autograd keeps for backward, inputs included.
    """

    status: str = "ok"
    reason: str = ""
    off: dict[str, float] = field(default_factory=dict)
    sent: dict[str, dict[str, Any]] = field(default_factory=dict)
    saved_bytes: int = 0


def check(rank: int, name: str, case: Case, oracle: Path) -> dict[str, Any]:
    """Return the `Findings` of this rank as a dict; never raises."""
    os.environ["HP_PREFLIGHT"] = find(name).preflight
    found = Findings()
    try:
        attention = build(name, case)
    except Exception as problem:
        found.status, found.reason = "not run", _text(problem)
        return asdict(found)
    try:
        rows = shard(case, rank)
        output = attention(*rows.inputs)
        torch.autograd.backward(output, rows.upstream.to(output.dtype))
        found.off = differences(case, rank, rows, output, oracle)
        found.sent, found.saved_bytes = _count(attention, rows)
    except Exception as problem:
        found.status, found.reason = "raises", _text(problem)
        return asdict(found)
    finally:
        gc.collect()
    bad = {name: value for name, value in found.off.items() if not value <= TOLERANCE}
    if bad:
        found.status = "wrong"
        found.reason = ", ".join(f"{name} off by {value:.2g}" for name, value in bad.items())
        found.reason += " of its largest value"
    return asdict(found)


def _text(problem: Exception) -> str:
    first = next((line for line in str(problem).splitlines() if line.strip()), "")
    return f"{type(problem).__name__}: {first.strip()}"[:200]


def _count(attention: Attention, rows: Shard) -> tuple[dict[str, dict[str, Any]], int]:
    """Return what one step sends, by direction, and the bytes of all storages it saves.

    Not the first step, which may compare the ranks.
    """
    rows.clear()
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(x: Tensor) -> Tensor:
        local = x._local_tensor if isinstance(x, DTensor) else x
        storage = local.untyped_storage()
        storages[storage.data_ptr()] = storage  # held, so that no address is used twice
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    with count_collectives() as forward, hooks:
        output = attention(*rows.inputs)
    with count_collectives() as backward:
        torch.autograd.backward(output, rows.upstream)
    sent = {
        way: {
            "count": seen.count(),
            "bytes": seen.bytes(),
            "kinds": seen.summary(),
            "preflight": Counter(record.kind for record in seen.records)["preflight"],
        }
        for way, seen in (("forward", forward), ("backward", backward))
    }
    return sent, sum(storage.nbytes() for storage in storages.values())
