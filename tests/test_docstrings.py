"""What is public is documented: each name says what it is, in its own words."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

MODULES = sorted(path.stem for path in (Path(__file__).parent / "public_names").glob("*.txt"))


def own_docstring(found: Any) -> str:
    """Return what was written about it: not inherited, not what dataclass makes up."""
    text = (vars(found).get("__doc__") if inspect.isclass(found) else found.__doc__) or ""
    made_up = inspect.isclass(found) and text.startswith(f"{found.__name__}(")
    return "" if made_up else text.strip()


def public_parts(found: Any) -> dict[str, Any]:
    """Return the methods and properties that a class adds itself."""
    if not inspect.isclass(found) or not found.__module__.startswith("hp_"):
        return {}
    return {
        name: part
        for name, part in vars(found).items()
        if not name.startswith("_")
        and (inspect.isfunction(part) or isinstance(part, property | classmethod | staticmethod))
        and name not in ("model_post_init",)
    }


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_has_a_docstring_of_its_own(name: str) -> None:
    """Modules, classes and functions; of classes also methods, unless they override one."""
    module = importlib.import_module(name)
    bare = [] if own_docstring(module) else [name]
    for public in module.__all__:
        found = getattr(module, public)
        if not (inspect.isclass(found) or inspect.isroutine(found)):
            continue  # a value or a type alias has its text beside it in the source
        if not own_docstring(found):
            bare.append(public)
        for part, member in public_parts(found).items():
            inherited = any(part in vars(base) for base in found.__mro__[1:])
            text = member.fget.__doc__ if isinstance(member, property) else member.__doc__
            if not text and not inherited:
                bare.append(f"{public}.{part}")

    assert bare == []
