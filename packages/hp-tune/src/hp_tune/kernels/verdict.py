"""What a judge says of a launch, and of itself: plain data, which crosses processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from hp_tune.kernels.devices import Asked, Family
from hp_tune.kernels.shapes import Shape

__all__ = ["STOP", "Facts", "Judge", "Mode", "Number", "Verdict"]

Mode = Literal["check", "compile", "measure"]
"""Interpreted for correctness; compiled and modelled; run and timed."""

Number = bool | float | int | str

STOP = 0.9
"""Share of the copy bandwidth at which there is nothing left to win."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Where launches are judged.

    Attributes:
        name: The device as launch configs name it.
        family: Of the device.
        description: Its maker's name.
        cores: Vector cores of an Ascend, else 0.
        versions: Of all that has a part in the numbers.
    """

    name: str
    family: Family
    description: str
    cores: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one launch.

    Attributes:
        state: ``pruned`` was not tried, ``failed`` was tried and is no launch config.
        ms: Time of a call, measured or modelled; None unless complete.
        rule: A word for why not: ``V13``, ``same``, ``compile``, ``memory``, ``wrong``, ``time``,
            ``crash``, ``error``.
        reason: One line for people.
        numbers: All else.
        broken: The device is no longer to be trusted in this process.
    """

    state: Literal["complete", "failed", "pruned"]
    ms: float | None = None
    rule: str = ""
    reason: str = ""
    numbers: Mapping[str, Number] = field(default_factory=dict)
    broken: bool = False

    @property
    def share(self) -> float:
        """Measured bandwidth as a part of that of a copy; 0 where nothing was measured."""
        return float(self.numbers.get("share", 0.0))


class Judge(Protocol):
    """Whoever can say what a launch is worth."""

    def open(self, asked: Asked, mode: Mode) -> Facts:
        """Return what is there, or raise `hp_tune.errors.MissingToolsError`."""

    def judge(self, kernel: str, shape: Shape, launch: Mapping[str, int]) -> Verdict:
        """Try one launch; an error of the launch is a verdict."""

    def close(self) -> None:
        """Let go of the device."""
