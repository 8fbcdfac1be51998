"""What stands in front of a command to run it on a host, and what a host is asked before a job."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hp_tune.errors import MissingToolsError, UsageError

__all__ = ["WHAT_A_HOST_IS", "address_of", "check_devices", "free_port", "on_host"]

WHAT_A_HOST_IS = "a host is a command that others can stand behind, such as 'ssh node1'"

PROBES = {
    "cuda-nccl": "import torch; print(torch.cuda.device_count())",
    "npu-hccl": "import torch, torch_npu; print(torch.npu.device_count())",
}
"""How each backend counts its devices; the CPU has as many as are asked for."""


def on_host(prefix: str, command: Sequence[str]) -> list[str]:
    """Return ``command`` behind ``prefix``; ssh hands its words to a shell, which is foreseen."""
    try:
        words = shlex.split(prefix)
    except ValueError as error:  # a quote that is not closed
        raise UsageError(
            f"host {prefix!r} must be words as a shell reads them: {error}", WHAT_A_HOST_IS
        ) from None
    if words and Path(words[0]).name == "ssh":
        return [*words, shlex.join(command)]
    return [*words, *command]


def check_devices(host: str, backend: str, wanted: int) -> None:
    """Ask a host whether it has ``backend`` and ``wanted`` devices for it.

    Raises:
        MissingToolsError: It has not; the message names what is missing and where.
    """
    code = PROBES.get(backend)
    if code is None:
        return
    where = f"on {host!r}" if host else "on this machine"
    try:
        found = subprocess.run(
            on_host(host, [sys.executable, "-c", code]),
            capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingToolsError(
            f"{backend}: no Python {where}: {error}",
            f"every host must have this one, {sys.executable}",
        ) from None
    words = found.stdout.split()
    count = int(words[-1]) if found.returncode == 0 and words and words[-1].isdigit() else None
    if count is None:
        reason = found.stderr.strip().splitlines()[-1:] or ["Python ended without a word"]
        raise MissingToolsError(
            f"{backend} is not usable {where}: {reason[0]}",
            "use --backend cpu-gloo, or run where the devices are",
        )
    if count < wanted:
        raise MissingToolsError(
            f"{backend}: nproc_per_node ({wanted}) must be at most the devices {where} ({count})",
            "use --backend cpu-gloo, or run where the devices are"
            if count == 0
            else f"use --nproc-per-node {count}, or more hosts",
        )


def address_of(host: str) -> str:
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
            f"host {host!r} cannot be asked for its address: {error}", WHAT_A_HOST_IS
        ) from None
    words = found.stdout.split()
    if found.returncode or not words:
        raise UsageError(
            f"host {host!r} does not say its address (hostname -I): {found.stderr.strip()}",
            "name the address of the first host with --master-addr",
        )
    return words[0]


def free_port() -> int:
    """Return a port that nobody has at the moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
