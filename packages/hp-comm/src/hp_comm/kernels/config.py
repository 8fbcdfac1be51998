"""The file format of launch configs: a kernel's block sizes, by device and shape.

No torch here: `hp_tune` writes these files on a machine without a device. One file per kernel and
device, ``<kernel>.<device>.json``, in the folder that ``HP_KERNEL_CONFIGS`` names or, if it is not
there, beside the kernels::

    {
      "format": 1,
      "kernel": "pack",
      "device": "ascend910b3",
      "kernel_hash": "5b1c...",
      "found_by": "hp-tune kernels, 2026-11-30",
      "entries": [
        {"when": {"inner": [1024, null]}, "launch": {"tile": 16384, "programs": 40}},
        {"when": {}, "launch": {"tile": 8192, "programs": 40}}
      ]
    }

``when`` bounds sizes by name, both ends included, null for none. The first entry whose bounds hold
is used, so the last one has none and serves every shape. The sizes of a launch are those of its
largest tensor: ``rows`` of a piece, ``inner`` elements of a row, ``element_size`` in bytes.

``launch`` says how large a tile is (elements, a power of two), how many ``programs`` walk over the
tiles (left out: one per tile), and what the compiler takes: ``num_warps`` and ``num_stages`` on
CUDA, ``multibuffer`` (0 or 1) on Ascend.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hp_mesh.checks import fail, require

__all__ = [
    "DEFAULTS",
    "FORMAT",
    "Entry",
    "KernelConfig",
    "choose",
    "default_launch",
    "kernel_hash",
    "launch_of",
    "path_of",
    "read",
    "validate",
    "write",
]

FORMAT = 1
FOLDER = Path(__file__).parent / "configs"
VARIABLE = "HP_KERNEL_CONFIGS"
KERNELS = ("merge", "merge_backward", "pack", "pack_rotary", "unpack", "unpack_rotary")
SIZES = ("element_size", "inner", "rows")
LAUNCH = ("multibuffer", "num_stages", "num_warps", "programs", "tile")
FAMILIES = {"cuda": ("num_stages", "num_warps"), "ascend": ("multibuffer",)}
"""Launch parameters that only devices of one family take."""
LARGEST_TILE = 2**20  # of triton

DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "cuda": {"tile": 4096, "num_warps": 4},
    # three programs per vector core: pieces seldom share out evenly over 40; the tile is one that
    # fits with every kernel (`hp_comm.kernels.limits`)
    "ascend": {"tile": 4096, "programs": 120, "multibuffer": 1},
    "cpu": {"tile": 65536},  # the interpreter: few, large tiles
}
"""Launch parameters of a device for which no file was found, by what its name begins with."""

log = logging.getLogger("hp_comm.kernels")

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
    kernel_hash: str = ""


@cache
def kernel_hash() -> str:
    """Return the digest of the kernels' source: what was tuned for another may be slow now."""
    source = Path(__file__).with_name("_triton.py").read_bytes()
    return hashlib.sha256(source).hexdigest()[:16]


def path_of(kernel: str, device: str, folder: Path | None = None) -> Path:
    """Return where the config of a kernel on a device lives: in ``folder``, or where one is found.

    Looked for in the folder that ``HP_KERNEL_CONFIGS`` names, then beside the kernels.
    """
    name = f"{kernel}.{device}.json"
    if folder is not None:
        return folder / name
    named = os.environ.get(VARIABLE)
    if not named:
        return FOLDER / name
    require(
        Path(named).is_dir(),
        "hp_comm.kernels",
        f"{VARIABLE} ({named!r}) must be a folder",
        "name the one that hp-tune kernels wrote to",
    )
    own, packaged = Path(named) / name, FOLDER / name
    return packaged if packaged.is_file() and not own.is_file() else own


def choose(config: KernelConfig, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the launch parameters for these sizes, from the first entry that serves them."""
    for entry in config.entries:
        if entry.serves(sizes):
            return dict(entry.launch)
    raise AssertionError(f"{config.kernel}.{config.device}: validated without a last entry for all")


def default_launch(device: str) -> dict[str, int]:
    """Return the launch parameters of a device that was not tuned."""
    for prefix, launch in DEFAULTS.items():
        if device.startswith(prefix):
            return dict(launch)
    return dict(DEFAULTS["cuda"])


@cache
def _tuned(kernel: str, device: str) -> KernelConfig | None:
    """Return the file of a kernel and device; one line says why there is none, once."""
    path = path_of(kernel, device)
    if not path.is_file():
        if device != "cpu":
            log.info("%s: no launch config (%s); default blocks are used", device, path.name)
        return None
    config = read(path)
    if (config.kernel, config.device) != (kernel, device):
        raise fail(
            str(path),
            f"the file ({config.kernel} on {config.device}) must be for {kernel} on {device}",
            "name it after its kernel and device",
        )
    if config.kernel_hash != kernel_hash():
        log.warning(
            "%s: tuned for another version of the kernels (%s, not %s); default blocks are used, "
            "tune again with hp-tune kernels",
            path.name,
            config.kernel_hash or "unknown",
            kernel_hash(),
        )
        return None
    return config


def launch_of(kernel: str, device: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the launch parameters of a kernel on a device for these sizes."""
    config = _tuned(kernel, device)
    return default_launch(device) if config is None else choose(config, sizes)


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
        "kernel_hash": config.kernel_hash,
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
    known = {"format", "kernel", "device", "kernel_hash", "found_by", "entries"}
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
    require(
        content["kernel"] in KERNELS,
        where,
        f"kernel ({content['kernel']!r}) must be one of {', '.join(KERNELS)}",
    )
    notes = {name: content.get(name, "") for name in ("found_by", "kernel_hash")}
    for name, value in notes.items():
        require(isinstance(value, str), where, f"{name} ({value!r}) must be text")
    rows = content.get("entries")
    require(isinstance(rows, list) and bool(rows), where, "entries must be a list with an entry")
    device = content["device"]
    entries = tuple(_entry(row, device, f"{where}: entries[{i}]") for i, row in enumerate(rows))
    require(not entries[-1].when, where, "the last entry must serve every shape (an empty when)")
    return KernelConfig(content["kernel"], content["device"], entries, **notes)


def _entry(row: Any, device: str, where: str) -> Entry:
    ok = isinstance(row, dict) and set(row) == {"when", "launch"}
    require(ok, where, f"an entry ({row!r}) must be an object with when and launch")
    require(isinstance(row["when"], dict), where, f"when ({row['when']!r}) must be an object")
    launch = row["launch"]
    require(
        isinstance(launch, dict) and bool(launch), where, f"launch ({launch!r}) must not be empty"
    )
    for name in row["when"]:
        require(name in SIZES, where, f"when {name} must be one of {', '.join(SIZES)}")
    for name, value in launch.items():
        require(name in LAUNCH, where, f"launch {name} must be one of {', '.join(LAUNCH)}")
        for family, own in FAMILIES.items():
            require(
                name not in own or device.startswith((family, "cpu")),
                where,
                f"launch {name} must be for a device of {family}, not for {device}",
            )
        if name == "multibuffer":
            require(
                _is_int(value) and value in (0, 1),
                where,
                f"launch multibuffer ({value!r}) must be 0 or 1",
            )
            continue
        require(
            _is_int(value) and value > 0, where, f"launch {name} ({value!r}) must be at least 1"
        )
    tile = launch.get("tile")
    require(
        tile is not None and tile & (tile - 1) == 0 and tile <= LARGEST_TILE,
        where,
        f"launch tile ({tile!r}) must be a power of two, at most {LARGEST_TILE}",
    )
    warps = launch.get("num_warps", 1)
    require(warps & (warps - 1) == 0, where, f"launch num_warps ({warps}) must be a power of two")
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
