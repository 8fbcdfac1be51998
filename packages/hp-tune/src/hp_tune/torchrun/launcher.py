"""The controller's side: one torchrun per node, and all of them ended whatever happens."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hp_tune.errors import UsageError
from hp_tune.steps import Step
from hp_tune.torchrun.hosts import address_of, check_devices, free_port, on_host
from hp_tune.torchrun.job import Job, read_job, tail
from hp_tune.torchrun.processes import POLL_S, await_ranks, end, start
from hp_tune.torchrun.worker import write_json

__all__ = ["BACKENDS", "Backend", "Launcher"]

Backend = Literal["cpu-gloo", "cuda-nccl", "npu-hccl"]
BACKENDS: tuple[Backend, ...] = ("cpu-gloo", "cuda-nccl", "npu-hccl")

PORT_TRIES = 3


@dataclass(frozen=True)
class Launcher:
    """Starts jobs of one size under torchrun.

    Attributes:
        backend: Device and collectives; ranks find it as ``HP_TUNE_BACKEND``.
        nproc_per_node: Ranks of a node.
        hosts: What stands in front of a command to run it on each node, such as ``"ssh node1"``,
            ``"srun -w node1"`` or ``"ip netns exec hp0 env GLOO_SOCKET_IFNAME=veth0"``; the first
            is node 0. Empty: this machine alone. All nodes must see the same files under the same
            paths, Python included.
        env: More environment of all nodes.
        master_addr: Address of node 0 for the others. Default: node 0 is asked for it.
        threads: Threads of a rank on the CPU. Default: this machine's cores over its ranks.
    """

    backend: Backend = "cpu-gloo"
    nproc_per_node: int = 1
    hosts: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    master_addr: str = ""
    threads: int | None = None

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.nproc_per_node * max(1, len(self.hosts))

    def check(self) -> None:
        """Ask every node whether it has the backend and a device for each rank.

        Raises:
            MissingToolsError: One has not; the message names what is missing and where.
        """
        for host in self.hosts or ("",):
            check_devices(host, self.backend, self.nproc_per_node)

    def run(
        self,
        module: str,
        request: Mapping[str, Any],
        *,
        folder: Path,
        timeout: float,
        step: Step | None = None,
    ) -> Job:
        """Run ``python -m module REQUEST`` on every rank, and wait for the end.

        Args:
            module: Its ``main`` reads `hp_tune.torchrun.worker.request`; rank 0 calls ``answer``.
            request: Anything that JSON holds.
            folder: For this job alone; what an earlier one left there is removed.
            timeout: Seconds until all ranks are ended.
            step: Receives what rank 0 says with `hp_tune.torchrun.worker.report`.

        Returns:
            How it ended; a failed job is not an error here. No process of the job is left, also
            when this call is left by an exception such as that of a signal.
        """
        for _ in range(PORT_TRIES):
            job = self._run_once(module, request, folder.absolute(), timeout, step)
            if len(self.hosts) < 2 or not _port_was_taken(job):
                break
        return job

    def _run_once(
        self,
        module: str,
        request: Mapping[str, Any],
        folder: Path,
        timeout: float,
        step: Step | None,
    ) -> Job:
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.mkdir(parents=True)
            write_json(folder / "request.json", dict(request))
        except OSError as error:
            raise UsageError(
                f"folder {folder} for the logs of a trial cannot be written: {error.strerror}",
                "run in another folder",
            ) from None
        deadline = time.monotonic() + timeout
        nodes: list[subprocess.Popen[bytes]] = []
        timed_out, told = False, list[Any]()
        try:
            for command, index in self._commands(module, folder, time.time() + timeout):
                nodes.append(start(command, folder, index))
            # one node that failed is enough: the others wait for it in a collective
            while any(node.poll() is None for node in nodes) and not any(
                node.returncode for node in nodes
            ):
                if time.monotonic() > deadline:
                    timed_out = True
                    break
                if step is not None:
                    told = _show(folder, step, told)
                time.sleep(POLL_S)
        finally:
            end(nodes)
            await_ranks(folder)
        code = next((node.returncode for node in nodes if node.returncode), 0)
        return read_job(folder, code, timed_out=timed_out)

    def _commands(self, module: str, folder: Path, until: float) -> list[tuple[list[str], int]]:
        hosts = self.hosts or ("",)
        if len(hosts) == 1:
            meeting = ["--standalone", "--local-addr", "127.0.0.1"]
        else:
            address = self.master_addr or address_of(hosts[0])
            meeting = ["--master-addr", address, "--master-port", str(free_port())]
        python = [sys.executable, "-m", "hp_tune.torchrun.node", str(folder)]
        environment = {**self._environment(), "HP_TUNE_UNTIL": f"{until:.3f}"}
        return [
            (
                on_host(
                    host,
                    [
                        *("env", *(f"{name}={value}" for name, value in environment.items())),
                        *(*python, str(index)),
                        *("--nnodes", str(len(hosts)), "--node-rank", str(index), *meeting),
                        *("--nproc-per-node", str(self.nproc_per_node)),
                        *("-m", "hp_tune.torchrun.rank", module, str(folder / "request.json")),
                    ],
                ),
                index,
            )
            for index, host in enumerate(hosts)
        ]

    def _environment(self) -> dict[str, str]:
        threads = self.threads or max(1, (os.cpu_count() or 1) // self.nproc_per_node)
        return {
            "HP_TUNE_BACKEND": self.backend,
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            **self.env,
        }


def _show(folder: Path, step: Step, told: list[Any]) -> list[Any]:
    """Pass on what rank 0 reports, once; return it."""
    try:
        found: list[Any] = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not yet
        return told
    if found != told:
        step(*found)
    return found


def _port_was_taken(job: Job) -> bool:
    return job.exit_code != 0 and "EADDRINUSE" in tail(job.folder / "node0.err")
