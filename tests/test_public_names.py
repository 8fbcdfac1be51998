"""The public surface is written down: a change of it shows in review as a changed text file."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "public_names"
MODULES = sorted(path.stem for path in FOLDER.glob("*.txt"))


def test_every_package_has_its_names_written_down() -> None:
    assert {"hp_mesh", "hp_comm", "hp_cp", "hp_dsa", "hp_tune"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_public_names_are_the_ones_written_down(name: str) -> None:
    module = importlib.import_module(name)
    written = (FOLDER / f"{name}.txt").read_text().split()

    assert sorted(module.__all__) == written


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_resolves_and_is_listed_by_dir(name: str) -> None:
    """Lazy packages promise names before they load them: each promise is kept."""
    module = importlib.import_module(name)

    assert set(module.__all__) <= set(dir(module))
    for public in module.__all__:
        getattr(module, public)


@pytest.mark.parametrize("name", MODULES)
def test_an_unknown_name_is_an_attribute_error_that_names_it(name: str) -> None:
    module = importlib.import_module(name)

    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name
