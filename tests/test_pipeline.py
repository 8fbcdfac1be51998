"""Pipelines: context parallelism and FSDP within each of two stages, micro-batches in flight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hp_comm import count_tokens, global_loss
from hp_cp import AsyncContextParallel, ContextParallel, init_device_mesh
from hp_mesh import next_token_labels, shard_sequence
from hp_mesh.boundary import boundary_of
from hp_mesh.testing import assert_close, ranks

from ._llama import (
    BALANCED,
    COLOSSAL,
    HYBRID,
    ULYSSES,
    S,
    alone,
    assert_whole,
    batch,
    example,
    llama,
    rows_of,
)

COUNT = 4


def train(mesh: Any, style: ContextParallel, steps: int) -> Any:
    """Run the pipeline some times from the same weights; assert loss and gradients of each."""
    expected = alone()
    rows = rows_of(batch(0), mesh)
    labels = next_token_labels(rows, mesh["cp"])
    group = mesh["dp_shard", "cp"].flatten(mesh_dim_name="fsdp").get_group()
    total = count_tokens(labels != -100, group)

    def loss_of(logits: Tensor, part: Tensor) -> Tensor:
        each = F.cross_entropy(logits.transpose(1, 2), part, reduction="none", ignore_index=-100)
        return global_loss(each, group, weights=part != -100, total=total)

    stage, schedule = example("cp_pp").build(llama(), mesh, style, loss_of, COUNT, S)
    under_way, most = 0, 0

    def done(grad: Tensor) -> None:
        nonlocal under_way
        under_way -= 1

    def entered(module: Any, args: Any, out: Tensor) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        out.register_hook(done)

    stage.register_forward_hook(entered)
    for _ in range(steps):
        losses: list[Tensor] = []
        if mesh.get_local_rank("pp") == 0:
            schedule.step(shard_sequence(rows, mesh["cp"]))
            # the run in which torch learns the shapes has no backward in the first stage
            assert most - 1 == 2, "1F1B: the first stage is one micro-batch ahead"
        else:
            schedule.step(target=labels, losses=losses)
            assert_close(torch.stack(losses).sum(), expected.losses[0], kind="loss")
        grads = {name: parameter.grad for name, parameter in stage.named_parameters()}
        assert_whole(grads, expected.first, prefix="model.")
        stage.zero_grad()
    return stage


STYLES = [
    (ContextParallel, ULYSSES),
    (AsyncContextParallel, ULYSSES),
    (AsyncContextParallel, COLOSSAL),
    (ContextParallel, BALANCED),
]


@pytest.mark.parametrize(
    ("shape", "styles"),
    [((2, 2, 2), STYLES), ((2, 1, 4), [(AsyncContextParallel, HYBRID)])],
    ids=["2x2x2", "2x1x4"],
)
def test_two_stages_have_the_gradients_of_one_process(
    shape: tuple[int, int, int], styles: list[Any]
) -> None:
    """1F1B with four micro-batches; CP, sync and async, and FSDP over dp_shard x cp in each."""
    alone()  # here: ranks are threads, and would all draw the weights at once

    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp_shard", "cp"))
        for kind, mode in styles:
            is_async = kind is AsyncContextParallel
            stage = train(mesh, kind(**mode), steps=2 if is_async else 1)
            boundary = boundary_of(
                stage.model.layers[str(mesh.get_local_rank("pp"))].attention.sdpa_core
            )
            if is_async:
                handoffs = boundary.handoffs.items()
                assert handoffs and not [name for name, one in handoffs if one.disarmed]

    ranks(8).run(run)
