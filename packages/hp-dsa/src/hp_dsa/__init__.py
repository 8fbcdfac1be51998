"""Context parallelism for DeepSeek Sparse Attention.

The operators are in `hp_dsa.ops`. Names are resolved when they are first used: ``import hp_dsa``
and ``hp_dsa.plan`` need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_mesh.lazy import lazy_names

if TYPE_CHECKING:
    from hp_dsa.async_style import (
        AsyncDSAIndexerContextParallel,
        AsyncDSAIndexerLossContextParallel,
        AsyncDSASparseAttentionContextParallel,
    )
    from hp_dsa.gather_cache import DSAGatherCache
    from hp_dsa.loss import normalize_loss
    from hp_dsa.plan import DSAPlan, make_plan
    from hp_dsa.styles import (
        DSAIndexerContextParallel,
        DSAIndexerLossContextParallel,
        DSASparseAttentionContextParallel,
    )
    from hp_mesh import attention_window, flatten_mesh, init_device_mesh, parallelize_module
    from hp_mesh.fsdp import check_fsdp_mesh
    from hp_mesh.handoff import Handoff

__all__ = [
    "AsyncDSAIndexerContextParallel",
    "AsyncDSAIndexerLossContextParallel",
    "AsyncDSASparseAttentionContextParallel",
    "DSAGatherCache",
    "DSAIndexerContextParallel",
    "DSAIndexerLossContextParallel",
    "DSAPlan",
    "DSASparseAttentionContextParallel",
    "Handoff",
    "attention_window",
    "check_fsdp_mesh",
    "flatten_mesh",
    "init_device_mesh",
    "make_plan",
    "normalize_loss",
    "parallelize_module",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "AsyncDSAIndexerContextParallel": "hp_dsa.async_style",
        "AsyncDSAIndexerLossContextParallel": "hp_dsa.async_style",
        "AsyncDSASparseAttentionContextParallel": "hp_dsa.async_style",
        "DSAGatherCache": "hp_dsa.gather_cache",
        "DSAIndexerContextParallel": "hp_dsa.styles",
        "DSAIndexerLossContextParallel": "hp_dsa.styles",
        "DSAPlan": "hp_dsa.plan",
        "DSASparseAttentionContextParallel": "hp_dsa.styles",
        "Handoff": "hp_mesh.handoff",
        "attention_window": "hp_mesh.open_views",
        "check_fsdp_mesh": "hp_mesh.fsdp",
        "flatten_mesh": "hp_mesh.mesh",
        "init_device_mesh": "hp_mesh.mesh",
        "make_plan": "hp_dsa.plan",
        "normalize_loss": "hp_dsa.loss",
        "parallelize_module": "hp_mesh.parallelize",
    },
)
