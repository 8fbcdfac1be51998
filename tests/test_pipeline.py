"""Pipelines: context parallelism and FSDP within each of two stages, micro-batches in flight."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, _utils
from torch.utils.checkpoint import checkpoint

from hp_comm import count_tokens, fingerprint, global_loss
from hp_cp import AsyncContextParallel, ContextParallel, init_device_mesh
from hp_mesh import next_token_labels, shard_sequence
from hp_mesh.boundary import boundary_of
from hp_mesh.testing import assert_close, randn, ranks

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


class Core(nn.Module):
    """Causal attention on BSHD."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Recomputed(nn.Module):
    """A layer that is computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.core = nn.Linear(12, 36).double(), Core()
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.attend, x, use_reentrant=False)
        return out

    def attend(self, x: Tensor) -> Tensor:
        self.runs += 1
        q, k, v = self.qkv(x).unflatten(-1, (6, 6)).chunk(3, 2)
        return x + self.core(q, k, v).flatten(2)


def test_placeholders_that_are_alike_on_all_ranks_are_no_whole_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch learns shapes from uninitialised memory, forward and backward: computed twice."""
    fingerprint._warned.clear()
    monkeypatch.setattr(
        _utils, "_make_tensor_from_meta", lambda meta, device: randn(*meta.shape, seed=7)
    )
    start = [Recomputed(), Recomputed()]
    whole, target = randn(2, 24, 12, seed=1), randn(2, 24, 12, seed=2)
    alone = start[1](start[0](whole)) - target
    start[0].runs = start[1].runs = 0

    def run(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
        index, losses = mesh.get_local_rank("pp"), list[Tensor]()
        stage = copy.deepcopy(start[index])
        ContextParallel().apply(stage.core, mesh["cp"])
        pipelined = PipelineStage(stage, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = Schedule1F1B(
            pipelined, 2, loss_fn=lambda out, y: (out - y).square().sum(), scale_grads=False
        )
        if index == 0:
            schedule.step(shard_sequence(whole, mesh["cp"]))
            return torch.zeros(())
        schedule.step(target=shard_sequence(target, mesh["cp"]), losses=losses)
        assert stage.runs == 2 + 2 * 2, "the placeholders, and two micro-batches"
        return torch.stack(losses).sum().detach()

    assert_close(sum(ranks(4).run(run)), alone.square().sum().detach(), kind="loss")
