"""Context parallelism for DeepSeek Sparse Attention: the place where its styles will live.

This version has no style yet. It re-exports what a script sets its mesh up with, so that code
written against it keeps its imports when the styles arrive; asking for a style says so.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

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


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(importlib.import_module("hp_mesh"), name)
    if name in _LATER:
        raise AttributeError(
            f"hp_dsa: {name} is not in this version; "
            "for ordinary attention use hp_cp.ContextParallel"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
