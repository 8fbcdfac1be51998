"""How soon ``hp-tune search`` answers, against ``import optuna``.

CPU time of processes, user and system, interleaved: an analytic search of one model, cluster and
length from start to end, twice the import at most, and the same with its study there; and a joint
space of configurations and launches with at least 10,000 points, priced and recorded, in 10 seconds
at most. Ratios are medians over rounds of quotients within a round.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SEARCH = ["-m", "hp_tune", "search", "--model", "Qwen2.5-7B", "--cluster", "atlas-800t-a2"]
ONE = [*SEARCH, "--cp", "8", "--seq", "64K"]
JOINT = [*SEARCH, "--cp", "8", "--seq", "64K", "--handoffs", "--kernels", "ascend910b3",
         "--study", "s.journal"]  # fmt: skip
IMPORT = ["-c", "import optuna"]
TIMES, SECONDS, POINTS = 2.0, 10.0, 10_000


def run(rounds: int) -> list[dict[str, Any]]:
    """Return a row for the small search, one for it again, and one for the joint space."""
    with tempfile.TemporaryDirectory() as folder:
        imports, searches, again, joints = [], [], [], []
        for _ in range(rounds):
            for journal in Path(folder).rglob("*.journal"):
                journal.unlink()
            imports.append(seconds(IMPORT, folder))
            searches.append(seconds(ONE, folder))
            again.append(seconds(ONE, folder))
            joints.append(seconds(JOINT, folder))
        points = sum(1 for line in (Path(folder) / "s.kernels.journal").open() if '"point"' in line)
        is_written = (Path(folder) / "plan.json").is_file()
    joint = statistics.median(joints)
    return [
        row("search", searches, imports, _ratio(searches, imports), TIMES, is_written),
        row("the same again", again, imports, _ratio(again, imports), TIMES, is_written),
        {
            **row("joint space", joints, imports, joint, SECONDS, points >= POINTS),
            "case": f"joint space, {points} points (value and limit in s)",
        },
    ]


def _ratio(own: Sequence[float], imports: Sequence[float]) -> float:
    return statistics.median(s / i for s, i in zip(own, imports, strict=True))


def row(
    case: str,
    own: Sequence[float],
    imports: Sequence[float],
    value: float,
    limit: float,
    is_right: bool,
) -> dict[str, Any]:
    """Return one line of the table."""
    return {
        "case": f"{case} / import optuna (value and limit are ratios)",
        "CPU s": statistics.median(own),
        "import s": statistics.median(imports),
        "value": value,
        "limit": limit,
        "holds": value <= limit,
        "checked": is_right,
    }


def seconds(arguments: Sequence[str], folder: str) -> float:
    """Return the CPU seconds of a Python process."""
    before = os.times()
    subprocess.run([sys.executable, *arguments], cwd=folder, check=True, capture_output=True)
    after = os.times()
    user = after.children_user - before.children_user
    return user + after.children_system - before.children_system
