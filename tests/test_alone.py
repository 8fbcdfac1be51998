"""Each package works with only what it declares: everything else that is installed is blocked."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PACKAGES = ["hp-mesh", "hp-comm", "hp-cp", "hp-dsa", "hp-tune"]
TORCH_FREE = [
    "hp_mesh.documents",
    "hp_mesh.window",
    "hp_mesh.checks",
    "hp_cp.plan",
    "hp_dsa.plan",
    "hp_comm.kernels.config",
    "hp_tune",
]

# runs first in the child: a blocked name is not found, as it is where it is not installed
BLOCK = """
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        blocked = name.partition(".")[0] in BLOCKED
        return None if blocked else self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


def dependencies(distribution: str) -> list[str]:
    folder = ROOT / "packages" / distribution
    if folder.is_dir():
        text = (folder / "pyproject.toml").read_text()
        lines = tomllib.loads(text)["project"]["dependencies"]
    else:
        lines = importlib.metadata.requires(distribution) or []
    parsed = [Requirement(line) for line in lines]
    return [p.name.lower() for p in parsed if p.marker is None or p.marker.evaluate({"extra": ""})]


def closure(package: str) -> set[str]:
    found, queue = {package}, [package]
    while queue:
        try:
            new = set(dependencies(queue.pop())) - found
        except importlib.metadata.PackageNotFoundError:
            continue
        found |= new
        queue += new
    return {name.replace("_", "-") for name in found}


def blocked_for(package: str) -> set[str]:
    inside = closure(package)
    outside = {name.replace("-", "_") for name in PACKAGES if name not in inside}
    for module, owners in importlib.metadata.packages_distributions().items():
        if not {owner.lower().replace("_", "-") for owner in owners} & inside:
            outside.add(module)
    ours = {name.replace("-", "_") for name in PACKAGES if name in inside}
    return (outside | {"triton", "torch_npu"}) - ours - {"pip", "pkg_resources", "setuptools"}


def run_blocked(blocked: set[str], code: str) -> subprocess.CompletedProcess[str]:
    program = f"BLOCKED = {sorted(blocked)!r}\n{BLOCK}\n{code}"
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_computes_with_everything_outside_its_closure_blocked(package: str) -> None:
    script = Path(__file__).parent / "alone" / f"{package.replace('-', '_')}.py"
    code = f"import runpy\nrunpy.run_path({str(script)!r}, run_name='__main__')"

    done = run_blocked(blocked_for(package), code)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", TORCH_FREE)
def test_planning_imports_without_torch(module: str) -> None:
    done = run_blocked({"torch", "numpy"}, f"import {module}")

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("order", [PACKAGES, PACKAGES[::-1]], ids=["downwards", "upwards"])
def test_packages_import_in_any_order_without_a_warning_and_without_vendors(
    order: list[str],
) -> None:
    """B24: no import of a package looks for an accelerator library."""
    names = [package.replace("-", "_") for package in order]
    code = f"""
import sys, warnings
warnings.simplefilter("error")
import {", ".join(names)}
assert "torch" not in sys.modules, "a package's public names are not lazy"
"""

    done = run_blocked({"triton", "torch_npu", "transformers"}, code)

    assert done.returncode == 0, done.stderr
