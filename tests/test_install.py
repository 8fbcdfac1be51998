"""Installing a package for real: what pip takes along, and what is left alone (B25)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHARED = sysconfig.get_path("purelib")
NEEDS = {
    "hp-cp": {"hp-mesh", "hp-comm", "hp-cp"},
    "hp-dsa": {"hp-mesh", "hp-comm", "hp-dsa"},
    "hp-tune": {"hp-mesh", "hp-comm", "hp-cp", "hp-dsa", "hp-tune"},
}


def _run(*command: str | Path, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)] if command[0] == "-m" else [*map(str, command)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, **env},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the five wheels as a release would."""
    folder = tmp_path_factory.mktemp("wheels")
    sources = [f"./packages/{name}" for name in NEEDS["hp-tune"]]
    _run("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, *sources)
    return folder


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """Return an environment that has all that is installed here, ours left out.

    Installed is what has metadata: pip reads nothing else to decide what is missing.
    """
    _run("-m", "venv", "--without-pip", tmp_path / "fresh")
    (packages,) = (tmp_path / "fresh").glob("lib/python*/site-packages")
    for found in distributions():
        metadata = Path(str(found._path))  # type: ignore[attr-defined]
        is_ours = found.metadata["Name"].lower().replace("_", "-") in NEEDS["hp-tune"]
        if metadata.is_dir() and not is_ours and not (packages / metadata.name).exists():
            (packages / metadata.name).symlink_to(metadata.resolve())
    return tmp_path / "fresh"


@pytest.mark.parametrize("package", NEEDS)
def test_installing_a_package_takes_its_siblings_and_nothing_else(
    package: str, wheels: Path, fresh: Path, tmp_path: Path
) -> None:
    """With torch there, nothing is downloaded or replaced: no other torch, no vendor, no triton."""
    python, report = fresh / "bin" / "python", tmp_path / "report.json"
    _run(
        "-m", "pip", "--python", python, "install", "-q", "--no-index", "--find-links", wheels,
        "--report", report, package,
    )  # fmt: skip

    taken = {row["metadata"]["name"] for row in json.loads(report.read_text())["install"]}
    assert taken == NEEDS[package]
    module = package.replace("-", "_")
    code = f"import {module} as m; [getattr(m, name) for name in m.__all__]; print(m.__file__)"
    # the code of what was there already; the environment's own packages come from its folder
    assert str(fresh) in _run(python, "-c", code, PYTHONPATH=SHARED)


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_every_install_line_of_the_readme_names_all_siblings(page: str) -> None:
    """No index has them, so pip can only take what the line itself names."""
    lines = [
        line.partition("pip install ")[2].split()
        for line in (ROOT / page).read_text(encoding="utf-8").splitlines()
        if line.startswith("$ python -m pip install ./packages/")
    ]
    named = [{part.removeprefix("./packages/") for part in line} for line in lines]

    assert named == list(NEEDS.values())
