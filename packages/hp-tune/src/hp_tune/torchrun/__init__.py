"""Jobs under ``torchrun``: start one, wait for it, and leave no process behind.

`Launcher` is the controller's side, without torch; `hp_tune.torchrun.worker` is what a rank calls.
"""

from __future__ import annotations

from hp_tune.torchrun.job import FailedRank, Job
from hp_tune.torchrun.launcher import BACKENDS, Backend, Launcher

__all__ = ["BACKENDS", "Backend", "FailedRank", "Job", "Launcher"]
