"""Which implementation runs: the one place that looks at the device."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import cast

from torch import Tensor

from hp_dsa.ops.contract import Operators
from hp_mesh.checks import fail

__all__ = ["implementation"]

_HOMES = {
    "reference": "hp_dsa.ops.reference",
    "tiled": "hp_dsa.ops.tiled",
    "triton": "hp_dsa.ops.launch",
    "npu": "hp_dsa._npu",
}


def implementation(x: Tensor) -> Operators:
    """Return the operators for ``x``'s device: ``HP_DSA``, torch_npu on npu, or tiled."""
    name = os.environ.get("HP_DSA") or ("npu" if x.device.type == "npu" else "tiled")
    if name not in _HOMES:
        raise fail("hp_dsa.ops", f"HP_DSA ({name!r}) must be one of {', '.join(_HOMES)}")
    if name == "triton":
        _require_triton(x.device.type)
    return cast(Operators, importlib.import_module(_HOMES[name]))


def _require_triton(device_type: str) -> None:
    if importlib.util.find_spec("triton") is None:
        raise ImportError(
            "hp_dsa.ops: HP_DSA (triton) must name installed kernels, but triton cannot be "
            "imported; install hp-dsa[cuda], or use HP_DSA=tiled"
        )
    if device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise fail(
            "hp_dsa.ops",
            f"HP_DSA (triton) must be used with tensors on cuda, not on {device_type}",
            "use HP_DSA=tiled, or TRITON_INTERPRET=1 to debug the kernels",
        )
