"""Nothing in the repository depends on the machine or the network it was written on."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
REGISTRY = re.compile(r"\b(?:pypi|pythonhosted|debian|npmjs|download\.pytorch)\.(?:org|com)")
MACHINE_PATH = re.compile(r"""[\s"'=(:`](?:/(?:work|farm|opt|root|home|Users)/|\.\./shared/)""")


def tracked_text() -> list[tuple[str, str]]:
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if names.returncode:
        pytest.skip("not a git checkout: the list of the repository's files comes from git")
    found = []
    for name in filter(None, names.stdout.split("\0")):
        path = ROOT / name
        content = path.read_bytes() if path.is_file() else b""
        if b"\0" not in content:
            found.append((name, content.decode()))
    return found


@pytest.mark.parametrize("pattern", [REGISTRY, MACHINE_PATH], ids=["registry", "machine-path"])
def test_no_file_names_a_registry_host_or_a_path_of_one_machine(pattern: re.Pattern[str]) -> None:
    hits = [
        f"{name}:{number}: {line.strip()}"
        for name, text in tracked_text()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]

    assert hits == []
