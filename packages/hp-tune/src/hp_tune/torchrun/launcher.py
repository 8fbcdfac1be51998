"""The controller's side: one torchrun per node, and all of them ended whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hp_tune.errors import MissingToolsError, UsageError
from hp_tune.steps import Step
from hp_tune.torchrun.job import Job, local_ranks, read_job, tail
from hp_tune.torchrun.worker import write_json

__all__ = ["BACKENDS", "Backend", "Launcher"]

Backend = Literal["cpu-gloo", "cuda-nccl", "npu-hccl"]
BACKENDS: tuple[Backend, ...] = ("cpu-gloo", "cuda-nccl", "npu-hccl")

GRACE_S = 3.0
"""How long torchrun may take to end its ranks before it is killed, and they with it."""

GONE_S = 60.0
"""How long a rank that was killed may take to be gone, on a busy machine; most are at once."""

POLL_S = 0.05
PORT_TRIES = 3
PROBES = {
    "cuda-nccl": "import torch; print(torch.cuda.device_count())",
    "npu-hccl": "import torch, torch_npu; print(torch.npu.device_count())",
}


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
        code = PROBES.get(self.backend)
        if code is None:
            return
        for host in self.hosts or ("",):
            self._check_node(host, code)

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
                nodes.append(_start(command, folder, index))
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
            _end(nodes)
            _await_ranks(folder)
        code = next((node.returncode for node in nodes if node.returncode), 0)
        return read_job(folder, code, timed_out=timed_out)

    def _commands(self, module: str, folder: Path, until: float) -> list[tuple[list[str], int]]:
        hosts = self.hosts or ("",)
        if len(hosts) == 1:
            meeting = ["--standalone", "--local-addr", "127.0.0.1"]
        else:
            address = self.master_addr or _address(hosts[0])
            meeting = ["--master-addr", address, "--master-port", str(_free_port())]
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

    def _check_node(self, host: str, code: str) -> None:
        where = f"on {host!r}" if host else "on this machine"
        try:
            found = subprocess.run(
                on_host(host, [sys.executable, "-c", code]),
                capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MissingToolsError(
                f"{self.backend}: no Python {where}: {error}",
                f"every host must have this one, {sys.executable}",
            ) from None
        words = found.stdout.split()
        count = int(words[-1]) if found.returncode == 0 and words and words[-1].isdigit() else None
        if count is None:
            reason = found.stderr.strip().splitlines()[-1:] or ["Python ended without a word"]
            raise MissingToolsError(
                f"{self.backend} is not usable {where}: {reason[0]}",
                "use --backend cpu-gloo, or run where the devices are",
            )
        if count < self.nproc_per_node:
            raise MissingToolsError(
                f"{self.backend}: nproc_per_node ({self.nproc_per_node}) must be at most the "
                f"devices {where} ({count})",
                "use --backend cpu-gloo, or run where the devices are"
                if count == 0
                else f"use --nproc-per-node {count}, or more hosts",
            )


def on_host(prefix: str, command: Sequence[str]) -> list[str]:
    """Return ``command`` behind ``prefix``; ssh hands its words to a shell, which is foreseen."""
    words = shlex.split(prefix)
    if words and Path(words[0]).name == "ssh":
        return [*words, shlex.join(command)]
    return [*words, *command]


def _show(folder: Path, step: Step, told: list[Any]) -> list[Any]:
    """Pass on what rank 0 reports, once; return it."""
    try:
        found: list[Any] = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not yet
        return told
    if found != told:
        step(*found)
    return found


def _start(command: list[str], folder: Path, index: int) -> subprocess.Popen[bytes]:
    with (
        (folder / f"node{index}.out").open("wb") as out,
        (folder / f"node{index}.err").open("wb") as err,
    ):
        try:
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=err, start_new_session=True
            )
        except OSError as error:
            raise UsageError(
                f"host {index}: {command[0]} cannot be run: {error.strerror}",
                "a host is a command that others can stand behind, such as 'ssh node1'",
            ) from None


def _end(nodes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End every node: SIGTERM, then its stdin closes, then SIGKILL."""
    try:
        _signal(nodes, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while any(node.poll() is None for node in nodes) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    finally:
        for node in nodes:
            assert node.stdin is not None, "a pipe"
            node.stdin.close()
        _signal(nodes, signal.SIGKILL)
        for node in nodes:
            node.wait()


def _signal(nodes: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for node in nodes:
        if node.poll() is None:
            # another user's (sudo): it ends when its stdin does
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(node.pid, number)


def _await_ranks(folder: Path) -> None:
    """Wait until the ranks on this machine are gone, they and the memory that they held."""
    deadline = time.monotonic() + GONE_S
    for pid in local_ranks(folder):
        while _runs(pid) and time.monotonic() < deadline:
            time.sleep(POLL_S)


def _runs(pid: int) -> bool:
    """Return whether a process has not ended; one that has may wait for who asks for its code."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def _address(host: str) -> str:
    """Return the address of a node as it sees itself; that of this machine is for itself alone."""
    if not host:
        return "127.0.0.1"
    try:
        found = subprocess.run(
            on_host(host, ["hostname", "-I"]),
            capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(
            f"host {host!r} cannot be asked for its address: {error}",
            "a host is a command that others can stand behind, such as 'ssh node1'",
        ) from None
    words = found.stdout.split()
    if found.returncode or not words:
        raise UsageError(
            f"host {host!r} does not say its address (hostname -I): {found.stderr.strip()}",
            "name the address of the first host with --master-addr",
        )
    return words[0]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _port_was_taken(job: Job) -> bool:
    return job.exit_code != 0 and "EADDRINUSE" in tail(job.folder / "node0.err")
