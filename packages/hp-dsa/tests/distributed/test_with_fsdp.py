"""FSDP over data-parallel and CP ranks, as the guide orders it: CP first, then `fully_shard`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hp_dsa import (
    DSAIndexerContextParallel,
    DSAIndexerLossContextParallel,
    DSASparseAttentionContextParallel,
    init_device_mesh,
    normalize_loss,
)
from hp_mesh.testing import assert_close, randn, ranks

from ._layer import Case
from ._model import WIDTH, Model, apply


class Projected(Model):
    """Does something behind attention, as models do: FSDP warns of a root that returns a view."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, loss = super().forward(x)
        return out * 2, loss * 1


def _fsdp(rank: int, is_async: bool) -> None:
    """Two batches on two CP ranks each: what is left in ``.grad`` is the gradient of the mean."""
    case = Case(P=2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
    dp, cp = mesh.get_local_rank("dp_shard"), mesh.get_local_rank("cp")
    tokens = 2 * case.B * case.S

    reference = Projected(case)
    batches = [randn(*case.shape(WIDTH), seed=i) for i in range(2)]
    for x in batches:
        out, loss = reference(x)
        (out.pow(2).sum() / tokens + normalize_loss(loss, tokens).sum()).backward()

    model: Any = Projected(case)
    if is_async:

        class Cp(Case):
            def mesh(self) -> Any:
                return mesh["cp"]

        apply(model, Cp(P=2))
    else:
        DSAIndexerContextParallel().apply(model.layer.indexer, mesh["cp"])
        DSASparseAttentionContextParallel().apply(model.layer.attention, mesh["cp"])
        DSAIndexerLossContextParallel().apply(model.layer.loss, mesh["cp"])
    fully_shard(model, mesh=mesh[("dp_shard", "cp")].flatten(mesh_dim_name="fsdp"))
    for step in range(3):
        model.zero_grad()
        out, loss = model(case.local(batches[dp], cp))
        mean = normalize_loss(loss, tokens, gradient_divisor=4)
        (4 * out.pow(2).sum() / tokens + mean.sum()).backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert isinstance(p.grad, DTensor) and q.grad is not None, name
            whole = p.grad.full_tensor()
            assert_close(whole, q.grad, kind="grad", name=f"step {step}: {name}")
            assert not torch.isnan(whole).any()


@pytest.mark.parametrize("is_async", [False, True])
def test_gradients_of_a_sharded_model_are_those_of_the_mean(is_async: bool) -> None:
    ranks(4).run(_fsdp, is_async)
