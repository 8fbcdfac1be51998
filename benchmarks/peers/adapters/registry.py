"""All contenders: ours, what none can beat, then the peers."""

from __future__ import annotations

import torch.distributed as dist

from peers import limits, ours
from peers.adapters import (
    colossalai_ulysses,
    deepspeed_ulysses,
    ring_flash,
    ringmaster_cp,
    torch_ring,
    verl_ulysses,
    yunchang_ulysses,
)
from peers.cases import Case
from peers.contender import Attention, Contender

__all__ = ["CONTENDERS", "build", "find"]

CONTENDERS: tuple[Contender, ...] = (
    *ours.CONTENDERS,
    *limits.CONTENDERS,
    *deepspeed_ulysses.CONTENDERS,
    *verl_ulysses.CONTENDERS,
    *yunchang_ulysses.CONTENDERS,
    *colossalai_ulysses.CONTENDERS,
    *ringmaster_cp.CONTENDERS,
    *torch_ring.CONTENDERS,
    *ring_flash.CONTENDERS,
)


def find(name: str) -> Contender:
    """Return the contender of that name."""
    return next(contender for contender in CONTENDERS if contender.name == name)


def build(name: str, case: Case) -> Attention:
    """Make the attention of a contender over all ranks; every rank calls it."""
    group = dist.group.WORLD
    assert group is not None, "the pool has made the default group"
    return find(name).build(case, group)
