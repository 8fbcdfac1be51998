"""A process that ends right after a collective over gloo must not be aborted for it.

A worker thread of gloo frees the tensors of a collective shortly after the waiting thread goes on,
and needs the interpreter for that. Once the interpreter ends, the thread that asks for it is killed
inside a destructor, and the process with it: "terminate called without an active exception",
SIGABRT, and torchrun calls the job failed (https://github.com/pytorch/pytorch/issues/190489, seen
with torch 2.13 in one job of twenty-five). ``destroy_process_group`` joins those threads only where
nothing holds the group any more, and DTensor's caches hold it.
"""

from __future__ import annotations

import atexit
import functools
import time

__all__ = ["wait_for_gloo_at_exit"]

PAUSE_S = 0.1
"""A waiting thread takes the interpreter within microseconds; the rest is for a loaded machine."""


@functools.cache
def wait_for_gloo_at_exit() -> None:
    """Leave the interpreter to gloo's threads for a moment before this process ends; once."""
    atexit.register(time.sleep, PAUSE_S)
