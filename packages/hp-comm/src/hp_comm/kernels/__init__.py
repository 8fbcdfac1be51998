"""Pack and unpack for the exchanges, as torch operators ``hp_comm::pack`` and ``hp_comm::unpack``.

`reference` defines them in plain torch. ``HP_KERNELS=reference|triton`` chooses; unset means the
reference until Triton kernels are in the package for the tensor's device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hp_comm.kernels.ops import implementation, pack, unpack

__all__ = ["implementation", "pack", "unpack"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("hp_comm.kernels.ops"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
