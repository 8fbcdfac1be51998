"""The Llama of the examples in float64, and how one process trains it."""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_comm import global_loss
from hp_mesh import next_token_labels, position_ids, shard_sequence
from hp_mesh.testing import assert_close

EXAMPLES = Path(__file__).parent.parent / "examples"
B, S, STEPS = 8, 24, 3
IDS = torch.randint(0, 61, (B, S), generator=torch.Generator().manual_seed(3))
RIGHT, LEFT = ("dp_shard", "cp", "tp"), ("dp_shard", "tp", "cp")
ULYSSES: dict[str, Any] = {}
COLOSSAL = {"ulysses_degree": 1}
HYBRID = {"ulysses_degree": 2}
BALANCED = {"ulysses_degree": 1, "load_balance": True}


@functools.cache
def example(name: str) -> Any:
    """Return a module of the examples."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))


@functools.cache
def _start() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return example("cp_tp_fsdp").Llama().double()


def llama() -> Any:
    """Return a new model, with the same weights each time."""
    return copy.deepcopy(_start())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW; its weight decay touches parameters without a gradient, too."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def mean_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the loss of whole sequences."""
    labels = next_token_labels(ids).flatten()
    return F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100)


def batch(step: int) -> Tensor:
    """Return the token ids of a step, ``[B, S]``."""
    return IDS.roll(step, 1)


def rows_of(ids: Tensor, mesh: Any) -> Tensor:
    """Return the sequences of this rank's replica."""
    return ids.chunk(mesh["dp_shard"].size())[mesh.get_local_rank("dp_shard")]


def sharded_loss(model: Any, rows: Tensor, mesh: Any, total: Tensor | None = None) -> Tensor:
    """Return the loss of the whole batch from this rank's part of some sequences of its replica."""
    labels = next_token_labels(rows, mesh["cp"])
    places = position_ids(mesh["cp"], global_length=S)
    out = model(shard_sequence(rows, mesh["cp"]), places).transpose(1, 2)
    losses = F.cross_entropy(out, labels, reduction="none", ignore_index=-100)
    group = mesh["dp_shard", "cp"].flatten(mesh_dim_name="fsdp").get_group()
    return global_loss(losses, group, weights=labels != -100, total=total)


@dataclass
class Trained:
    """What one process has: losses, the gradients of the first step, parameters after the last."""

    losses: list[Tensor]
    first: dict[str, Tensor]
    parameters: dict[str, Tensor]


def train_alone(model: Any, loss_of: Callable[[Tensor], Tensor]) -> Trained:
    """Train for `STEPS` steps."""
    optimizer = optimizer_of(model)
    losses: list[Tensor] = []
    first: dict[str, Tensor] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(batch(step))
        loss.backward()
        first = first or {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        losses.append(loss.detach())
    return Trained(losses, first, {name: p.detach() for name, p in model.named_parameters()})


@functools.cache
def alone() -> Trained:
    """Return what one process has; call it before ranks do, which are threads."""
    model = llama()
    return train_alone(model, lambda ids: mean_loss(model(ids, torch.arange(S)), ids))


def assert_whole(
    actual: dict[str, Any], expected: dict[str, Tensor], name: str = "", *, prefix: str = ""
) -> None:
    """Assert that DTensors (parameters, gradients) are the whole ones of one process."""
    for key, x in actual.items():
        full = expected[key.removeprefix(prefix)]
        assert_close(x.full_tensor(), full, kind="grad", name=f"{name}: {key}")
