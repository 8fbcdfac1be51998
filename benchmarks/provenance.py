"""On what numbers were taken: written beside every record."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["provenance"]


def provenance(device: str = "cpu", libraries: Iterable[str] = ("torch",)) -> dict[str, Any]:
    """Return the device, the versions of ``libraries``, the commit and the time."""
    name = f"{platform.machine()}, {os.cpu_count()} cores"
    if device != "cpu":
        import torch

        name = torch.get_device_module(device).get_device_name()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "device": f"{device} ({name})",
        "versions": {"python": platform.python_version(), **{n: _version(n) for n in libraries}},
        "commit": commit.stdout.strip() or None,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
