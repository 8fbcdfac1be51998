"""The device of a rank: chosen before anything is initialised, timed by its own clock."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

__all__ = ["Device"]

BACKENDS = {"cpu-gloo": ("cpu", "gloo"), "cuda-nccl": ("cuda", "nccl"), "npu-hccl": ("npu", "hccl")}
MIB = 2**20


class Device:
    """The device of this rank, set as torch's current one.

    Attributes:
        type: ``"cpu"``, ``"cuda"`` or ``"npu"``.
        collectives: torch's name of the backend.
        device: With its index.
    """

    def __init__(self, backend: str, local_rank: int) -> None:
        self.type, self.collectives = BACKENDS[backend]
        if self.type == "npu":
            import_module("torch_npu")  # registers the device
        self._module: Any = None if self.type == "cpu" else getattr(torch, self.type)
        self.device = torch.device("cpu" if self.type == "cpu" else f"{self.type}:{local_rank}")
        if self._module is not None:
            self._module.set_device(self.device)
        self._before = 0

    def synchronize(self) -> None:
        """Wait until the device has done all of its work."""
        if self._module is not None:
            self._module.synchronize()

    def clock(self) -> Callable[[], list[float]]:
        """Return a function to call at the start, in between and at the end.

        Its last call waits for the device; each returns the milliseconds since the first call, as
        far as they are known, of all calls before.
        """
        if self._module is None:
            times: list[float] = []

            def tick() -> list[float]:
                times.append(time.perf_counter())
                return [1e3 * (now - times[0]) for now in times[1:]]

            return tick
        events: list[Any] = []

        def mark() -> list[float]:
            event = self._module.Event(enable_timing=True)
            event.record()
            events.append(event)
            if len(events) < 3:
                return []
            event.synchronize()
            return [events[0].elapsed_time(later) for later in events[1:]]

        return mark

    def watch_memory(self) -> None:
        """Begin to watch the peak of memory."""
        if self._module is not None:
            self._module.reset_peak_memory_stats()
            self._before = self._module.memory_allocated()
            return
        with suppress(OSError, AttributeError):  # freed memory back to the system (glibc)
            ctypes.CDLL(None).malloc_trim(0)
        with suppress(OSError):  # not every container lets a process reset its peak
            Path("/proc/self/clear_refs").write_text("5")
        self._before = _status("VmRSS")

    def peak_memory(self) -> int:
        """Return the largest bytes held since `watch_memory`, beyond those held then."""
        if self._module is not None:
            return int(self._module.max_memory_allocated()) - self._before
        return max(0, _status("VmHWM") - self._before)


def _status(key: str) -> int:
    """Return a number of this process's status in bytes; 0 where the system has none."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == key:
                return int(rest.split()[0]) * 1024
    return 0


def local_rank() -> int:
    """Return this rank's number on its node."""
    return int(os.environ["LOCAL_RANK"])
