"""Meshes, placements and the boundary at which attention sees the whole sequence.

Names are resolved when they are first used; `hp_mesh.window` and `hp_mesh.checks` need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_mesh.lazy import lazy_names

if TYPE_CHECKING:
    from hp_mesh.boundary import BoundaryStyle
    from hp_mesh.fsdp import check_fsdp_mesh
    from hp_mesh.handlers import register_handler
    from hp_mesh.layout import Layout, layout
    from hp_mesh.mesh import Mesh, flatten_mesh, init_device_mesh, split_cp_mesh
    from hp_mesh.open_views import attention_window
    from hp_mesh.packing import (
        PackedShard,
        local_cu_seqlens,
        pack_documents,
        shard_packed,
        unpack_documents,
    )
    from hp_mesh.parallelize import parallelize_module
    from hp_mesh.sequence import (
        join_sequence,
        multiple_for,
        next_token_labels,
        pad_sequence,
        position_ids,
        shard_sequence,
    )
    from hp_mesh.window import AttentionWindow

__all__ = [
    "AttentionWindow",
    "BoundaryStyle",
    "Layout",
    "Mesh",
    "PackedShard",
    "attention_window",
    "check_fsdp_mesh",
    "flatten_mesh",
    "init_device_mesh",
    "join_sequence",
    "layout",
    "local_cu_seqlens",
    "multiple_for",
    "next_token_labels",
    "pack_documents",
    "pad_sequence",
    "parallelize_module",
    "position_ids",
    "register_handler",
    "shard_packed",
    "shard_sequence",
    "split_cp_mesh",
    "unpack_documents",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "AttentionWindow": "hp_mesh.window",
        "BoundaryStyle": "hp_mesh.boundary",
        "Layout": "hp_mesh.layout",
        "Mesh": "hp_mesh.mesh",
        "PackedShard": "hp_mesh.packing",
        "attention_window": "hp_mesh.open_views",
        "check_fsdp_mesh": "hp_mesh.fsdp",
        "flatten_mesh": "hp_mesh.mesh",
        "init_device_mesh": "hp_mesh.mesh",
        "join_sequence": "hp_mesh.sequence",
        "layout": "hp_mesh.layout",
        "local_cu_seqlens": "hp_mesh.packing",
        "multiple_for": "hp_mesh.sequence",
        "next_token_labels": "hp_mesh.sequence",
        "pack_documents": "hp_mesh.packing",
        "pad_sequence": "hp_mesh.sequence",
        "parallelize_module": "hp_mesh.parallelize",
        "position_ids": "hp_mesh.sequence",
        "register_handler": "hp_mesh.handlers",
        "shard_packed": "hp_mesh.packing",
        "shard_sequence": "hp_mesh.sequence",
        "split_cp_mesh": "hp_mesh.mesh",
        "unpack_documents": "hp_mesh.packing",
    },
)
