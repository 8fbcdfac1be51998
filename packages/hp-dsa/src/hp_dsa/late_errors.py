"""What is found wrong on an accelerator, told later and without waiting for it.

To raise what a tensor on a device holds, the host has to wait until the device is there. The first
call of a boundary waits, so that a wrong program fails where it is wrong and on all ranks. Later
calls leave a flag on its way to the host; the next call that finds it there raises, on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hp_mesh.checks import fail

__all__ = ["LateErrors"]


@dataclass(frozen=True, slots=True)
class _Flag:
    arrived: Tensor  # on the host, a bool
    event: Any  # None where nothing is to be waited for
    where: str
    problem: str
    way_out: str

    def is_here(self) -> bool:
        return self.event is None or bool(self.event.query())


@dataclass(eq=False)
class LateErrors:
    """The flags of one boundary that are on their way."""

    _flags: list[_Flag] = field(default_factory=list)

    def watch(self, wrong: Tensor, where: str, problem: str, way_out: str) -> None:
        """Remember to raise if ``wrong``, a bool of no dims on a device, turns out to be true."""
        event = None
        if wrong.device.type == "cpu":
            arrived = wrong.clone()
        else:
            arrived = torch.empty((), dtype=torch.bool, pin_memory=True)
            arrived.copy_(wrong, non_blocking=True)
            event = torch.Event(wrong.device)
            event.record()
        self._flags.append(_Flag(arrived, event, where, problem, way_out))

    def check(self) -> None:
        """Raise what has arrived; what has not is looked at in the next call.

        Raises:
            ValueError: Of the earliest call that was wrong.
        """
        here = [flag for flag in self._flags if flag.is_here()]
        self._flags = [flag for flag in self._flags if not any(flag is one for one in here)]
        for flag in here:
            if bool(flag.arrived):
                self._flags.clear()
                raise fail(f"{flag.where} (an earlier call)", flag.problem, flag.way_out)
