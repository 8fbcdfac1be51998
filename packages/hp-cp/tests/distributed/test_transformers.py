"""Models with `core_attention` and no context parallelism: nothing may have changed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hp_mesh.window import AttentionWindow

pytest.importorskip("transformers", reason="the extra is not installed")

from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification
from transformers.masking_utils import (
    causal_mask_function,
    eager_mask,
    find_packed_sequence_indices,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from hp_cp.transformers import (
    CoreAttention,
    GlobalCall,
    MaskDescription,
    add_core_attention,
    remove_core_attention,
)

Tiny = Callable[..., Any]
B, S = 2, 18
IDS = torch.randint(0, 61, (B, S), generator=torch.Generator().manual_seed(1))
CALLS = {
    "ids only": {},
    "padding": {"attention_mask": torch.tensor([[1] * 15 + [0] * 3, [1] * S])},
    "packed": {"position_ids": torch.tensor([[*range(7), *range(11)]]), "use_cache": False},
}


def results(model: Any, **call: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    model.zero_grad()
    out = model(input_ids=IDS, labels=IDS, **call)
    out.loss.backward()
    return out.logits, out.loss, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_prepared_model_computes_bit_for_bit_what_it_did(
    tiny: Tiny, family: str, implementation: str, call: str
) -> None:
    expected = results(tiny(family, implementation), **CALLS[call])
    model = add_core_attention(tiny(family, implementation))

    logits, loss, grads = results(model, **CALLS[call])

    assert model.config._attn_implementation == f"hp_cp_{implementation}"
    assert torch.equal(logits, expected[0])
    assert torch.equal(loss, expected[1])
    assert all(torch.equal(a, b) for a, b in zip(grads, expected[2], strict=True))


def test_every_attention_layer_gets_a_core_that_the_guides_plan_can_name(tiny: Tiny) -> None:
    model = add_core_attention(tiny())

    found = [name for name, m in model.named_modules() if isinstance(m, CoreAttention)]

    assert found == [f"model.layers.{i}.self_attn.core_attention" for i in range(2)]
    assert not list(model.model.layers[0].self_attn.core_attention.parameters())


def test_the_core_is_called_with_bnsd_and_returns_what_the_model_expects(tiny: Tiny) -> None:
    model = add_core_attention(tiny())
    seen: list[Any] = []
    core = model.model.layers[0].self_attn.core_attention
    core.register_forward_hook(lambda _, args, out: seen.append((args, out)))

    model(input_ids=IDS)

    ((query, key, value), (output, weights)) = seen[0]
    assert query.shape == (B, 6, S, 10)
    assert key.shape == value.shape == (B, 2, S, 10)
    assert output.shape == (B, S, 6, 10)
    assert weights is None


def test_generation_and_attention_weights_work_as_before(tiny: Tiny) -> None:
    stock, model = tiny("llama", "eager").eval(), add_core_attention(tiny("llama", "eager").eval())
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(IDS)

    assert torch.equal(
        model.generate(IDS, attention_mask=mask, **options),
        stock.generate(IDS, attention_mask=mask, **options),
    )
    weights = model(input_ids=IDS, output_attentions=True).attentions
    expected = stock(input_ids=IDS, output_attentions=True).attentions
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


def test_the_state_dict_and_a_saved_model_know_nothing_of_it(tiny: Tiny, tmp_path: Path) -> None:
    stock = tiny()
    model = add_core_attention(tiny())

    assert list(model.state_dict()) == list(stock.state_dict())
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert loaded.config._attn_implementation == "sdpa"
    assert torch.equal(loaded(IDS).logits, stock(IDS).logits)


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies_of_a_prepared_model_are_prepared_and_independent(
    tiny: Tiny, clone: Callable[[Any], Any]
) -> None:
    model = add_core_attention(tiny())
    twin = clone(model)
    remove_core_attention(model)

    assert twin.config._attn_implementation == "hp_cp_sdpa"
    assert len(twin._forward_pre_hooks) == len(twin.model._forward_pre_hooks) == 1
    assert torch.equal(twin(IDS).logits, model(IDS).logits)


def test_removing_leaves_the_model_as_transformers_made_it(tiny: Tiny) -> None:
    model = add_core_attention(add_core_attention(tiny("llama", "eager")))

    remove_core_attention(model)

    assert model.config._attn_implementation == "eager"
    assert not any(isinstance(m, CoreAttention) for m in model.modules())
    assert not model._forward_pre_hooks
    assert not model.model._forward_pre_hooks
    assert remove_core_attention(model) is model


def test_a_model_that_shares_its_config_with_a_prepared_one_still_works(tiny: Tiny) -> None:
    model = tiny()
    sibling = type(model)(model.config).double()
    sibling.load_state_dict(model.state_dict())
    expected = sibling(IDS).logits

    add_core_attention(model)

    assert torch.equal(sibling(IDS).logits, expected)


def test_heads_that_pool_and_other_attention_are_refused_by_name(tiny: Tiny) -> None:
    config = LlamaConfig(
        vocab_size=61, hidden_size=36, intermediate_size=44, num_hidden_layers=1, pad_token_id=0,
        num_attention_heads=6, num_key_value_heads=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match="LlamaForSequenceClassification must be a base model or"):
        add_core_attention(LlamaForSequenceClassification(config))
    flex = tiny()
    flex.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match=r"\(flex_attention\) must be sdpa or eager"):
        add_core_attention(flex)
    with pytest.raises(TypeError, match=r"model \(Linear\) must be a transformers PreTrainedModel"):
        add_core_attention(torch.nn.Linear(2, 2))


def facts(
    position_ids: Tensor | None = None, padding: Tensor | None = None, *, local: int = S // 3
) -> GlobalCall:
    positions = torch.arange(S)[None] if position_ids is None else position_ids
    return GlobalCall(
        group=None,  # type: ignore[arg-type]
        rank=0,
        local_length=local,
        global_length=S,
        position_ids=positions,
        padding=padding,
        documents=None if padding is not None else find_packed_sequence_indices(positions),
    )


def described(implementation: str, function: Any, **changes: Any) -> MaskDescription:
    asked = {
        "batch_size": B, "q_length": S // 3, "kv_length": S, "q_offset": 0, "kv_offset": 0,
        "mask_function": function, "attention_mask": torch.ones(B, S, dtype=torch.bool),
        "allow_is_causal_skip": True, "dtype": torch.float64, "config": None, "use_vmap": False,
        "device": torch.device("cpu"),
    }  # fmt: skip
    return MaskDescription(implementation, {**asked, **changes})


WINDOWS = [AttentionWindow(a, n, S, S) for a, n in [(0, 6), (6, 6), (9, 3), (12, 6), (0, S)]]
PATTERNS = {
    "causal": (causal_mask_function, {}),
    "window": (sliding_window_causal_mask_function(5), {"local_size": 5}),
}


@pytest.mark.parametrize("window", WINDOWS, ids=lambda w: f"{w.query_start}+{w.query_length}")
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_rows_of_a_description_are_the_rows_of_the_whole_mask(
    implementation: str, pattern: str, window: AttentionWindow
) -> None:
    function, extra = PATTERNS[pattern]
    padding = torch.tensor([[0] * 2 + [1] * 16, [1] * 15 + [0] * 3], dtype=torch.bool)
    build = sdpa_mask if implementation == "sdpa" else eager_mask
    whole = build(
        B, S, S, mask_function=function, attention_mask=padding, dtype=torch.float64,
        allow_is_causal_skip=False,
    )  # fmt: skip

    rows = described(implementation, function, **extra).rows(window, facts(padding=padding))

    assert rows is not None
    assert torch.equal(rows, whole[:, :, window.query_start : window.query_end])


@pytest.mark.parametrize("window", WINDOWS, ids=lambda w: f"{w.query_start}+{w.query_length}")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_rows_keep_packed_documents_apart_wherever_the_shards_are_cut(
    pattern: str, window: AttentionWindow
) -> None:
    function, extra = PATTERNS[pattern]
    lengths = [4, 9, 5]
    positions = torch.tensor([[p for n in lengths for p in range(n)]])
    reach = 5 if pattern == "window" else S
    blocks = [torch.ones(n, n, dtype=torch.bool).tril().triu(1 - reach) for n in lengths]
    whole = torch.block_diag(*blocks).bool()

    rows = described("sdpa", function, **extra).rows(window, facts(positions))

    assert rows is not None
    assert rows.shape == (B, 1, window.query_length, S)
    assert torch.equal(rows[1, 0], whole[window.query_start : window.query_end])


def test_plain_causal_attention_builds_no_mask_and_a_shared_mask_is_built_once() -> None:
    plain = described("sdpa", causal_mask_function)
    longer = described("sdpa", sliding_window_causal_mask_function(S + 1), local_size=S + 1)
    windowed = described("sdpa", sliding_window_causal_mask_function(5), local_size=5)

    assert plain.rows(WINDOWS[1], facts()) is None
    assert longer.rows(WINDOWS[1], facts()) is None
    assert windowed.rows(WINDOWS[1], facts()) is windowed.rows(WINDOWS[1], facts())


def test_a_mask_described_for_a_shard_is_refused() -> None:
    local = described("sdpa", causal_mask_function, kv_length=S // 3)
    with pytest.raises(ValueError, match=r"described for 6 keys and must be .* \(18\)"):
        local.rows(WINDOWS[0], facts())
