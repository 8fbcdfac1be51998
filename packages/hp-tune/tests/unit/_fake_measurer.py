"""A measurer that runs nothing: times are the prediction's, bent by what a test asks for.

It is for the logic of the search alone; what a trial really does is tested with torchrun.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hp_tune.measured.result import Measured
from hp_tune.workload import Config


@dataclass
class FakeMeasurer:
    """Answers with ``times`` (ms by configuration), or with a number made of the configuration.

    Attributes:
        times: What trials take.
        final_times: What finals take, where they differ.
        failures: What fails, and how.
        log: A file to which each trial appends its configuration and process.
        seconds: How long a trial takes.
        stays: Which trial, counted from 1, does not end by itself.
        child: Whether a trial starts a process and waits for it.
    """

    times: Mapping[Config, float] = field(default_factory=dict)
    final_times: Mapping[Config, float] = field(default_factory=dict)
    failures: Mapping[Config, Measured] = field(default_factory=dict)
    spread: float = 0.001
    log: Path | None = None
    seconds: float = 0.0
    stays: int = 0
    child: bool = False
    ran: list[Config] = field(default_factory=list)
    finalists: list[list[Config]] = field(default_factory=list)

    @property
    def identity(self) -> Mapping[str, Any]:
        """What its numbers follow from."""
        return {"backend": "fake"}

    def trial(self, config: Config) -> Measured:
        """Say how a configuration would run."""
        self._write("begin", config)
        self.ran.append(config)
        seconds = 3600.0 if len(self.ran) == self.stays else self.seconds
        if self.child:
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
            try:
                self._write(f"child {child.pid}", config)
                child.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                pass
            finally:
                child.kill()
                child.wait()
        else:
            time.sleep(seconds)
        self._write("end", config)
        return self.failures.get(config) or self._ok(config, self.times)

    def finals(self, configs: Sequence[Config]) -> Mapping[Config, Measured]:
        """Say how finalists would run."""
        self.finalists.append(list(configs))
        self._write("finals", configs[0])
        return {config: self._ok(config, {**self.times, **self.final_times}) for config in configs}

    def _ok(self, config: Config, times: Mapping[Config, float]) -> Measured:
        made_up = 10.0 + 3 * config.ulysses_degree + config.load_balance + 2 * config.overlap
        ms = times.get(config, made_up)
        around = (ms * (1 - self.spread), ms * (1 + self.spread))
        return Measured(
            "ok", samples_ms=(around[0], ms, around[1]), forward_ms=ms / 3, backward_ms=ms * 2 / 3,
            median_ms=ms, interval_ms=around, collectives={"all_to_all": 2},
            bytes_sent={"all_to_all": 1024}, memory_bytes=2**30,
        )  # fmt: skip

    def _write(self, what: str, config: Config) -> None:
        if self.log is not None:
            with self.log.open("a") as file:  # one short write: whole lines from many processes
                file.write(f"{what};{os.getpid()};{config.label(0)}\n")
