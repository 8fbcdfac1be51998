"""`TorchrunMeasurer`: a `Measurer` whose trials are jobs under torchrun."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hp_tune.errors import UsageError
from hp_tune.measured.outcome import failure, measured
from hp_tune.measured.request import JobRequest, Protocol, layer_shapes, style_call
from hp_tune.measured.result import Measured
from hp_tune.models.model import Model
from hp_tune.torchrun import Job, Launcher
from hp_tune.workload import Config, Workload

__all__ = ["TorchrunMeasurer"]

JOB = "hp_tune.measured.job"
FINALS = 3
"""Times the rounds of a trial: trials choose who is measured again, and the finals decide."""


@dataclass(frozen=True)
class TorchrunMeasurer:
    """Runs configurations of one model and workload, one job per trial.

    What is run is one layer of each kind that the model has, with its projections: the heads of
    one TP rank, all CP ranks; the times are those of all layers of the kind.

    Attributes:
        launcher: Of jobs of ``cp_size`` ranks (one TP rank's heads on each), or a multiple of
            ``cp_size * tp_size`` (all TP ranks and data replicas at once, on their shared links).
        logs: A folder for the folders of the jobs.
        timeout: Seconds for a trial; a job of n finalists has n times as many.
        protocol: How long is measured.
        module: What the ranks run; another one is for tests.
    """

    model: Model
    workload: Workload
    launcher: Launcher
    logs: Path
    timeout: float = 300.0
    protocol: Protocol = field(default_factory=Protocol)
    module: str = JOB

    def __post_init__(self) -> None:
        workload, world = self.workload, self.launcher.world_size
        group = workload.cp_size * workload.tp_size
        if world != workload.cp_size and world % group:
            raise UsageError(
                f"ranks of a trial ({world}) must be cp_size ({workload.cp_size}), or a multiple "
                f"of cp_size x tp_size ({group})",
                f"use --nproc-per-node {workload.cp_size}, on so many hosts that it adds up",
            )
        if not layer_shapes(self.model, workload.tp_size):
            raise UsageError(
                f"{self.model.name} has no layer that context parallelism touches",
                "there is nothing to measure",
            )
        if workload.documents is not None:
            raise UsageError(
                "measured trials must have one document per sequence, and this workload has "
                f"{len(workload.documents)} lengths",
                "use --mode analytic for packed documents",
            )
        if workload.layout == "TND" and workload.batch > 1:
            raise UsageError(
                f"batch ({workload.batch}) must be 1 for measured trials in TND",
                "use --batch 1, or --layout BSHD",
            )

    @property
    def identity(self) -> Mapping[str, Any]:
        """All that the numbers follow from beside model, cluster and workload."""
        launcher = self.launcher
        return {
            "backend": launcher.backend,
            "nproc_per_node": launcher.nproc_per_node,
            "hosts": list(launcher.hosts),
            "env": dict(launcher.env),
            "threads": launcher.threads,
            "torch": _version("torch"),
            "hp_cp": _version("hp-cp"),
            "hp_dsa": _version("hp-dsa"),
            "warmup": self.protocol.warmup,
            "rounds": self.protocol.rounds,
        }

    def trial(self, config: Config) -> Measured:
        """Run one configuration in a job of its own; no failure of it is raised."""
        return self._measure([config])[config]

    def finals(self, configs: Sequence[Config]) -> Mapping[Config, Measured]:
        """Run the finalists in one job, in turns.

        One that ends the job is what its failure says, and the others run again without it.
        """
        found: dict[Config, Measured] = {}
        left = list(dict.fromkeys(configs))
        while left:
            latest = self._measure(left)
            found |= {config: said for config, said in latest.items() if said.outcome != "ok"}
            if len(latest) == len(left):
                return {config: (found | latest)[config] for config in configs}
            left = [config for config in left if config not in latest]
        return {config: found[config] for config in configs}

    def _measure(self, configs: Sequence[Config]) -> dict[Config, Measured]:
        """Return what one job says: of all of them, or after a failure of those that are over."""
        asked = self._request(configs)
        timeout = self.timeout * len(configs)
        job = self.launcher.run(
            self.module, asked.to_json(), folder=self._folder(asked), timeout=timeout
        )
        answer = job.answer or {}
        said = answer.get("configs", [])
        if job.ok and answer.get("done"):
            return {config: measured(one, job) for config, one in zip(configs, said, strict=True)}
        return self._after_failure(configs, said, int(answer.get("at", 0)), job, timeout)

    def _after_failure(
        self, configs: Sequence[Config], said: Sequence[Mapping[str, object]], at: int, job: Job,
        timeout: float,
    ) -> dict[Config, Measured]:  # fmt: skip
        failed = failure(job, timeout)
        over = {
            config: measured(one, job)
            for config, one in zip(configs, said, strict=False)
            if one.get("outcome") in ("wrong", "inactive")
        }
        if at < 0:  # in the timed rounds, where nobody knows whose turn it was
            return {config: over.get(config, failed) for config in configs}
        return over | {configs[at]: failed}

    def _request(self, configs: Sequence[Config]) -> JobRequest:
        workload = self.workload
        return JobRequest(
            hidden_size=self.model.hidden_size,
            layers=layer_shapes(self.model, workload.tp_size),
            styles=tuple(style_call(config, workload) for config in configs),
            seq_len=workload.seq_len,
            cp_size=workload.cp_size,
            tp_size=workload.tp_size,
            batch=workload.batch,
            dtype=workload.dtype,
            layout=workload.layout,
            causal=workload.causal,
            recompute=workload.recompute,
            # so that a slow configuration is measured in few rounds and not ended
            protocol=replace(
                self.protocol,
                rounds=self.protocol.rounds * (FINALS if len(configs) > 1 else 1),
                budget_s=min(self.protocol.budget_s, 0.4 * self.timeout) * len(configs),
            ),
        )

    def _folder(self, asked: JobRequest) -> Path:
        labels = [style.label for style in asked.styles]
        name = labels[0] if len(labels) == 1 else f"finals of {len(labels)}"
        words = "-".join(name.replace("=", "").split())
        # of its own: other workers may run the same
        return self.logs / f"{words}-s{asked.seq_len}-{secrets.token_hex(4)}"


def _version(package: str) -> str:
    """Return the version of what is installed; of a source tree on the path, none is known."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "source"
