"""Models on meshes with more than context parallelism, and on one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from hp_cp import ContextParallel, init_device_mesh, parallelize_module
from hp_mesh.testing import assert_close, ranks

pytest.importorskip("transformers", reason="the extra is not installed")

from hp_cp.transformers import add_core_attention

Tiny = Callable[..., Any]
PLAN = "model.layers.*.self_attn.core_attention"
B, S = 2, 24
IDS = torch.randint(0, 61, (2 * B, S), generator=torch.Generator().manual_seed(1))


def reference(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits
    targets = F.pad(ids, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def test_on_one_rank_nothing_changes(tiny: Tiny) -> None:
    model = tiny("mistral")
    expected = model(IDS).logits

    def run(_: int) -> Tensor:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        own = add_core_attention(copy.deepcopy(model), gradient_divisor=1)
        parallelize_module(own, mesh["cp"], {PLAN: ContextParallel(seq_dim=2, head_dim=1)})
        logits: Tensor = own(IDS).logits
        return logits

    assert_close(ranks(1).run(run)[0], expected)


def test_positions_and_loss_belong_to_the_cp_ranks_of_each_replica(tiny: Tiny) -> None:
    model = tiny()
    expected = [(model(ids).logits, reference(model, ids)) for ids in IDS.split(B)]

    def run(rank: int) -> tuple[Tensor, Tensor]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        own = add_core_attention(copy.deepcopy(model), gradient_divisor=1)
        parallelize_module(own, mesh["cp"], {PLAN: ContextParallel(seq_dim=2, head_dim=1)})
        replica, part = divmod(rank, 2)
        ids = IDS.split(B)[replica].chunk(2, dim=1)[part]
        out = own(ids, labels=ids)
        return out.logits, out.loss

    for rank, (logits, loss) in enumerate(ranks(4).run(run)):
        replica, part = divmod(rank, 2)
        assert_close(logits, expected[replica][0].chunk(2, dim=1)[part])
        assert_close(loss, expected[replica][1], kind="loss")


def test_a_hybrid_mesh_of_two_axes_orders_its_ranks_by_row(tiny: Tiny) -> None:
    model = tiny(num_attention_heads=12, head_dim=6)
    expected = model(IDS, attention_mask=None).logits

    def run(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("co", "ds"))
        own = add_core_attention(copy.deepcopy(model), gradient_divisor=1)
        style = ContextParallel(seq_dim=2, head_dim=1, ulysses_degree=2)
        parallelize_module(own, mesh, {PLAN: style})
        logits: Tensor = own(IDS.chunk(4, dim=1)[rank]).logits
        return logits

    for rank, logits in enumerate(ranks(4).run(run)):
        assert_close(logits, expected.chunk(4, dim=1)[rank])


def test_fsdp_over_data_and_context_averages_to_the_gradient_of_the_mean_loss(tiny: Tiny) -> None:
    model = tiny()
    torch.stack([reference(model, ids) for ids in IDS.split(B)]).mean().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}

    def run(rank: int) -> dict[str, Tensor]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        own = copy.deepcopy(model)
        own.zero_grad()
        add_core_attention(own)
        parallelize_module(own, mesh["cp"], {PLAN: ContextParallel(seq_dim=2, head_dim=1)})
        flat = mesh[("dp", "cp")].flatten(mesh_dim_name="fsdp")
        for layer in own.model.layers:
            fully_shard(layer, mesh=flat)
        fully_shard(own, mesh=flat)
        replica, part = divmod(rank, 2)
        ids = IDS.split(B)[replica].chunk(2, dim=1)[part]
        own(ids, labels=ids).loss.backward()
        return {name: p.grad.full_tensor() for name, p in own.named_parameters()}

    for grads in ranks(4).run(run):
        assert_close(grads, expected, kind="grad")


@pytest.mark.parametrize("mode", [{}, {"ulysses_degree": 1}], ids=["ulysses", "colossal"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_heads_may_be_cut_by_tensor_parallelism_too(
    tiny: Tiny, implementation: str, mode: dict[str, Any]
) -> None:
    model = tiny("llama", implementation, num_attention_heads=12, head_dim=6)
    expected = model(IDS)
    expected.logits.square().sum().backward()
    norms = [layer.input_layernorm.weight.grad for layer in model.model.layers]

    def run(rank: int) -> tuple[Tensor, list[Tensor]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        own = copy.deepcopy(model)
        own.zero_grad()
        add_core_attention(own, gradient_divisor=1)
        attention = "model.layers.*.self_attn"
        heads = {f"{attention}.{name}_proj": ColwiseParallel() for name in "qkv"}
        parallelize_module(own, mesh["tp"], {**heads, f"{attention}.o_proj": RowwiseParallel()})
        style = ContextParallel(seq_dim=2, head_dim=1, **mode)
        parallelize_module(own, mesh["cp"], {PLAN: style})
        logits = own(IDS.chunk(2, dim=1)[rank // 2]).logits
        logits.square().sum().backward()
        return logits, [layer.input_layernorm.weight.grad for layer in own.model.layers]

    results = ranks(4).run(run)
    for rank, (logits, _) in enumerate(results):
        assert_close(logits, expected.logits.chunk(2, dim=1)[rank // 2])
    for layer, norm in enumerate(norms):
        # tp ranks hold the same gradient, cp ranks a share each
        assert_close(results[0][1][layer] + results[2][1][layer], norm, kind="grad")


@pytest.mark.parametrize("mode", [{}, {"ulysses_degree": 1, "load_balance": True}], ids=str)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_dropout_trains_and_is_off_in_evaluation(
    tiny: Tiny, implementation: str, mode: dict[str, Any]
) -> None:
    model = tiny("llama", implementation, attention_dropout=0.5)
    expected = model.eval()(IDS).logits

    def run(rank: int) -> tuple[Tensor, Tensor]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        own = add_core_attention(copy.deepcopy(model), gradient_divisor=1)
        parallelize_module(own, mesh["cp"], {PLAN: ContextParallel(seq_dim=2, head_dim=1, **mode)})
        ids = IDS.chunk(2, dim=1)[rank]
        evaluated = own.eval()(ids).logits
        trained = own.train()(ids).logits
        trained.sum().backward()
        return evaluated, trained

    for rank, (evaluated, trained) in enumerate(ranks(2).run(run)):
        assert_close(evaluated, expected.chunk(2, dim=1)[rank])
        assert trained.isfinite().all()
        assert not torch.allclose(trained, evaluated)
