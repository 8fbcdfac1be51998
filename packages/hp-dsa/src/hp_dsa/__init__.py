"""Context parallelism for DeepSeek Sparse Attention: the place where its styles will live.

This version has no style yet. It re-exports what a script sets its mesh up with, so that code
written against it keeps its imports when the styles arrive; asking for a style says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_mesh.lazy import lazy_names

if TYPE_CHECKING:
    from hp_mesh import flatten_mesh, init_device_mesh, parallelize_module

__all__ = ["flatten_mesh", "init_device_mesh", "parallelize_module"]

# the styles that users of the guide will look for here
_LATER = frozenset(
    prefix + name
    for prefix in ("", "Async")
    for name in (
        "DSAIndexerContextParallel",
        "DSAIndexerLossContextParallel",
        "DSASparseAttentionContextParallel",
    )
)


_resolve, __dir__ = lazy_names(
    __name__,
    {
        "flatten_mesh": "hp_mesh.mesh",
        "init_device_mesh": "hp_mesh.mesh",
        "parallelize_module": "hp_mesh.parallelize",
    },
)


def __getattr__(name: str) -> object:
    if name in _LATER:
        raise AttributeError(
            f"hp_dsa: {name} is not in this version; "
            "for ordinary attention use hp_cp.ContextParallel"
        )
    return _resolve(name)
