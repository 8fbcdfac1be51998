"""What chance decides for a moment, asked again: until it holds, or for long enough to say no.

After a wait has returned, gloo's thread may hold the tensors of the collective for another moment,
however long a busy machine makes that. Nobody can wait for it; what a test says of memory must not
depend on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from hp_mesh.testing.memory import peak_memory

__all__ = ["eventually", "everywhere", "least_peak"]


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Return True as soon as ``condition()`` holds, False if it never does within ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


def everywhere(holds: bool) -> bool:
    """Return whether something holds on every rank of the default group, which all call this."""
    missing = torch.tensor(int(not holds))
    dist.all_reduce(missing)
    return not missing.item()


def least_peak(call: Callable[[], object], limit: float, *, tries: int = 60) -> int:
    """Return the least `peak_memory` of some calls, their results included, in bytes.

    Every rank of the default group calls this, and all make the same number of calls: until each
    has found one within its limit.

    Args:
        call: What is measured.
        limit: Bytes that are expected at most.
        tries: Calls after which nobody has to expect it any more.
    """
    peaks: list[int] = []
    while len(peaks) < tries:
        with peak_memory() as memory:
            result = call()
        del result
        peaks.append(memory.peak)
        if everywhere(min(peaks) <= limit):
            break
    return min(peaks)
