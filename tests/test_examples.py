"""The examples run as their first lines say, between processes."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_mesh import next_token_labels

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
FORKED = (str(Path(__file__).with_name("_forked.py")),)


def losses_of(launcher: Sequence[str], ranks: int, name: str, *options: str) -> list[float]:
    """Run an example and return the losses that it prints, each at the end of a line."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    done = subprocess.run(
        [sys.executable, *launcher, str(ranks), str(EXAMPLES / name), *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return [float(line.rsplit(" ", 1)[1]) for line in done.stdout.splitlines() if "loss" in line]


@pytest.fixture(scope="module")
def losses_of_one_process() -> list[float]:
    pytest.importorskip("transformers", reason="the extra is not installed")
    example = runpy.run_path(str(EXAMPLES / "llama_cp.py"))
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
    ("launcher", "options"),
    [(TORCHRUN, []), (FORKED, ["--ulysses-degree", "1", "--load-balance"])],
    ids=["ulysses", "balanced"],
)
def test_the_llama_example_trains_as_one_process_does(
    launcher: Sequence[str], options: list[str], losses_of_one_process: list[float]
) -> None:
    losses = losses_of(launcher, 2, "llama_cp.py", *options)

    assert losses == pytest.approx(losses_of_one_process, abs=2e-4)  # printed with 4 digits


@pytest.fixture(scope="module")
def losses_of_the_composition() -> list[float]:
    """Four steps of the model of ``cp_tp_fsdp.py``, without any parallelism."""
    example: dict[str, Any] = runpy.run_path(str(EXAMPLES / "cp_tp_fsdp.py"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = example["Llama"]()
        ids = torch.randint(example["VOCABULARY"], (example["BATCH"], example["LENGTH"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    labels, losses = next_token_labels(ids).flatten(), []
    for _ in range(4):
        logits = model(ids, torch.arange(example["LENGTH"])).flatten(0, 1)
        loss = F.cross_entropy(logits, labels, ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("ranks", "command"),
    [
        pytest.param(8, "cp_tp_fsdp.py --dp 2 --cp 2 --tp 2", id="cp-tp-fsdp"),
        pytest.param(4, "cp_pp.py --cp 2", id="cp-pp"),
    ],
)
def test_the_compositions_train_as_one_process_does(
    ranks: int, command: str, losses_of_the_composition: list[float]
) -> None:
    """TP, CP and FSDP all above 1; a pipeline of two stages with CP and FSDP in each."""
    losses = losses_of(FORKED, ranks, *command.split())

    assert losses == pytest.approx(losses_of_the_composition, rel=1e-4)
