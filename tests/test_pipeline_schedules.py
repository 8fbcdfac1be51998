"""Every schedule of torch's pipelines, several stages a rank; tensor parallelism within stages."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor

from hp_comm import count_tokens, global_loss
from hp_cp import (
    AsyncContextParallel,
    ContextParallel,
    init_device_mesh,
    parallelize_module,
)
from hp_mesh import next_token_labels, position_ids, shard_sequence
from hp_mesh.boundary import boundary_of
from hp_mesh.testing import assert_close, ranks

from ._llama import BALANCED, COLOSSAL, IDS, ULYSSES, S, example, mean_loss

LAYERS, COUNT = 4, 4
"""Layers of the model, and micro-batches of a step."""

ONE_STAGE = (ScheduleGPipe, Schedule1F1B)
LOOPS = (ScheduleLoopedBFS, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble)
TURNS = (ScheduleZBVZeroBubble, ScheduleDualPipeV)
"""The second stage of a rank counts from the end: 0 and 3, 1 and 2."""


@functools.cache
def _start() -> Any:
    kit = example("cp_tp_fsdp")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kit.Llama()
        model.layers = torch.nn.ModuleDict({str(i): kit.Layer() for i in range(LAYERS)})
        return model.double()


@functools.cache
def alone() -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and gradients of one process; to be called before ranks do, which are threads."""
    model = copy.deepcopy(_start())
    loss = mean_loss(model(IDS, torch.arange(S)), IDS)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def cut(index: int, stages: int, positions: Tensor) -> Any:
    """Return stage ``index`` of ``stages``, which knows the positions of this rank's tokens."""
    model = copy.deepcopy(_start())
    for i in range(LAYERS):
        if i * stages // LAYERS != index:
            del model.layers[str(i)]
    if index > 0:
        model.tok_embeddings = None
    if index < stages - 1:
        model.norm = model.output = None
    return example("cp_pp").Stage(model, positions)


def places(kind: type, rank: int, size: int) -> Sequence[int]:
    """Return the stages of a rank."""
    if kind in ONE_STAGE:
        return [rank]
    return [rank, 2 * size - 1 - rank] if kind in TURNS else [rank, rank + size]


def put_tp(stage: Any, mesh: Any) -> None:
    """Apply what the stage has modules for of the example's plan."""
    has = [name for name, _ in stage.model.named_modules()]
    plan = {
        key: style
        for key, style in example("cp_tp_fsdp").tp_plan().items()
        if any(name.endswith(key.rpartition("*.")[2]) for name in has)
    }
    parallelize_module(stage.model, mesh["tp"], plan)


def put_cp(stage: Any, mesh: Any, style: ContextParallel) -> None:
    for layer in stage.model.layers.values():
        a = layer.attention
        ahead = (a.q_ready, a.k_ready, a.wv) if isinstance(style, AsyncContextParallel) else ()
        style.apply(a.sdpa_core, mesh["cp"], *ahead)


def put_fsdp(stage: Any, mesh: Any) -> None:
    for layer in stage.model.layers.values():
        fully_shard(layer, mesh=mesh["cp"], reshard_after_forward=False)
    fully_shard(stage, mesh=mesh["cp"], reshard_after_forward=False)


def train(mesh: Any, kind: Any, style: ContextParallel, *, fsdp: bool = False) -> list[Any]:
    """Run a schedule for a step; assert the loss and every gradient; return the rank's stages."""
    wanted, grads = alone()
    rank, size, group = mesh.get_local_rank("pp"), mesh["pp"].size(), mesh.get_group("cp")
    labels = next_token_labels(IDS, mesh["cp"])
    total = count_tokens(labels != -100, group)

    def loss_of(logits: Tensor, part: Tensor) -> Tensor:
        each = F.cross_entropy(logits.transpose(1, 2), part, reduction="none", ignore_index=-100)
        divisor = group.size() if fsdp else 1
        weights = part != -100
        return global_loss(each, group, weights=weights, total=total, gradient_divisor=divisor)

    indices = places(kind, rank, size)
    count = size * len(indices)
    stages = [cut(i, count, position_ids(mesh["cp"], global_length=S)) for i in indices]
    for stage in stages:
        if "tp" in mesh.mesh_dim_names:
            put_tp(stage, mesh)
        put_cp(stage, mesh, style)
        if fsdp:
            put_fsdp(stage, mesh)
    pipelined = [
        PipelineStage(stage, i, count, torch.device("cpu"), group=mesh.get_group("pp"))
        for i, stage in zip(indices, stages, strict=True)
    ]
    given = pipelined[0] if kind in ONE_STAGE else pipelined
    schedule = kind(given, COUNT, loss_fn=loss_of, scale_grads=False)
    losses: list[Tensor] = []
    inputs = (shard_sequence(IDS, mesh["cp"]),) if 0 in indices else ()
    last = {"target": labels, "losses": losses} if count - 1 in indices else {}
    schedule.step(*inputs, **last)
    if last:
        assert_close(torch.stack(losses).sum(), wanted, kind="loss")
    for stage in stages:
        for name, p in stage.model.named_parameters():
            assert p.grad is not None, name
            assert_close(_whole(p.grad, group, fsdp), grads[name], kind="grad", name=name)
    return stages


def _whole(grad: Tensor, group: Any, fsdp: bool) -> Tensor:
    full = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
    if not fsdp:
        dist.all_reduce(full, group=group)
    return full


def _handoffs_hold(stages: list[Any]) -> None:
    for stage in stages:
        for layer in stage.model.layers.values():
            handoffs = boundary_of(layer.attention.sdpa_core).handoffs.values()
            assert handoffs and not any(one.disarmed for one in handoffs)


@pytest.mark.parametrize("kind", [ScheduleGPipe, *LOOPS, *TURNS], ids=lambda x: x.__name__)
def test_every_schedule_has_the_gradients_of_one_process(kind: Any) -> None:
    """Two ranks of a pipeline, two of CP; sync, async, K and V gathered again; FSDP within stages.

    Zero-bubble schedules run backward in two parts, for inputs and for weights.
    """
    alone()

    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
        train(mesh, kind, ContextParallel(**ULYSSES), fsdp=True)
        _handoffs_hold(train(mesh, kind, AsyncContextParallel(**COLOSSAL), fsdp=True))
        if kind in (ScheduleInterleavedZeroBubble, *TURNS):
            train(mesh, kind, ContextParallel(**COLOSSAL, keep_kv=False), fsdp=True)

    ranks(4).run(run)


@pytest.mark.parametrize(
    ("kind", "modes"),
    [(Schedule1F1B, (ULYSSES, BALANCED)), (ScheduleInterleaved1F1B, (COLOSSAL,))],
    ids=lambda x: x.__name__ if isinstance(x, type) else "",
)
def test_tp_and_cp_within_the_stages_of_a_pipeline(kind: Any, modes: Sequence[Any]) -> None:
    """Two ranks each of PP, CP and TP; attention is handed its heads as DTensors."""
    alone()

    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "cp", "tp"))
        for mode in modes:
            train(mesh, kind, ContextParallel(**mode))

    ranks(8).run(run)
