"""Devices as they are typed, and what of them bounds a launch; no torch here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from hp_mesh.checks import nearest
from hp_tune.errors import UsageError

__all__ = ["ASCEND", "Asked", "Family", "vector_cores"]

Family = Literal["ascend", "cpu", "cuda"]

# vector cores as bishengir-compile 1.2.0 knows them; the unified buffer is 192 KiB on all
ASCEND = {
    "Ascend910B1": 48, "Ascend910B2": 48, "Ascend910B2C": 48,
    "Ascend910B3": 40, "Ascend910B4": 40, "Ascend910B4-1": 40,
    "Ascend910_9362": 40, "Ascend910_9372": 40, "Ascend910_9381": 48,
    "Ascend910_9382": 48, "Ascend910_9391": 48, "Ascend910_9392": 48,
}  # fmt: skip
"""Vector cores of each target."""
_TARGETS = {target.lower(): target for target in ASCEND}


@dataclass(frozen=True, slots=True)
class Asked:
    """What ``--device`` asks for.

    Attributes:
        family: Whose launch parameters are searched.
        name: As launch configs name the device; empty where any of the family will do.
        index: Which of several, for ``cuda:1`` and ``npu:1``.
    """

    family: Family
    name: str = ""
    index: int | None = None

    @classmethod
    def parse(cls, text: str) -> Asked:
        """Read ``cuda``, ``cuda:1``, ``cuda-sm90``, ``npu``, ``ascend910b3`` or ``cpu``."""
        lower = text.lower()
        if lower == "cpu":
            return cls("cpu", "cpu")
        if found := re.fullmatch(r"(cuda|npu)(?::(\d+))?", lower):
            family: Family = "cuda" if found[1] == "cuda" else "ascend"
            return cls(family, index=None if found[2] is None else int(found[2]))
        if re.fullmatch(r"cuda-sm\d+", lower):
            return cls("cuda", lower)
        if lower in _TARGETS:
            return cls("ascend", lower)
        known = ["cuda", "npu", "cpu", *_TARGETS]
        close = nearest(lower, known)
        raise UsageError(
            f"--device ({text!r}) must be cuda, cuda-sm90, npu, cpu or an Ascend like ascend910b3",
            f"did you mean {close!r}?" if close else f"Ascends: {', '.join(_TARGETS)}",
        )

    @property
    def target(self) -> str:
        """The name that the Ascend compiler has for it."""
        return _TARGETS[self.name]

    @property
    def torch_name(self) -> str:
        """The name that torch has for it."""
        kind = {"ascend": "npu", "cpu": "cpu", "cuda": "cuda"}[self.family]
        return kind if kind == "cpu" else f"{kind}:{self.index or 0}"


def vector_cores(name: str) -> int:
    """Return how many vector cores an Ascend has; of an unknown one, the fewest of any."""
    return ASCEND.get(_TARGETS.get(name, ""), min(ASCEND.values()))
