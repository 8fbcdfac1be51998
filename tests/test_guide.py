"""The composition of the guide, end to end: TP, then CP, then FSDP2, trained for some steps.

Losses and parameters after three steps of AdamW, in float64 and on 8 ranks, are those of one
process: for the guide's Llama (`examples/cp_tp_fsdp.py`) and for one of transformers.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from hp_cp import ContextParallel, check_fsdp_mesh, init_device_mesh, parallelize_module
from hp_mesh import shard_sequence
from hp_mesh.testing import assert_close, ranks

from ._llama import (
    BALANCED,
    COLOSSAL,
    HYBRID,
    LEFT,
    RIGHT,
    STEPS,
    ULYSSES,
    S,
    Trained,
    alone,
    assert_whole,
    batch,
    example,
    llama,
    mean_loss,
    optimizer_of,
    rows_of,
    sharded_loss,
    train_alone,
)

# of FSDP, about TP's outputs: they are views, which nothing writes to here
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")

SIZES = [
    pytest.param({"dp_shard": 2, "cp": 2, "tp": 2}, [ULYSSES, COLOSSAL, BALANCED], id="2x2x2"),
    pytest.param({"dp_shard": 1, "cp": 4, "tp": 2}, [HYBRID], id="1x4x2"),
]


def compare(
    model: Any,
    loss_of: Callable[[Tensor], Tensor],
    mesh: Any,
    expected: Trained,
    *,
    steps: int,
    name: str,
) -> None:
    """Train on this replica's rows; assert losses, first gradients and, at last, parameters."""
    optimizer = optimizer_of(model)
    for step in range(steps):
        loss = loss_of(rows_of(batch(step), mesh))
        mean = loss.detach().clone()  # transformers' loss is that of the replica
        dist.all_reduce(mean, group=mesh["dp_shard"].get_group())
        mean /= mesh["dp_shard"].size()
        assert_close(mean, expected.losses[step], kind="loss", name=name)
        loss.backward()
        if step == 0:
            assert_whole({n: p.grad for n, p in model.named_parameters()}, expected.first, name)
        if steps == STEPS:
            optimizer.step()
            optimizer.zero_grad()
    if steps == STEPS:
        assert_whole(dict(model.named_parameters()), expected.parameters, name)


@pytest.mark.parametrize(("order", "steps"), [(RIGHT, STEPS), (LEFT, 1)], ids=["cp-tp", "tp-cp"])
@pytest.mark.parametrize(("sizes", "modes"), SIZES)
def test_the_llama_of_the_guide_trains_as_one_process(
    sizes: dict[str, int], modes: list[dict[str, Any]], order: tuple[str, ...], steps: int
) -> None:
    """Every mode, TP right and left of CP; attention returns a DTensor of TP, and its shard.

    One mesh serves all modes of a test: DTensor learns its rules anew for each mesh.
    """
    expected = alone()

    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", tuple(sizes[n] for n in order), mesh_dim_names=order)
        fsdp_mesh = mesh[("dp_shard", "cp")].flatten(mesh_dim_name="fsdp")
        for mode, local in itertools.product(modes, (False, True)):
            model = llama()
            parallelize_module(model, mesh["tp"], example("cp_tp_fsdp").tp_plan(keep=True))
            seen: list[bool] = []
            for layer in model.layers.values():
                style = ContextParallel(use_local_output=local, **mode)
                style.apply(layer.attention.sdpa_core, mesh["cp"])
                layer.attention.sdpa_core.register_forward_hook(
                    lambda _, args, out, seen=seen: seen.append(isinstance(out, DTensor))
                )
                fully_shard(layer, mesh=fsdp_mesh)
            fully_shard(model, mesh=fsdp_mesh)
            check_fsdp_mesh(model, mesh)

            def loss_of(rows: Tensor, model: Any = model) -> Tensor:
                return sharded_loss(model, rows, mesh)

            count = 1 if local else steps
            compare(model, loss_of, mesh, expected, steps=count, name=f"{mode}, local={local}")
            assert seen == [not local] * len(model.layers) * count

    ranks(8).run(run)


def test_a_llama_of_transformers_trains_as_one_process() -> None:
    """GQA, positions and loss from the integration; balanced Colossal, and Ulysses."""
    transformers = pytest.importorskip("transformers", reason="the extra is not installed")
    from hp_cp.transformers import add_core_attention

    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=36,
        intermediate_size=44,
        num_hidden_layers=2,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=6,
        max_position_embeddings=S,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).double()
    reference = copy.deepcopy(model)
    expected = train_alone(reference, lambda ids: mean_loss(reference(ids).logits, ids))
    layers = "model.layers.*"
    columns = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    )
    tp_plan = {f"{layers}.{name}": ColwiseParallel() for name in columns} | {
        f"{layers}.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")
    }

    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=RIGHT)
        fsdp_mesh = mesh[("dp_shard", "cp")].flatten(mesh_dim_name="fsdp")
        for mode, steps in ((BALANCED, STEPS), (ULYSSES, 1)):
            own = add_core_attention(copy.deepcopy(model))
            parallelize_module(own, mesh["tp"], tp_plan)
            style = ContextParallel(seq_dim=2, head_dim=1, **mode)
            parallelize_module(own, mesh["cp"], {f"{layers}.self_attn.core_attention": style})
            for layer in own.model.layers:
                fully_shard(layer, mesh=fsdp_mesh)
            fully_shard(own, mesh=fsdp_mesh)
            check_fsdp_mesh(own, mesh)

            def loss_of(rows: Tensor, own: Any = own) -> Tensor:
                loss: Tensor = own(input_ids=shard_sequence(rows, mesh["cp"]), labels=rows).loss
                return loss

            compare(own, loss_of, mesh, expected, steps=steps, name=str(mode))

    ranks(8).run(run)
