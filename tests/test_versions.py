"""The five packages are released together: one version, exact sibling pins, nothing undeclared."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(path.name for path in (ROOT / "packages").iterdir() if path.is_dir())


def project(package: str) -> dict[str, Any]:
    text = (ROOT / "packages" / package / "pyproject.toml").read_text()
    return tomllib.loads(text)["project"]


def siblings_imported(package: str) -> set[str]:
    found = set()
    for path in (ROOT / "packages" / package / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            found |= {name.split(".")[0].replace("_", "-") for name in names}
    return (found & set(PACKAGES)) - {package}


def test_there_are_five_packages() -> None:
    assert PACKAGES == ["hp-comm", "hp-cp", "hp-dsa", "hp-mesh", "hp-tune"]


def test_all_packages_have_one_version() -> None:
    assert len({project(package)["version"] for package in PACKAGES}) == 1


@pytest.mark.parametrize("package", PACKAGES)
def test_siblings_are_pinned_to_the_same_version(package: str) -> None:
    metadata = project(package)
    optional = metadata.get("optional-dependencies", {}).values()
    requirements = metadata["dependencies"] + [line for extra in optional for line in extra]
    ours = [line for line in requirements if line.startswith("hp-")]
    for line in ours:
        assert re.fullmatch(r"hp-[a-z]+(\[[a-z]+\])?==" + re.escape(metadata["version"]), line)


@pytest.mark.parametrize("package", PACKAGES)
def test_an_imported_sibling_is_a_declared_dependency(package: str) -> None:
    declared = {line.split("==")[0] for line in project(package)["dependencies"]}

    assert siblings_imported(package) <= declared


@pytest.mark.parametrize("package", PACKAGES)
def test_installing_a_package_never_asks_for_a_vendor(package: str) -> None:
    """B25: a floor on torch in hp-mesh alone, so that the build which is installed stays."""
    dependencies = project(package)["dependencies"]
    vendors = [line for line in dependencies if re.match(r"torch|triton|nvidia|cuda", line)]

    assert vendors == (["torch>=2.13"] if package == "hp-mesh" else [])


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_ships_its_types_and_its_licence(package: str) -> None:
    folder = ROOT / "packages" / package

    assert (folder / "src" / package.replace("-", "_") / "py.typed").is_file()
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert project(package)["requires-python"] == ">=3.11"
