"""The examples run as their first lines say, between processes."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

LLAMA = Path(__file__).resolve().parent.parent / "examples" / "llama_cp.py"


@pytest.fixture(scope="module")
def losses_of_one_process() -> list[float]:
    pytest.importorskip("transformers", reason="the extra is not installed")
    example = runpy.run_path(str(LLAMA))
    model, tokens = example["new_model"](), example["read_tokens"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "options", [[], ["--ulysses-degree", "1", "--load-balance"]], ids=["ulysses", "balanced"]
)
def test_the_llama_example_trains_as_one_process_does(
    options: list[str], losses_of_one_process: list[float]
) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]

    done = subprocess.run(
        [*torchrun, "--nproc-per-node=2", str(LLAMA), *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
    )

    assert done.returncode == 0, done.stderr
    losses = [float(line.rsplit(" ", 1)[1]) for line in done.stdout.splitlines()]
    assert losses == pytest.approx(losses_of_one_process, abs=2e-4)  # printed with 4 digits
