"""Who works on something, and whether that process is still there."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["LEASE_SECONDS", "describe", "is_gone", "this_process"]

LEASE_SECONDS = 3600.0
"""A claim from another machine, whose processes cannot be looked at, holds this long."""


def this_process() -> dict[str, Any]:
    """Return the identity of this process: unique over machines, reboots and reused numbers."""
    return {
        **_machine(),
        "pid": os.getpid(),
        "start_time": _start_time(os.getpid()),
        "until": time.time() + LEASE_SECONDS,
    }


def is_gone(owner: Mapping[str, Any]) -> bool:
    """Return whether the process of ``owner`` has surely ended.

    On this machine that is seen: another boot, no such process, or its number with another start.
    On another one it is taken for gone when its claim has run out.
    """
    machine = _machine()
    if owner.get("host") != machine["host"] or owner.get("namespace") != machine["namespace"]:
        return time.time() > float(owner.get("until", 0))
    if owner.get("boot_id") != machine["boot_id"]:
        return True
    pid = int(owner.get("pid", 0))
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's: it is there
        pass
    return _start_time(pid) != owner.get("start_time")


def describe(owner: Mapping[str, Any]) -> str:
    """Return an owner for people."""
    return f"process {owner.get('pid', 'unknown')} on {owner.get('host', 'another machine')}"


@cache
def _machine() -> dict[str, str]:
    boot, namespace = "", ""
    with suppress(OSError):  # not Linux: the host's name and the process number must do
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return {"host": socket.gethostname(), "boot_id": boot, "namespace": namespace}


def _start_time(pid: int) -> int | None:
    """Return when a process began, in ticks since boot; None for a zombie or where no one tells."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before may hold spaces
    return None if fields[0] == "Z" else int(fields[19])
