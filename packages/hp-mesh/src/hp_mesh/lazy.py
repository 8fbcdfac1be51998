"""Public names that are resolved when they are first used (PEP 562).

``import hp_cp`` must not import torch: the command line reads plans and windows without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package whose names live in ``homes``.

    Args:
        package: ``__name__`` of the package.
        homes: Module of each public name, absolute.
    """

    def resolve(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return resolve, lambda: sorted(homes)
