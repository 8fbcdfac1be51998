"""The DSA styles on the boundaries of one layer."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from hp_dsa.async_style import (
    AsyncDSAIndexerContextParallel,
    AsyncDSAIndexerLossContextParallel,
    AsyncDSASparseAttentionContextParallel,
)
from hp_dsa.gather_cache import DSAGatherCache
from hp_dsa.plan import DSAPlan
from hp_dsa.styles import (
    DSAIndexerContextParallel,
    DSAIndexerLossContextParallel,
    DSASparseAttentionContextParallel,
)
from hp_mesh.boundary import boundary_of

__all__ = ["apply_styles", "remove_styles"]

_BOUNDARIES = ("select_keys", "sparse_attention", "indexer_loss")


def apply_styles(
    layer: Any, mesh: DeviceMesh, *, plan: DSAPlan, keep_keys: bool, overlap: bool
) -> None:
    """Put the styles on a prepared attention layer; its three boundaries share their gathers."""
    options: dict[str, Any] = {
        "layout": plan.layout,
        "load_balance": plan.load_balance,
        "keep_keys": keep_keys,
    }
    dense = layer.sparse_attention.dense
    variant = "dense" if dense else "sparse"
    DSAGatherCache().apply(layer)
    if not overlap:
        DSASparseAttentionContextParallel(**options).apply(layer.sparse_attention, mesh)
        if layer.select_keys is not None:
            DSAIndexerContextParallel(**options).apply(layer.select_keys, mesh)
        if layer.indexer_loss is not None:
            loss = DSAIndexerLossContextParallel(loss_variant=variant, **options)
            loss.apply(layer.indexer_loss, mesh)
        return
    AsyncDSASparseAttentionContextParallel(**options).apply(
        layer.sparse_attention,
        mesh,
        key_handoff=layer.latent_ready,
        value_handoff=layer.latent_ready,
        key_rope_handoff=layer.key_rope_ready,
    )
    if layer.select_keys is not None:
        AsyncDSAIndexerContextParallel(**options).apply(
            layer.select_keys, mesh, key_handoff=layer.key_index_ready
        )
    if layer.indexer_loss is not None:
        # the loss finds its keys in the cache; a dense one is the first to ask for the index key
        AsyncDSAIndexerLossContextParallel(loss_variant=variant, **options).apply(
            layer.indexer_loss,
            mesh,
            key_index_handoff=layer.key_index_ready if dense else None,
        )


def remove_styles(layer: Any) -> None:
    """Take the styles off again, as many as there are."""
    DSAGatherCache().remove(layer)
    for name in _BOUNDARIES:
        core = getattr(layer, name, None)
        boundary: Any = None if core is None else boundary_of(core)
        if boundary is not None:
            boundary.style.remove(core)
