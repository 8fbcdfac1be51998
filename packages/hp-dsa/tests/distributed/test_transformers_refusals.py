"""What a prepared model refuses: by name, before anything is sent, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from hp_dsa import init_device_mesh
from hp_mesh import shard_sequence
from hp_mesh.testing import ranks

pytest.importorskip("transformers", reason="the extra is not installed")

from hp_dsa.transformers import indexer_loss, prepare_model

from ._tiny import IDS, MODULES, B, S, build

FAMILY = pytest.mark.parametrize("family", ["deepseek", "glm"])

CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "cache": ({"use_cache": True}, r"use_cache \(True\) must be False"),
    "padding": (
        {"attention_mask": torch.tensor([[1] * (S - 2) + [0] * 2, [1] * S])},
        r"attention_mask \(shape \(2, 24\)\) must be None, or 2-D and all ones",
    ),
    "mask": (
        {"attention_mask": torch.ones(B, 1, S, S)},
        r"attention_mask \(shape \(2, 1, 24, 24\)\) must be None",
    ),
    "attentions": ({"output_attentions": True}, "output_attentions .* must be False"),
    "documents": ({"cu_seq_lens_q": torch.tensor([0, S])}, 'must come with layout="TND"'),
    "positions": (
        {"position_ids": torch.tensor([[*range(7), *range(S - 7)]])},
        r"must be those of this rank's 24 tokens, \[0, 1, 2, ..., 23\]",
    ),
}


@pytest.mark.parametrize("call", CALLS)
@FAMILY
def test_what_the_operators_cannot_do_is_refused_by_name(family: str, call: str) -> None:
    model = prepare_model(build(family))
    given, message = CALLS[call]
    with pytest.raises(ValueError, match=message):
        model(input_ids=IDS, **given)
    model(input_ids=IDS, attention_mask=torch.ones_like(IDS))


def test_generation_and_dropout_are_refused() -> None:
    model = prepare_model(build("glm"))
    with pytest.raises(ValueError, match="restore_model"):
        model.generate(IDS, max_new_tokens=2, pad_token_id=0)
    model.config.attention_dropout = 0.1
    model.eval()(input_ids=IDS)
    with pytest.raises(ValueError, match=r"attention_dropout \(0.1\) must be 0"):
        model.train()(input_ids=IDS)


def test_what_a_rank_alone_finds_wrong_is_raised_on_all() -> None:
    def run(rank: int, given: list[dict[str, Any]]) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        own = prepare_model(build("glm"), mesh)
        own(**{"input_ids": shard_sequence(IDS, (rank, 2)), **given[rank]})

    masked = torch.ones(B, S // 2)
    masked[0, 0] = 0
    for second, message in (
        ({"attention_mask": masked}, "attention_mask"),
        ({"labels": IDS[:, : S // 2]}, "must be \\[B, 24\\]"),
        ({"labels": IDS.tolist()}, "labels \\(list\\) must be a tensor \\(on rank 1 of 2\\)"),
        ({"logits_to_keep": 1}, "logits_to_keep"),
        ({"labels": IDS}, "labels given"),
        ({"shift_labels": IDS}, "shift_labels given"),
        ({"num_items_in_batch": 46}, "num_items_in_batch given"),
        ({"input_ids": IDS[:, : S // 2 - 1]}, "tokens"),
        ({"input_ids": IDS.tolist()}, "input_ids \\(list\\) must be a tensor \\(on rank 1 of 2\\)"),
    ):
        errors = ranks(2).errors(run, [{}, second])
        assert all(isinstance(error, ValueError) for error in errors), errors
        assert all(message.replace("\\", "") in str(error) for error in errors), errors


def test_what_cannot_be_prepared_is_refused() -> None:
    model = build("glm")
    with pytest.raises(TypeError, match=r"model \(Linear\) must be a model of transformers'"):
        prepare_model(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"indexer_loss \('both'\) must be 'sparse'"):
        prepare_model(model, indexer_loss="both")
    with pytest.raises(ValueError, match="layout"):
        prepare_model(model, layout="BNSD")
    with pytest.raises(ValueError, match="must come with a mesh"):
        prepare_model(model, load_balance=True)
    prepare_model(model)
    with pytest.raises(ValueError, match="prepared already"):
        prepare_model(model)
    with pytest.raises(ValueError, match="must be called by its model"):
        model.model.layers[0].self_attn(torch.zeros(1, 3, 36, dtype=torch.float64), (None, None))


def test_a_mesh_that_no_style_takes_leaves_the_model_as_it_was() -> None:
    """And so it can be prepared with another one."""

    def run(rank: int) -> None:
        model = build("glm")
        kinds = [type(module) for module in model.modules()]
        with pytest.raises(ValueError, match="must ascend"):
            prepare_model(model, DeviceMesh("cpu", [1, 0]))
        assert [type(module) for module in model.modules()] == kinds
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        prepare_model(model, init_device_mesh("cpu", (2,)))

    ranks(2).run(run)


def test_a_layer_that_cannot_be_prepared_leaves_the_model_as_it_was() -> None:
    """The layers before it, and what it was given before it failed, are taken back."""
    model = build("glm")
    kinds = [type(module) for module in model.modules()]
    del model.model.layers[-1].self_attn.scaling

    with pytest.raises(AttributeError, match="scaling"):
        prepare_model(model)

    assert [type(module) for module in model.modules()] == kinds


@FAMILY
def test_other_code_of_transformers_is_refused(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hp_dsa.transformers import _source

    model = build(family)
    prefix = type(model).__name__.removesuffix("ForCausalLM")
    found = _source.fingerprints(MODULES[family], prefix)
    assert found == _source._KNOWN[prefix]
    monkeypatch.setitem(_source._found, prefix, {**found, "Indexer": "another"})

    with pytest.raises(ValueError, match=f"but {prefix}Indexer differ"):
        prepare_model(model)
    assert type(model.model.layers[0].self_attn).__name__ == f"{prefix}Attention"
    prepare_model(model, check_source=False)


def test_an_adapter_on_the_up_projection_is_refused() -> None:
    model = prepare_model(build("glm"))

    class Adapted(torch.nn.Linear):
        pass

    model.model.layers[1].self_attn.kv_b_proj.__class__ = Adapted
    with pytest.raises(ValueError, match=r"kv_b_proj \(Adapted with a Parameter weight\) must be"):
        model(input_ids=IDS)


def test_checkpointing_with_reentry_is_refused_by_the_loss_that_it_would_lose() -> None:
    model = prepare_model(build("glm"))
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.train()(input_ids=IDS)
    with pytest.raises(ValueError, match="ran without recording gradients") as caught:
        indexer_loss(model)
    assert '{"use_reentrant": False}' in str(caught.value)
