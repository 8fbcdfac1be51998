"""Real models on many ranks: logits, loss and every gradient equal the single process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hp_cp import AsyncContextParallel, ContextParallel, init_device_mesh, parallelize_module
from hp_mesh.testing import assert_close, count_collectives, ranks

pytest.importorskip("transformers", reason="the extra is not installed")

from hp_cp.transformers import add_core_attention

Tiny = Callable[..., Any]
PLAN = "model.layers.*.self_attn.core_attention"
MODES: dict[str, dict[str, Any]] = {
    "ulysses": {},
    "colossal": {"ulysses_degree": 1},
    "hybrid": {"ulysses_degree": 2},
    "balanced": {"ulysses_degree": 1, "load_balance": True},
}
GROUPED: dict[str, dict[str, Any]] = {
    "ulysses in 2 groups": {"head_groups": 2},
    "colossal in 2 groups": {"ulysses_degree": 1, "head_groups": 2},
    "hybrid in 2 groups": {"ulysses_degree": 2, "head_groups": 2},
}
OTHERS: dict[str, dict[str, Any]] = {
    "streamed": {"ulysses_degree": 1, "kv_chunks": 3},
    "streamed hybrid": {"ulysses_degree": 2, "kv_chunks": 5},
    "balanced hybrid": {"ulysses_degree": 2, "balance_hybrid": True},
}
B, S = 2, 24
IDS = torch.randint(0, 61, (B, S), generator=torch.Generator().manual_seed(1))


def cut(whole: Tensor, rank: int, size: int) -> Tensor:
    return whole.tensor_split(size, dim=1)[rank]


def single(model: Any, **call: Any) -> dict[str, Any]:
    """Logits, loss (in float64, which transformers' own is not) and gradients of one process."""
    logits = model(input_ids=IDS, **call).logits
    targets = F.pad(IDS, (0, 1), value=-100)[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    loss.backward()
    return {
        "logits": logits,
        "loss": loss,
        "grads": {name: parameter.grad for name, parameter in model.named_parameters()},
    }


def sharded(rank: int, model: Any, size: int, style: dict[str, Any], **call: Any) -> dict[str, Any]:
    """Return the same on one of ``size`` ranks, gradients summed over them."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    model = add_core_attention(copy.deepcopy(model), gradient_divisor=1)
    kind = AsyncContextParallel if "head_groups" in style else ContextParallel
    parallelize_module(model, mesh["cp"], {PLAN: kind(seq_dim=2, head_dim=1, **style)})
    ids = cut(IDS, rank, size)
    out = model(input_ids=ids, labels=ids, **call)
    out.loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return {
        "logits": out.logits,
        "loss": out.loss,
        "grads": {name: parameter.grad for name, parameter in model.named_parameters()},
    }


def assert_equal_on_all_ranks(
    model: Any, size: int, mode: str, expected: dict[str, Any], **call: Any
) -> None:
    for rank, got in enumerate(
        ranks(size).run(sharded, model, size, {**MODES, **GROUPED, **OTHERS}[mode], **call)
    ):
        assert_close(got["logits"], cut(expected["logits"], rank, size), name="logits")
        assert_close(got["loss"], expected["loss"], kind="loss", name="loss")
        assert_close(got["grads"], expected["grads"], kind="grad", name="grads")


@pytest.mark.parametrize("mode", ["ulysses", "colossal", "balanced"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_two_ranks_train_as_one_process_does(
    tiny: Tiny, family: str, implementation: str, mode: str
) -> None:
    expected = single(tiny(family, implementation))

    assert_equal_on_all_ranks(tiny(family, implementation), 2, mode, expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_four_ranks_train_as_one_process_does(
    tiny: Tiny, family: str, implementation: str, mode: str
) -> None:
    heads = {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 6}
    expected = single(tiny(family, implementation, **heads))

    assert_equal_on_all_ranks(tiny(family, implementation, **heads), 4, mode, expected)


@pytest.mark.parametrize("mode", GROUPED)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_head_groups_overlap_in_models_that_rotate_before_attention(
    tiny: Tiny, family: str, implementation: str, mode: str
) -> None:
    """Rotary stands between projection and attention, so no projection can be handed off."""
    heads = {"hidden_size": 48, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 6}
    expected = single(tiny(family, implementation, **heads))

    assert_equal_on_all_ranks(tiny(family, implementation, **heads), 4, mode, expected)


@pytest.mark.parametrize("mode", OTHERS)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_streamed_keys_and_a_balanced_hybrid_train_as_one_process_does(
    tiny: Tiny, family: str, mode: str
) -> None:
    """Rotary and repeated heads stand in front; mistral brings a mask of its window."""
    heads = {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 6}
    expected = single(tiny(family, **heads))

    assert_equal_on_all_ranks(tiny(family, **heads), 4, mode, expected)


@pytest.mark.parametrize("kv_heads", [1, 3, 6])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_number_of_query_heads_per_kv_head_follows_what_arrives(
    tiny: Tiny, implementation: str, kv_heads: int
) -> None:
    # 6 query heads on 2 ranks: 3 KV heads do not split evenly and arrive once per query head
    changes = {"num_key_value_heads": kv_heads}
    expected = single(tiny("llama", implementation, **changes))

    assert_equal_on_all_ranks(tiny("llama", implementation, **changes), 2, "ulysses", expected)


@pytest.mark.parametrize("mode", ["ulysses", "colossal", "balanced"])
def test_evaluation_without_gradients_gives_the_same_logits(tiny: Tiny, mode: str) -> None:
    model = tiny("mistral").eval()
    with torch.no_grad():
        expected = model(input_ids=IDS).logits

    def evaluate(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        own = add_core_attention(copy.deepcopy(model), gradient_divisor=1)
        style = ContextParallel(seq_dim=2, head_dim=1, **MODES[mode])
        parallelize_module(own, mesh["cp"], {PLAN: style})
        with torch.no_grad():
            out = own(cut(IDS, rank, 2))
        assert out.cache is None
        return out.logits

    for rank, logits in enumerate(ranks(2).run(evaluate)):
        assert_close(logits, cut(expected, rank, 2))


@pytest.mark.parametrize("mode", ["ulysses", "balanced"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(tiny: Tiny, mode: str, reentrant: bool) -> None:
    expected = single(tiny("mistral"))
    model = tiny("mistral")
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.train()

    assert_equal_on_all_ranks(model, 2, mode, expected)


@pytest.mark.parametrize("mode", ["ulysses", "colossal", "balanced"])
def test_the_base_model_can_be_called_itself(tiny: Tiny, mode: str) -> None:
    model = tiny("qwen2")
    expected = model.model(input_ids=IDS).last_hidden_state

    def run(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        own = add_core_attention(copy.deepcopy(model.model), gradient_divisor=1)
        style = ContextParallel(seq_dim=2, head_dim=1, **MODES[mode])
        parallelize_module(own, mesh["cp"], {"layers.*.self_attn.core_attention": style})
        hidden: Tensor = own(input_ids=cut(IDS, rank, 2)).last_hidden_state
        return hidden

    for rank, hidden in enumerate(ranks(2).run(run)):
        assert_close(hidden, cut(expected, rank, 2))


@pytest.mark.parametrize("mode", ["ulysses", "colossal"])
def test_cores_that_are_handed_local_tensors_work_too(tiny: Tiny, mode: str) -> None:
    expected = single(tiny("mistral"))

    local = {"use_local_input": True, "output_seq_dim": 1, "output_head_dim": 2, **MODES[mode]}
    for rank, got in enumerate(ranks(2).run(sharded, tiny("mistral"), 2, local)):
        assert_close(got["logits"], cut(expected["logits"], rank, 2))
        assert_close(got["grads"], expected["grads"], kind="grad")


@pytest.mark.parametrize(
    ("mode", "per_layer"),
    [
        ("ulysses", {"all_to_all": 2}),
        ("colossal", {"all_gather": 2}),
        ("hybrid", {"all_to_all": 2, "all_gather": 2}),
    ],
)
def test_a_call_with_token_ids_alone_sends_only_what_attention_needs(
    tiny: Tiny, mode: str, per_layer: dict[str, int]
) -> None:
    model = tiny(num_attention_heads=12, head_dim=6)

    def run(rank: int) -> dict[str, int]:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
        own = add_core_attention(copy.deepcopy(model), gradient_divisor=1)
        style = ContextParallel(seq_dim=2, head_dim=1, **MODES[mode])
        parallelize_module(own, mesh["cp"], {PLAN: style})
        ids = cut(IDS, rank, 4)
        own(ids)
        with count_collectives() as sent:
            own(ids)
        return {
            kind: count
            for kind in ("all_to_all", "all_gather", "reduce_scatter", "all_reduce", "p2p")
            if (count := sent.count(kind))
        }

    layers = model.config.num_hidden_layers
    for counts in ranks(4).run(run):
        assert counts == {kind: n * layers for kind, n in per_layer.items()}
