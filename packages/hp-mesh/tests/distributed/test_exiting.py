"""A process that ends right after a collective ends well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import hp_mesh.boundary
import hp_mesh.mesh
from hp_mesh import init_device_mesh
from hp_mesh.boundary import Boundary, BoundaryStyle
from hp_mesh.testing import ranks

# The worst case, which happens by chance otherwise: gloo's thread waits for the interpreter until
# this process ends, because the main thread never gives it up. Forked, so that torch loads once.
SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
from hp_mesh.exiting import wait_for_gloo_at_exit

def child(store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    wait_for_gloo_at_exit()
    sys.setswitchinterval(100)
    dist.all_gather([torch.ones(1)], torch.ones(1), async_op=True)
    end = time.perf_counter() + 0.3
    while time.perf_counter() < end:
        pass
    sys.exit(0)

for number in range(3):
    pid = os.fork()
    if pid == 0:
        child(f"{sys.argv[1]}/{number}")
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks after torch has loaded")
def test_gloo_lets_go_before_the_interpreter_ends(tmp_path: Path) -> None:
    """Without the pause most of these children are aborted: all that gloo's thread gets to wait."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    assert ended.stdout.split() == ["0"] * 3


class NoBoundary(BoundaryStyle):
    def make_boundary(self, module: nn.Module, device_mesh: DeviceMesh) -> Boundary[Any]:
        raise NotImplementedError


def test_whoever_makes_a_mesh_or_applies_a_style_is_protected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A style may be applied by itself, by a plan, by another library, and on a mesh of torch."""
    asked: list[str] = []
    monkeypatch.setattr(hp_mesh.mesh, "wait_for_gloo_at_exit", lambda: asked.append("mesh"))
    monkeypatch.setattr(hp_mesh.boundary, "wait_for_gloo_at_exit", lambda: asked.append("style"))

    def attempt(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        with pytest.raises(NotImplementedError):
            NoBoundary().apply(nn.Linear(1, 1), mesh)

    ranks(1).run(attempt)
    assert asked == ["mesh", "style"]
