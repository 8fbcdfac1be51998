"""What of this machine the tuner can use, and what stands in its way."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from hp_tune.errors import MissingToolsError, TuneError
from hp_tune.plans.plan_file import VARIABLE, load

__all__ = ["Check", "Health", "examine"]

Health = Literal["ok", "absent", "wrong"]
"""``absent`` is something optional that is not here; ``wrong`` has to be put right."""
OURS = ("hp-mesh", "hp-comm", "hp-cp", "hp-dsa", "hp-tune")
NEEDED = ("optuna", "pydantic", "click", "rich", "PyYAML")
OPTIONAL = ("torch", "torch_npu", "triton", "transformers", "optuna-dashboard")


@dataclass(frozen=True, slots=True)
class Check:
    """One line: what was looked at, how it is, and what to do where it is not right."""

    name: str
    health: Health
    found: str
    hint: str = ""


def examine(folder: Path) -> list[Check]:
    """Return everything that was looked at; ``folder`` is where studies and plans would go."""
    parts: tuple[Callable[[], Iterator[Check]], ...] = (
        _versions,
        _devices,
        _programs,
        lambda: _folders(folder),
        lambda: _locks(folder),
        _environment,
    )
    return [check for part in parts for check in part()]


def _versions() -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} on {platform.system()}")
    ours = {name: _version(name) for name in OURS}
    known = {found for found in ours.values() if found}
    told = ", ".join(f"{name} {found or 'not installed'}" for name, found in ours.items())
    if len(known) > 1:
        yield Check("hp packages", "wrong", told, "install all five in one version")
    else:
        hint = "" if known else "run from a checkout: pip install -e packages/hp-tune"
        yield Check("hp packages", "ok" if known else "absent", told, hint)
    for name in NEEDED:
        found = _version(name)
        yield Check(name, "ok" if found else "wrong", found or "not installed",
                    "" if found else f"pip install {name}")  # fmt: skip
    for name in OPTIONAL:
        found = _version(name)
        yield Check(name, "ok" if found else "absent", found or "not installed")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _devices() -> Iterator[Check]:
    from hp_tune.kernels._torch_door import torch as open_torch

    try:
        torch: Any = open_torch()
    except MissingToolsError as error:
        hint = "an analytic search needs none; measured trials do"
        yield Check("backends", "absent", error.message, hint)
        return
    dist = torch.distributed
    backends = {
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "hccl": find_spec("torch_npu") is not None,
    }
    here = [name for name, usable in backends.items() if usable]
    hint = "" if here else "measured trials need one: use a torch with distributed"
    yield Check("backends", "ok" if here else "absent", ", ".join(here) or "none", hint)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(count)}))
    yield Check("CUDA devices", "ok" if count else "absent", f"{count} x {names}" if count else "0")
    npus = sorted(Path("/dev").glob("davinci[0-9]*"))
    health: Health = "ok" if npus else "absent"
    hint = ""
    if npus and not backends["hccl"]:
        hint = "install torch_npu to use them"
    yield Check("Ascend devices", health, str(len(npus)), hint)
    cores = len(os.sched_getaffinity(0))
    yield Check("CPU cores", "ok", str(cores), "CPU ranks beyond that share cores")


def _programs() -> Iterator[Check]:
    run = find_spec("torch") is not None and find_spec("torch.distributed.run") is not None
    yield Check("torchrun", "ok" if run else "absent", "python -m torch.distributed.run"
                if run else "no torch", "" if run else "measured trials need it")  # fmt: skip
    for name, use in (("ip", "the two-host benchmark"), ("tc", "the two-host benchmark"),
                      ("npu-smi", "Ascend devices"), ("nvidia-smi", "CUDA devices")):  # fmt: skip
        path = shutil.which(name)
        yield Check(name, "ok" if path else "absent", path or "not on the PATH", f"used by {use}")
    root = os.geteuid() == 0
    yield Check("root", "ok" if root else "absent", "yes" if root else "no",
                "network namespaces of the two-host benchmark need it")  # fmt: skip


def _folders(folder: Path) -> Iterator[Check]:
    places = [("study folder", folder), ("working folder", Path.cwd())]
    try:
        places.append(("temporary folder", Path(tempfile.gettempdir())))
    except OSError:  # it looks for one that can be written
        yield Check("temporary folder", "wrong", "none can be written", "name one with TMPDIR")
    for name, place in places:
        exists = next(one for one in (place, *place.parents) if one.is_dir())
        try:
            with tempfile.NamedTemporaryFile(dir=exists, prefix=".hp-tune-doctor"):
                yield Check(name, "ok", f"{place} can be written")
        except OSError as error:
            hint = "write elsewhere with --study and --out"
            yield Check(name, "wrong", f"{place} cannot be written: {error.strerror}", hint)


def _locks(folder: Path) -> Iterator[Check]:
    """Tell locks that a living process holds from files that a dead one left; both are harmless."""
    held, left = [], 0
    for path in sorted(folder.glob("*.flock")) if folder.is_dir() else []:
        try:
            with path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    held.append(f"{path.name} by process {file.read(32).decode().strip() or '?'}")
                else:
                    left += 1
        except OSError as error:
            held.append(f"{path.name}, perhaps: {error.strerror}")
    links = list(folder.glob("*.lock")) if folder.is_dir() else []  # Optuna's own
    told = [f"held: {', '.join(held)}"] if held else []
    told += [f"{left} free"] if left else []
    told += [f"left by a killed writer: {', '.join(p.name for p in links)}"] if links else []
    hint = "the next search breaks a lock that was left, after 3 s" if links else ""
    yield Check("study locks", "ok", "; ".join(told) or "none", hint)


def _environment() -> Iterator[Check]:
    named = os.environ.get(VARIABLE)
    if named:
        try:
            plan = load(named)
        except TuneError as error:
            yield Check(VARIABLE, "wrong", error.message, error.hint)
        else:
            yield Check(VARIABLE, "ok", f"{named}, digest {plan.digest[:12]}")
    for name in ("HP_KERNEL_CONFIGS", "HP_PREFLIGHT", "OMP_NUM_THREADS", "MASTER_ADDR"):
        if os.environ.get(name):
            yield Check(name, "ok", os.environ[name])
    out = "a terminal: tables in its width" if sys.stdout.isatty() else "no terminal: plain text"
    err = "a terminal: long work shows a bar" if sys.stderr.isatty() else "no terminal: no bar"
    yield Check("terminal", "ok", f"stdout is {out}; stderr is {err}")
