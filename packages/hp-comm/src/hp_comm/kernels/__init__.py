"""The kernels around the collectives, as torch operators ``hp_comm::*``.

======================================  ==========================================================
operator                                what it does
======================================  ==========================================================
`pack`, `unpack`                        tensors of any strides <-> one send or receive buffer
`pack_heads`, `unpack_heads`            the same, with QK-norm and rotary done on the way
`merge`                                 two partial attentions by log-sum-exp
======================================  ==========================================================

`reference` and `arithmetic` define them in plain torch, which is what runs on a CPU; on a GPU or an
NPU `_triton` runs. ``HP_KERNELS=reference|triton`` forces one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_mesh.lazy import lazy_names

if TYPE_CHECKING:
    from hp_comm.kernels.arithmetic import HeadWork
    from hp_comm.kernels.ops import implementation, pack, unpack
    from hp_comm.kernels.ops_heads import merge, pack_heads, unpack_heads

__all__ = [
    "HeadWork",
    "implementation",
    "merge",
    "pack",
    "pack_heads",
    "unpack",
    "unpack_heads",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "HeadWork": "hp_comm.kernels.arithmetic",
        "implementation": "hp_comm.kernels.ops",
        "merge": "hp_comm.kernels.ops_heads",
        "pack": "hp_comm.kernels.ops",
        "pack_heads": "hp_comm.kernels.ops_heads",
        "unpack": "hp_comm.kernels.ops",
        "unpack_heads": "hp_comm.kernels.ops_heads",
    },
)
