"""Context-parallel styles for ordinary attention.

Names are resolved when they are first used: ``import hp_cp`` and ``hp_cp.plan`` need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_mesh.lazy import lazy_names

if TYPE_CHECKING:
    from hp_comm.kernels.arithmetic import HeadWork
    from hp_cp.async_style import AsyncContextParallel
    from hp_cp.flex import flex_attention
    from hp_cp.packed import packed_attention
    from hp_cp.plan import Plan, make_plan
    from hp_cp.prepared import PreparedAttention
    from hp_cp.sliding import sliding_window_attention
    from hp_cp.style import ContextParallel
    from hp_mesh.fsdp import check_fsdp_mesh
    from hp_mesh.handoff import Handoff
    from hp_mesh.mesh import flatten_mesh, init_device_mesh
    from hp_mesh.open_views import attention_window
    from hp_mesh.parallelize import parallelize_module

__all__ = [
    "AsyncContextParallel",
    "ContextParallel",
    "Handoff",
    "HeadWork",
    "Plan",
    "PreparedAttention",
    "attention_window",
    "check_fsdp_mesh",
    "flatten_mesh",
    "flex_attention",
    "init_device_mesh",
    "make_plan",
    "packed_attention",
    "parallelize_module",
    "sliding_window_attention",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "AsyncContextParallel": "hp_cp.async_style",
        "ContextParallel": "hp_cp.style",
        "Handoff": "hp_mesh.handoff",
        "HeadWork": "hp_comm.kernels.arithmetic",
        "Plan": "hp_cp.plan",
        "PreparedAttention": "hp_cp.prepared",
        "attention_window": "hp_mesh.open_views",
        "check_fsdp_mesh": "hp_mesh.fsdp",
        "flatten_mesh": "hp_mesh.mesh",
        "flex_attention": "hp_cp.flex",
        "init_device_mesh": "hp_mesh.mesh",
        "make_plan": "hp_cp.plan",
        "packed_attention": "hp_cp.packed",
        "parallelize_module": "hp_mesh.parallelize",
        "sliding_window_attention": "hp_cp.sliding",
    },
)
