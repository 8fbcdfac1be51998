"""TP, CP and FSDP together say the same whatever the layout of the ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def losses(name: str, ranks: int, *arguments: str) -> list[float]:
    launcher = ["-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}"]
    launcher += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / name), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(line.split()[-1]) for line in done.stdout.splitlines() if "loss" in line]


def test_tp_cp_fsdp_trains_alike_in_every_layout_of_the_ranks() -> None:
    """The losses of four steps are those of one rank: gradients are right, not only the output."""
    one = losses("tp_cp_fsdp.py", 1, "--dp=1", "--cp=1", "--tp=1")
    assert len(one) == 4
    assert one[-1] < one[0]

    cp_tp = losses("tp_cp_fsdp.py", 4, "--cp=2", "--tp=2")
    dp_cp = losses("tp_cp_fsdp.py", 4, "--dp=2", "--cp=2", "--tp=1", "--ulysses-degree=1")

    assert cp_tp == pytest.approx(one, rel=1e-4)
    assert dp_cp == pytest.approx(one, rel=1e-4)
