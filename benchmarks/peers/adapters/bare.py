"""Import one module of a package without running the package's ``__init__``.

Some libraries pull in a cluster runtime or CUDA extensions before their first line of attention.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["import_bare"]


def import_bare(name: str) -> ModuleType:
    """Return module ``name``; packages on the way to it that aren't loaded stay empty shells."""
    parts = name.split(".")
    home = _home(parts[0])
    for depth in range(1, len(parts)):
        package = ".".join(parts[:depth])
        if package not in sys.modules:
            shell = ModuleType(package)
            shell.__path__ = [str(home.joinpath(*parts[1:depth]))]
            sys.modules[package] = shell
    return importlib.import_module(name)


def _home(package: str) -> Path:
    """Return the folder of a package, which may be one of our shells."""
    if package in sys.modules:
        return Path(next(iter(sys.modules[package].__path__)))
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    return Path(next(iter(spec.submodule_search_locations)))
