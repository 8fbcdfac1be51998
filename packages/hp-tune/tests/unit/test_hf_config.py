"""Reading config.json: golden cases per family, and the odd spellings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hp_tune.errors import UsageError
from hp_tune.models.hf_config import model_from_config, model_presets, read_model
from hp_tune.models.model import Attention, Model


def config(**fields: Any) -> dict[str, Any]:
    """A minimal decoder with 12 heads of 8; ``fields`` replace or add."""
    base = {
        "model_type": "llama",
        "hidden_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 12,
        "intermediate_size": 200,
        "vocab_size": 300,
    }
    return {**base, **fields}


def read(**fields: Any) -> Model:
    """Read that configuration."""
    return model_from_config(config(**fields), "tiny")


def full(heads: int, kv: int, size: int, v: int | None = None, **more: Any) -> Attention:
    """A full-attention layer."""
    return Attention(
        num_heads=heads, num_kv_heads=kv, head_size=size, v_head_size=v or size, **more
    )


@pytest.mark.parametrize(
    ("name", "hidden", "layers", "spec", "longest", "qk_norm"),
    [
        ("Llama-3.1-8B", 4096, 32, full(32, 8, 128), 131072, False),
        ("Llama-3.1-70B", 8192, 80, full(64, 8, 128), 131072, False),
        ("Qwen2.5-7B", 3584, 28, full(28, 4, 128), 131072, False),
        ("Qwen3-8B", 4096, 36, full(32, 8, 128), 40960, True),
    ],
)
def test_presets_read_as_published(
    name: str, hidden: int, layers: int, spec: Attention, longest: int, qk_norm: bool
) -> None:
    """Presets give the shapes of the models' own pages; names ignore case."""
    model = read_model(name.lower())

    assert model.name == name
    assert (model.hidden_size, model.layer_groups) == (hidden, ((spec, layers),))
    assert (model.max_length, model.qk_norm, model.dtype) == (longest, qk_norm, "bf16")
    assert name in model_presets()


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Llama-3.1-8B", 8.03), ("Llama-3.1-70B", 70.6), ("Qwen2.5-7B", 7.62), ("Qwen3-8B", 8.19)],
)
def test_parameter_estimate_is_within_one_percent(name: str, billions: float) -> None:
    """The memory gate rests on it; the published counts are the yardstick."""
    parameters = read_model(name).parameters

    assert parameters is not None
    assert parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_other_spellings_of_the_same_fields() -> None:
    """GPT-2, Falcon and ChatGLM names; a missing KV count is MHA and is said."""
    gpt2 = model_from_config(
        {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024},
        "gpt2",
    )
    assert gpt2.layer_groups == ((full(12, 12, 64), 12),)
    assert gpt2.max_length == 1024
    assert any("MHA" in note for note in gpt2.notes)
    assert read(multi_query=True).layers[0].num_kv_heads == 1
    chatglm = read(
        num_hidden_layers=None, num_layers=28, multi_query_attention=True, multi_query_group_num=2,
        kv_channels=16,
    )  # fmt: skip
    assert chatglm.layer_groups == ((full(12, 2, 16), 28),)
    assert read(num_key_value_heads=None).layers[0].num_kv_heads == 12
    assert read(num_attention_heads=12.0).layers[0].num_heads == 12


def test_heads_times_head_size_need_not_be_the_hidden_size() -> None:
    """Qwen3-235B: 64 x 128 = 8192 with hidden 4096."""
    model = read(
        model_type="qwen3_moe", hidden_size=4096, num_attention_heads=64, num_key_value_heads=4,
        head_dim=128, num_hidden_layers=94,
    )  # fmt: skip

    assert model.layer_groups == ((full(64, 4, 128), 94),)
    assert model.qk_norm


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 16}, [16] * 4),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 4),
        ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": False}, [None] * 4),
        ({"model_type": "qwen2", "sliding_window": 16}, [None] * 4),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 16,
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            [None, None, None, 16],
        ),
        ({"model_type": "gemma3", "sliding_window": 16, "sliding_window_pattern": 3},
         [16, 16, None, 16]),
        ({"model_type": "gemma2", "sliding_window": 16}, [16, None, 16, None]),
        (
            {
                "model_type": "gpt_oss",
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            [16, None, 16, None],
        ),
        ({"model_type": "mimo", "sliding_window": 16, "hybrid_layer_pattern": [0, 1, 1, 0]},
         [None, 16, 16, None]),
    ],
    ids=["mistral", "mistral-null", "qwen2-off", "qwen2-default", "qwen2-max-window-layers",
         "gemma3-pattern", "gemma2", "gpt-oss-layer-types", "mimo-pattern"],
)  # fmt: skip
def test_windows_are_per_layer(fields: dict[str, Any], windows: list[int | None]) -> None:
    """A window counts only where its family says so, layer by layer."""
    layers = read(**fields).layers

    assert [layer.window for layer in layers] == windows
    assert [layer.kind for layer in layers] == ["sliding" if w else "full" for w in windows]


def test_linear_layers_are_known_by_type_and_by_interval() -> None:
    """Three of four layers are linear in Qwen3-Next's pattern."""
    kinds = ["linear", "linear", "linear", "full"]
    named = read(layer_types=["linear_attention"] * 3 + ["full_attention"])

    assert [layer.kind for layer in named.layers] == kinds
    assert [layer.kind for layer in read(full_attention_interval=4).layers] == kinds


def test_nested_text_config_is_found_and_the_vision_tower_is_not() -> None:
    """Root without heads: descend into the text model only; the path is reported."""
    vision = {"num_attention_heads": 99, "head_dim": 99, "hidden_size": 9801}
    text = config(model_type="qwen3_5_text", num_key_value_heads=4, head_dim=8)
    model = model_from_config(
        {"model_type": "qwen3_5", "vision_config": vision, "text_config": text}, "nested"
    )

    assert (model.config_path, model.model_type) == ("text_config", "qwen3_5_text")
    assert model.layer_groups == ((full(12, 4, 8), 4),)


def test_latent_attention_ignores_head_dim() -> None:
    """MLA: q heads are nope + rope, each head has its own K and V; head_dim is the rope's."""
    model = read(
        model_type="glm_moe_dsa", head_dim=4, qk_nope_head_dim=12, qk_rope_head_dim=4,
        v_head_dim=16, kv_lora_rank=32, num_key_value_heads=1, index_topk=7, index_n_heads=3,
        index_head_dim=8, q_lora_rank=24,
        num_nextn_predict_layers=1,
    )  # fmt: skip

    expected = full(
        12, 12, 16, 16, latent_size=36, rope_size=4, q_latent_size=24, index_topk=7, index_heads=3,
        index_head_size=8,
    )  # fmt: skip
    assert model.layer_groups == ((expected, 5),)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 1000),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}, 4000),
        ({"type": "linear", "factor": 2.0}, 2000),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 100}, 1000),
    ],
)
def test_rope_scaling_stretches_the_longest_sequence(
    scaling: dict[str, Any] | None, longest: int
) -> None:
    """The factor counts from the original length, and never below what the config says."""
    assert read(max_position_embeddings=1000, rope_scaling=scaling).max_length == longest


def test_missing_fields_are_listed_with_the_aliases_tried() -> None:
    """One error for all of them."""
    with pytest.raises(UsageError) as error:
        model_from_config({"model_type": "mystery"}, "mystery")

    text = str(error.value)
    for words in ("'mystery'", "query heads (tried num_attention_heads, n_head", "hidden size",
                  "layers (tried num_hidden_layers"):  # fmt: skip
        assert words in text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_attention_heads": 7}, r"hidden size \(96\) must be divisible by heads \(7\)"),
        ({"num_attention_heads": "12"}, r"num_attention_heads \('12'\) must be a whole number"),
        ({"num_attention_heads": 12.5}, r"must be a whole number"),
        ({"num_key_value_heads": 5}, r"heads \(12\) must be divisible by KV heads \(5\)"),
        ({"layer_types": ["full_attention"]}, r"layer_types has 1 entries for 4 layers"),
        ({"layer_types": ["spiral"] * 4}, r"layer type \('spiral'\) is unknown"),
        ({"num_hidden_layers": 1e9}, r"layers \(1000000000\) must be at most 10000"),
        ({"num_attention_heads": 1e400}, r"num_attention_heads \(inf\) must be a whole number"),
        ({"sliding_window": -1}, r"sliding_window \(-1\) must be a whole number"),
        ({"layer_types": 5}, r"layer_types \(5\) must be a list"),
        ({"hybrid_override_pattern": {"M": 1}}, r"hybrid_override_pattern .* must be a list"),
        ({"linear_attn_config": "x"}, r"linear_attn_config \('x'\) must be an object"),
        ({"linear_attn_config": {"full_attn_layers": 3}}, r"full_attn_layers \(3\) must be a list"),
        ({"linear_attn_config": {"full_attn_layers": [[1]]}}, r"must be a whole number"),
        ({"block_configs": [1] * 4}, r"entries of block_configs \(1\) must be objects"),
        ({"block_configs": [{"attention": "no"}] * 4}, r"must be objects"),
        ({"block_configs": [{"attention": {"n_heads_in_group": "2"}}] * 4}, r"n_heads_in_group"),
        ({"block_configs": [{"attention": {"window_length": "8"}}] * 4}, r"window_length"),
        ({"compress_ratios": [None] * 4}, r"compress_ratios \(None\) must be a whole number"),
        ({"compress_ratios": [-4] * 4}, r"compress_ratios \(-4\) must be a whole number"),
        ({"compress_ratios": 4}, r"compress_ratios \(4\) must be a list"),
        (
            {"model_type": "llama4_text", "attention_chunk_size": 8, "no_rope_layers": 5},
            r"no_rope_layers \(5\) must be a list",
        ),
        (
            {"max_position_embeddings": 8, "rope_scaling": {"factor": 1e308}},
            r"factor \(1e\+308\) of the rope",
        ),
        (
            {"max_position_embeddings": 8, "rope_scaling": {"factor": "2"}},
            r"factor \('2'\) of the rope",
        ),
        (
            {
                "max_position_embeddings": 8,
                "rope_scaling": {"factor": 2, "original_max_position_embeddings": "x"},
            },
            r"original_max_position_embeddings \('x'\) must be a whole number",
        ),
        ({"head_dim": 0}, r"head_dim \(0\) must be at least 1"),
        ({"index_topk": 0}, r"index_topk \(0\) must be at least 1"),
        ({"num_nextn_predict_layers": 10**7}, r"layers \(10000004\) must be at most 10000"),
        ({"num_global_key_value_heads": 5}, r"heads \(12\) must be divisible by KV heads \(5\)"),
        (
            {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": "false"},
            r"use_sliding_window \('false'\) must be true or false",
        ),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], text: str) -> None:
    """Numbers that cannot be are named."""
    with pytest.raises(UsageError, match=text):
        read(**fields)


def test_json_pitfalls(tmp_path: Path) -> None:
    """BOM, NaN and a folder are read; duplicate keys and broken JSON are refused by place."""
    path = tmp_path / "config.json"
    text = json.dumps(config(attention_dropout=float("nan"), torch_dtype="float16"))
    path.write_text(text, encoding="utf-8-sig")
    assert read_model(path).dtype == "fp16"
    assert read_model(tmp_path).name == tmp_path.name

    path.write_text('{"hidden_size": 1,\n "hidden_size": 2}')
    with pytest.raises(UsageError, match="'hidden_size' appears twice"):
        read_model(path)
    path.write_text('{"hidden_size": 1,\n // no\n}')
    with pytest.raises(UsageError, match=r"config.json:2:2: not JSON"):
        read_model(path)
    path.write_text("[" * 100_000)
    with pytest.raises(UsageError, match=r"config\.json: must not be nested so deeply"):
        read_model(path)
    path.write_text('{"hidden_size": ' + "9" * 5000 + "}")
    with pytest.raises(UsageError, match=r"config\.json: cannot be read: Exceeds the limit"):
        read_model(path)
    path.write_text("[]")
    with pytest.raises(UsageError, match="must hold a JSON object, not list"):
        read_model(path)
    with pytest.raises(UsageError, match=r"did you mean Llama-3\.1-8B"):
        read_model("llama-3.1-8")
    with pytest.raises(UsageError, match=r"must hold a config\.json"):
        read_model(Path(__file__).parent)


def test_a_pattern_may_be_a_list_of_letters() -> None:
    """Not only one word of them; it was taken for no pattern at all."""
    letters = read(hybrid_override_pattern=["M", "*", "-", "E"])

    assert letters.layers == read(hybrid_override_pattern="M*-E").layers
    assert [layer.kind for layer in letters.layers] == ["linear", "full", "none", "none"]
