"""A training step with TP 2 x CP 2 x FSDP 2 against FSDP alone, same global batch, on 8 gloo ranks.

The model is the Llama of ``examples/cp_tp_fsdp.py``, larger. Loss and gradients of both are first
held against one process; then rounds are interleaved. ``ratio`` is the median over rounds of the
composed step's wall time over that of FSDP alone: on CPU ranks that share the cores it says what
the composition costs in small collectives and Python, not what it gains in memory.
"""

from __future__ import annotations

import copy
import importlib
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from hp_comm import global_loss
from hp_cp import ContextParallel, check_fsdp_mesh, init_device_mesh, parallelize_module
from hp_mesh import next_token_labels, position_ids, shard_sequence
from hp_mesh.testing import assert_close, count_collectives, ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RANKS, BATCH, LENGTH = 8, 8, 256
AXES = ("dp_shard", "cp", "tp")
SIZES = {"WIDTH": 128, "HEADS": 8, "KV_HEADS": 4, "HEAD_SIZE": 16, "HIDDEN": 256, "VOCABULARY": 256}
MODES: dict[str, dict[str, Any]] = {
    "ulysses": {"ulysses_degree": None},
    "colossal": {"ulysses_degree": 1},
    "colossal, balanced": {"ulysses_degree": 1, "load_balance": True},
}


def run(rounds: int) -> list[dict[str, Any]]:
    """Return a row for each mode."""
    pool = ranks(RANKS, backend="processes")
    results = pool.run(measure, rounds, timeout=1200.0)
    pool.close()
    rows: list[dict[str, Any]] = results[0]
    return rows


def measure(rank: int, rounds: int) -> list[dict[str, Any]]:
    """Check, then time all in interleaved rounds; every rank returns the same rows."""
    torch.set_num_threads(1)
    alone, cube = (
        init_device_mesh("cpu", shape, mesh_dim_names=AXES) for shape in ((8, 1, 1), (2, 2, 2))
    )
    torch.manual_seed(0)
    start, tokens = example().Llama(), torch.randint(SIZES["VOCABULARY"], (BATCH, LENGTH))
    whole = copy.deepcopy(start)
    logits = whole(tokens, torch.arange(LENGTH)).flatten(0, 1)
    expected = F.cross_entropy(logits, next_token_labels(tokens).flatten(), ignore_index=-100)
    expected.backward()

    steps = {"fsdp": Step(start, tokens, alone, None)}
    steps |= {name: Step(start, tokens, cube, mode) for name, mode in MODES.items()}
    sent: dict[str, int] = {}
    for name, step in steps.items():
        with count_collectives() as counted:
            assert_close(step(), expected.detach(), kind="loss", name=name)
        sent[name] = counted.bytes()
        for key, parameter in step.model.named_parameters():
            full = whole.get_parameter(key).grad
            assert_close(parameter.grad.full_tensor(), full, kind="grad", name=f"{name}: {key}")

    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(timed(step))
    reference = times["fsdp"]
    return [
        {
            "case": "FSDP 8" if name == "fsdp" else f"TP 2, CP 2 ({name}), FSDP 2",
            "ms": 1e3 * statistics.median(taken),
            "ratio": statistics.median(a / b for a, b in zip(taken, reference, strict=True)),
            "MB sent by rank 0": sent[name] / 1e6,
            "checked": True,
        }
        for name, taken in times.items()
    ]


def example() -> Any:
    """Return the example's module, with larger sizes."""
    sys.path.insert(0, str(EXAMPLES))
    module = importlib.import_module("cp_tp_fsdp")
    sys.path.remove(str(EXAMPLES))
    for name, size in SIZES.items():
        setattr(module, name, size)
    return module


class Step:
    """Forward and backward of the global batch under one composition."""

    def __init__(
        self,
        start: Any,
        tokens: Tensor,
        mesh: Any,
        mode: dict[str, Any] | None,
    ) -> None:
        self.mesh = mesh
        self.model = copy.deepcopy(start)
        if mode is not None:
            parallelize_module(self.model, self.mesh["tp"], example().tp_plan())
            plan = {"layers.*.attention.sdpa_core": ContextParallel(**mode)}
            parallelize_module(self.model, self.mesh["cp"], plan)
        flat = self.mesh["dp_shard", "cp"].flatten(mesh_dim_name="fsdp")
        for layer in self.model.layers.values():
            fully_shard(layer, mesh=flat)
        fully_shard(self.model, mesh=flat)
        check_fsdp_mesh(self.model, self.mesh)
        self.group = flat.get_group()
        rows = tokens.chunk(self.mesh["dp_shard"].size())[self.mesh.get_local_rank("dp_shard")]
        self.ids = shard_sequence(rows, self.mesh["cp"])
        self.labels = next_token_labels(rows, self.mesh["cp"])
        self.positions = position_ids(self.mesh["cp"], global_length=LENGTH)

    def __call__(self) -> Tensor:
        """Return the loss of the whole batch."""
        self.model.zero_grad()
        logits = self.model(self.ids, self.positions).transpose(1, 2)
        losses = F.cross_entropy(logits, self.labels, reduction="none", ignore_index=-100)
        loss = global_loss(losses, self.group, weights=self.labels != -100)
        loss.backward()
        return loss.detach()


def timed(step: Step) -> float:
    """Return the wall time of one step, the longest over the ranks."""
    dist.barrier()
    start = time.perf_counter()
    step()
    taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return taken.item()
