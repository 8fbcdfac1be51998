"""The real job of a trial in a runtime with a fault, which ``FAULT`` names."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

import hp_cp.style
from hp_mesh.boundary import boundary_of
from hp_tune.measured import job, rounds
from hp_tune.measured.dense import Core


def ignore_degree() -> None:
    """Take ``ulysses_degree`` and do not use it; and with groups of heads be slightly wrong."""
    init, forward = hp_cp.style.ContextParallel.__init__, Core.forward

    def ignoring(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "ulysses_degree": None})

    def wrong(self: Core, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        whole = q.shape[2] == self.shape.num_heads
        return forward(self, q, k, v) * (1.0 if whole else 1.001)

    hp_cp.style.ContextParallel.__init__ = ignoring  # type: ignore[method-assign]
    Core.forward = wrong  # type: ignore[method-assign]


def on_rank_1(act: Callable[[], None]) -> None:
    """Let rank 1 act before each step of a configuration with ``keep_kv=False``."""
    run = rounds.Runner.run

    def acting(self: rounds.Runner, index: int, device: Any) -> list[float]:
        boundary: Any = boundary_of(self.steps[index].layer.core)
        if os.environ["RANK"] == "1" and not boundary.style.keep_kv:
            act()
        return run(self, index, device)

    rounds.Runner.run = acting  # type: ignore[method-assign]


def crash() -> None:
    raise RuntimeError("the third wheel came off")


def hang() -> None:
    time.sleep(3600)  # longer than any deadline of a test


def starve() -> None:
    """Allow no more memory than there is already."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if os.environ["FAULT"] == "degree":
    ignore_degree()
else:
    on_rank_1({"crash": crash, "hang": hang, "oom": starve}[os.environ["FAULT"]])
job.main()
