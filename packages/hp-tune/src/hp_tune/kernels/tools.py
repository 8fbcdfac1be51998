"""Find the Ascend compiler that pip installed, and stand in for the one part it lacks.

The wheel ``ascendnpu-ir`` carries ``bishengir-compile``, which takes a kernel down to HIVM: buffers
placed, synchronisation inserted. The last step, HIVM to a binary, is ``hivmc`` of CANN, which no
wheel has. A stand-in that answers ``--version`` and exits 0 lets the compiler end in good order; so
what is checked is everything up to HIVM, and no binary is made.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from hp_tune.errors import MissingToolsError

__all__ = ["AscendTools", "find_ascend_tools", "write_hivmc_stand_in"]

_INSTALL = (
    "make an environment for it (triton-ascend replaces PyPI's triton, never install both): "
    "nox -s npu_compile, or pip install triton-ascend pybind11 ascendnpu-ir"
)
_STAND_IN = """#!/bin/sh
# Stand-in for hivmc, which ships with CANN only: it compiles nothing.
[ "$1" = "--version" ] && echo "hivmc stand-in"
exit 0
"""


@dataclass(frozen=True, slots=True)
class AscendTools:
    """Where the compiler is, and which one."""

    bishengir: Path
    triton_ascend: str
    ascendnpu_ir: str

    @property
    def versions(self) -> str:
        """One line for a report."""
        return f"triton-ascend {self.triton_ascend}, ascendnpu-ir {self.ascendnpu_ir}"


def find_ascend_tools() -> AscendTools:
    """Return the compiler of this Python's environment, or say which part is missing."""
    triton_ascend = _version("triton-ascend")
    if triton_ascend is None:
        have = "PyPI's triton is" if importlib.util.find_spec("triton") else "no triton is"
        raise MissingToolsError(f"triton-ascend must be installed; here {have}", _INSTALL)
    if importlib.util.find_spec("pybind11") is None:
        raise MissingToolsError(
            "pybind11 must be installed: triton-ascend imports it without asking for it", _INSTALL
        )
    ascendnpu_ir = _version("ascendnpu-ir")
    spec = importlib.util.find_spec("ascendnpuir")
    if ascendnpu_ir is None or spec is None or not spec.submodule_search_locations:
        raise MissingToolsError("ascendnpu-ir must be installed: it has the compiler", _INSTALL)
    bishengir = Path(spec.submodule_search_locations[0]) / "bin" / "bishengir-compile"
    if not os.access(bishengir, os.X_OK):
        raise MissingToolsError(
            f"ascendnpu-ir ({ascendnpu_ir}) must carry bin/bishengir-compile for this machine",
            "the wheel that was tried is for Linux on x86-64",
        )
    return AscendTools(bishengir, triton_ascend, ascendnpu_ir)


def write_hivmc_stand_in(folder: Path) -> None:
    """Write an ``hivmc`` that only answers into ``folder``."""
    path = folder / "hivmc"
    path.write_text(_STAND_IN, encoding="utf-8")
    path.chmod(0o755)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
