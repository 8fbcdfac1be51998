"""The tuner's door to torch and to the kernels as they run, opened in a judging process only.

Importing `hp_tune` never loads torch: modules are found by name, and are ``Any`` here.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from hp_tune.errors import MissingToolsError

__all__ = ["arithmetic", "device_name", "launcher", "reference", "set_launch", "testing", "torch"]


def torch() -> Any:
    """Return torch."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise MissingToolsError(
            f"torch must be installed to run kernels ({error})", "pip install torch"
        ) from None


def reference() -> Any:
    """Return the definition of what moves."""
    return importlib.import_module("hp_comm.kernels.reference")


def arithmetic() -> Any:
    """Return the definition of what computes."""
    return importlib.import_module("hp_comm.kernels.arithmetic")


def testing() -> Any:
    """Return the house's comparison and its table of tolerances."""
    return importlib.import_module("hp_mesh.testing")


def launcher(name: str, *, interpreted: bool = False) -> Any:
    """Return ``launch``, ``launch_heads`` or ``launch_merge``, which need triton."""
    if interpreted:
        os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined
    try:
        return importlib.import_module(f"hp_comm.kernels.{name}")
    except ImportError as error:
        raise MissingToolsError(
            f"triton must be installed to run kernels ({error})",
            "pip install 'hp-comm[cuda]', or 'hp-comm[npu]' on Ascend; never both",
        ) from None


def device_name(x: Any) -> str:
    """Return the device of a tensor as launch configs name it."""
    return str(launcher("launch").device_name(x))


def set_launch(launch: dict[str, int]) -> None:
    """Let every kernel of this process run with ``launch``, whatever its file says."""
    for name in ("launch", "launch_heads", "launch_merge"):
        module = launcher(name)
        module.launch_of = lambda *_: dict(launch)
        planned = getattr(module, "_planned", None)
        if planned is not None:
            planned.cache_clear()
