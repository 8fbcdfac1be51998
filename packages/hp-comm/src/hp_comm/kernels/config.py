"""The file format of launch configs: a kernel's block sizes, by device and shape.

No torch here: `hp_tune` writes these files on a machine without a device. One file per kernel and
device, ``<kernel>.<device>.json`` beside the kernels::

    {
      "format": 1,
      "kernel": "pack",
      "device": "ascend910b",
      "found_by": "hp-tune kernels, 2026-11-29",
      "entries": [
        {"when": {"D": [64, 128], "H": [8, null]}, "launch": {"BLOCK": 64, "num_warps": 4}},
        {"when": {}, "launch": {"BLOCK": 32, "num_warps": 4}}
      ]
    }

``when`` bounds sizes by name, both ends included, null for none. The first entry whose bounds hold
is used, so the last one has none and serves every shape.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hp_mesh.checks import fail, require

__all__ = ["FORMAT", "Entry", "KernelConfig", "choose", "path_of", "read", "validate", "write"]

FORMAT = 1
FOLDER = Path(__file__).parent / "configs"

Bounds = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class Entry:
    """Launch parameters, and the sizes for which they were found."""

    when: Mapping[str, Bounds]
    launch: Mapping[str, int]

    def serves(self, sizes: Mapping[str, int]) -> bool:
        """Say whether every bound holds; a size that is not given holds none."""
        return all(
            name in sizes
            and (low is None or low <= sizes[name])
            and (high is None or sizes[name] <= high)
            for name, (low, high) in self.when.items()
        )


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """What one file holds."""

    kernel: str
    device: str
    entries: tuple[Entry, ...]
    found_by: str = field(default="", compare=False)


def path_of(kernel: str, device: str, folder: Path = FOLDER) -> Path:
    """Return where the config of a kernel on a device lives."""
    return folder / f"{kernel}.{device}.json"


def choose(config: KernelConfig, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the launch parameters for these sizes, from the first entry that serves them."""
    for entry in config.entries:
        if entry.serves(sizes):
            return dict(entry.launch)
    raise AssertionError(f"{config.kernel}.{config.device}: validated without a last entry for all")


def read(path: Path) -> KernelConfig:
    """Read and validate a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise fail(str(path), f"the file must be readable JSON ({error})") from error
    return validate(content, str(path))


def write(config: KernelConfig, path: Path) -> None:
    """Write a file in one step: a reader sees the old or the new one, never half of it."""
    content = {
        "format": FORMAT,
        "kernel": config.kernel,
        "device": config.device,
        "found_by": config.found_by,
        "entries": [
            {"when": {n: list(b) for n, b in e.when.items()}, "launch": dict(e.launch)}
            for e in config.entries
        ],
    }
    validate(content, str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    draft.replace(path)


def validate(content: Any, where: str) -> KernelConfig:
    """Return the config that ``content`` (parsed JSON) describes, or say what is wrong with it."""
    require(isinstance(content, dict), where, "the file must hold one object")
    known = {"format", "kernel", "device", "found_by", "entries"}
    unknown = sorted(set(content) - known)
    require(not unknown, where, f"fields ({', '.join(unknown)}) must be among {sorted(known)}")
    require(
        content.get("format") == FORMAT,
        where,
        f"format ({content.get('format')!r}) must be {FORMAT}",
        "write the file with this version's hp-tune",
    )
    for name in ("kernel", "device"):
        value = content.get(name)
        require(isinstance(value, str) and bool(value), where, f"{name} ({value!r}) must be a name")
    found_by = content.get("found_by", "")
    require(isinstance(found_by, str), where, f"found_by ({found_by!r}) must be text")
    rows = content.get("entries")
    require(isinstance(rows, list) and bool(rows), where, "entries must be a list with an entry")
    entries = tuple(_entry(row, f"{where}: entries[{i}]") for i, row in enumerate(rows))
    require(not entries[-1].when, where, "the last entry must serve every shape (an empty when)")
    return KernelConfig(content["kernel"], content["device"], entries, found_by)


def _entry(row: Any, where: str) -> Entry:
    ok = isinstance(row, dict) and set(row) == {"when", "launch"}
    require(ok, where, f"an entry ({row!r}) must be an object with when and launch")
    require(isinstance(row["when"], dict), where, f"when ({row['when']!r}) must be an object")
    launch = row["launch"]
    require(
        isinstance(launch, dict) and bool(launch), where, f"launch ({launch!r}) must not be empty"
    )
    for name, value in launch.items():
        require(
            _is_int(value) and value > 0, where, f"launch {name} ({value!r}) must be at least 1"
        )
    return Entry({name: _bounds(b, f"{where}: {name}") for name, b in row["when"].items()}, launch)


def _bounds(value: Any, where: str) -> Bounds:
    ok = isinstance(value, list) and len(value) == 2 and all(v is None or _is_int(v) for v in value)
    require(ok, where, f"bounds ({value!r}) must be [low, high], null for none")
    low, high = value
    require(
        low is None or high is None or low <= high, where, f"bounds ({value}) must not be empty"
    )
    return (low, high)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
