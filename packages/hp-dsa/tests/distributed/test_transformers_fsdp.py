"""`prepare_model`, then fully_shard: averaged gradients are those of the step's loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hp_comm import count_tokens
from hp_dsa import init_device_mesh
from hp_mesh import shard_sequence
from hp_mesh.testing import assert_close, ranks

pytest.importorskip("transformers", reason="the extra is not installed")

from hp_dsa.transformers import indexer_loss, prepare_model

from ._tiny import IDS, B, S, build, exact, lm_loss


def _sharded(rank: int) -> dict[str, Tensor]:
    """Two rows of the batch on two data-parallel ranks, each sequence on two CP ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
    model = prepare_model(build("glm"), mesh["cp"], load_balance=True, overlap=True)
    data_mesh = mesh["dp_shard", "cp"].flatten(mesh_dim_name="fsdp")
    for layer in model.model.layers:
        fully_shard(layer, mesh=data_mesh)
    fully_shard(model, mesh=data_mesh)

    row = IDS[mesh.get_local_rank("dp_shard")][None]
    ids = shard_sequence(row, mesh["cp"], order="head_tail")
    total = count_tokens(torch.ones_like(ids, dtype=torch.bool), data_mesh.get_group())
    for _ in range(2):
        model.zero_grad()
        out = model(input_ids=ids, labels=row)
        (out.loss + indexer_loss(model, total=total, gradient_divisor=4)).backward()
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor), name
        found[name] = parameter.grad.full_tensor()
    return found


def test_gradients_are_averaged_over_data_and_context_ranks() -> None:
    with exact():
        model = prepare_model(build("glm"))
        logits = model(input_ids=IDS).logits
        (lm_loss(logits) + indexer_loss(model, total=B * S)).backward()
        outcomes = ranks(4).run(_sharded)

    for got in outcomes:
        for name, parameter in model.named_parameters():
            assert_close(got[name], parameter.grad, kind="grad", name=name)
