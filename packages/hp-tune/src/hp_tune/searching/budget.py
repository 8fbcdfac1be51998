"""What measuring may take."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

__all__ = ["Budget"]


@dataclass(slots=True)
class Budget:
    """What measuring may take in this run; what was measured before is free.

    Attributes:
        seconds: Of wall time, from when it was made; a trial that has begun is not cut short.
        trials: Number of trials.
    """

    seconds: float | None = None
    trials: int | None = None
    _start: float = field(default_factory=time.monotonic)
    _used: int = 0

    def use(self) -> None:
        """Count a trial."""
        self._used += 1

    def spent(self) -> str:
        """Return a sentence if nothing is left, or an empty string."""
        if self.trials is not None and self._used >= self.trials:
            return f"the budget of {self.trials} trials is used"
        if self.seconds is not None and time.monotonic() - self._start >= self.seconds:
            return f"the budget of {self.seconds:g} s is used"
        return ""
