"""Golden values: every preset reads as its model is published, layer by layer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from hp_tune.errors import UsageError
from hp_tune.models.hf_config import model_from_config, model_presets, read_model
from hp_tune.models.model import Attention

GOLDEN: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    # name: hidden, layers with MTP, heads, KV heads, head size, v head size, QK-norm
    "Llama-3.1-8B": (4096, 32, 32, 8, 128, 128, False),
    "Llama-3.1-70B": (8192, 80, 64, 8, 128, 128, False),
    "Llama-3.1-405B": (16384, 126, 128, 8, 128, 128, False),
    "Qwen1.5-72B": (8192, 80, 64, 64, 128, 128, False),
    "Qwen2.5-7B": (3584, 28, 28, 4, 128, 128, False),
    "Qwen2.5-72B": (8192, 80, 64, 8, 128, 128, False),
    "Qwen3-8B": (4096, 36, 32, 8, 128, 128, True),
    "Qwen3-235B-A22B": (4096, 94, 64, 4, 128, 128, True),
    "Qwen3-Next-80B-A3B": (2048, 48, 16, 2, 256, 256, True),
    "Qwen3.5-27B": (5120, 65, 24, 4, 256, 256, True),
    "Mistral-7B-v0.1": (4096, 32, 32, 8, 128, 128, False),
    "Mistral-7B-v0.2": (4096, 32, 32, 8, 128, 128, False),
    "Mixtral-8x7B": (4096, 32, 32, 8, 128, 128, False),
    "DeepSeek-V3": (7168, 62, 128, 128, 192, 128, False),
    "DeepSeek-V3.2": (7168, 62, 128, 128, 192, 128, False),
    "DeepSeek-V4-Flash": (4096, 44, 64, 1, 512, 512, False),
    "Kimi-K2.5": (7168, 61, 64, 64, 192, 128, False),
    "Kimi-K3": (7168, 93, 96, 96, 192, 128, False),
    "GLM-4.7": (5120, 93, 96, 8, 128, 128, True),
    "GLM-5": (6144, 79, 64, 64, 256, 256, False),
    "GLM-5.2": (6144, 79, 64, 64, 256, 256, False),
    "gpt-oss-20b": (2880, 24, 64, 8, 64, 64, False),
    "gpt-oss-120b": (2880, 36, 64, 8, 64, 64, False),
    "gemma-4-26B-A4B": (2816, 30, 16, 8, 256, 256, True),
    "Nemotron-3-Super-120B-A12B": (4096, 89, 32, 2, 128, 128, False),
    "Llama-3.3-Nemotron-Super-49B": (8192, 80, 64, 8, 128, 128, False),
    "MiMo-V2-Flash": (4096, 48, 64, 4, 192, 128, False),
    "Step-3.7-Flash": (4096, 48, 64, 8, 128, 128, False),
    "Llama-4-Scout-17B-16E": (5120, 48, 40, 8, 128, 128, True),
}


def test_every_preset_has_golden_values_and_a_source() -> None:
    """No preset without a place where its numbers were read."""
    assert set(model_presets()) == set(GOLDEN)
    assert all(read_model(name).source.startswith("config.json of ") for name in GOLDEN)


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_preset_reads_as_published(name: str) -> None:
    """Width, depth, heads and head sizes of its first layer with attention."""
    model = read_model(name)
    layer = next(layer for layer in model.layers if layer.exchanges)
    found = (
        model.hidden_size, len(model.layers), layer.num_heads, layer.num_kv_heads,
        layer.head_size, layer.v_head_size, model.qk_norm,
    )  # fmt: skip

    assert found == GOLDEN[name]
    assert model.dtype == "bf16"


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("Qwen2.5-72B", {"full": 80}),
        ("Mistral-7B-v0.1", {"sliding": 32}),
        ("Mistral-7B-v0.2", {"full": 32}),
        ("gpt-oss-120b", {"sliding": 18, "full": 18}),
        ("Qwen3-Next-80B-A3B", {"linear": 36, "full": 12}),
        ("Qwen3.5-27B", {"linear": 48, "full": 16 + 1}),
        ("gemma-4-26B-A4B", {"sliding": 25, "full": 5}),
        ("Kimi-K3", {"linear": 69, "full": 24}),
        ("Nemotron-3-Super-120B-A12B", {"linear": 40, "none": 40, "full": 8 + 1}),
        ("Llama-3.3-Nemotron-Super-49B", {"full": 49, "none": 31}),
        ("MiMo-V2-Flash", {"sliding": 39, "full": 9}),
        ("Step-3.7-Flash", {"sliding": 33, "full": 12 + 3}),
        ("Llama-4-Scout-17B-16E", {"chunked": 36, "full": 12}),
        ("DeepSeek-V4-Flash", {"sliding": 2 + 1, "compressed": 41}),
    ],
)
def test_layers_by_kind(name: str, kinds: dict[str, int]) -> None:
    """Windows, linear layers, layers without attention and prediction heads are counted apart."""
    assert Counter(layer.kind for layer in read_model(name).layers) == kinds


def layers_of(name: str, kind: str) -> set[Attention]:
    """The distinct layers of one kind."""
    return {layer for layer in read_model(name).layers if layer.kind == kind}


def test_layer_kinds_have_heads_and_windows_of_their_own() -> None:
    """MiMo's windows have twice the KV heads, gemma's full layers twice the head size."""
    (mimo,) = layers_of("MiMo-V2-Flash", "sliding")
    assert (mimo.num_kv_heads, mimo.head_size, mimo.v_head_size, mimo.window) == (8, 192, 128, 128)
    (gemma,) = layers_of("gemma-4-26B-A4B", "full")
    assert (gemma.num_heads, gemma.num_kv_heads, gemma.head_size) == (16, 2, 512)
    (sliding,) = layers_of("gemma-4-26B-A4B", "sliding")
    assert (sliding.num_kv_heads, sliding.head_size, sliding.window) == (8, 256, 1024)
    (chunked,) = layers_of("Llama-4-Scout-17B-16E", "chunked")
    assert chunked.window == 8192
    compressed = layers_of("DeepSeek-V4-Flash", "compressed")
    assert {layer.compression for layer in compressed} == {4, 128}


@pytest.mark.parametrize(
    ("name", "latent", "q_latent", "topk", "index_heads"),
    [
        ("DeepSeek-V3", 576, 1536, None, None),
        ("DeepSeek-V3.2", 576, 1536, 2048, 64),
        ("GLM-5", 576, 2048, 2048, 32),
        ("Kimi-K2.5", 576, 1536, None, None),
    ],
)
def test_latent_attention_and_its_indexer(
    name: str, latent: int, q_latent: int, topk: int | None, index_heads: int | None
) -> None:
    """kv_lora_rank + rope is what a token's K and V come from; DSA adds an indexer."""
    layer = read_model(name).layers[-1]

    assert (layer.latent_size, layer.rope_size, layer.q_latent_size) == (latent, 64, q_latent)
    assert (layer.index_topk, layer.index_heads) == (topk, index_heads)
    assert layer.is_sparse == (topk is not None)


def test_shared_indexers_are_known_layer_by_layer() -> None:
    """GLM-5.2 runs an indexer in 21 layers; the others take its selection."""
    assert sum(layer.has_indexer for layer in read_model("GLM-5.2").layers) == 21


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Llama-3.1-405B", 405.9), ("Qwen2.5-72B", 72.7), ("Qwen3-235B-A22B", 235.1),
        ("Mixtral-8x7B", 46.7), ("DeepSeek-V3", 684.5), ("gpt-oss-120b", 116.8),
        ("gpt-oss-20b", 20.9), ("Mistral-7B-v0.1", 7.24), ("GLM-4.7", 358.0),
    ],
)  # fmt: skip
def test_parameter_estimates_of_presets_are_within_one_percent(name: str, billions: float) -> None:
    """Published counts, those of prediction heads included; experts and dense layers apart."""
    parameters = read_model(name).parameters

    assert parameters is not None
    assert parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_experts_in_a_latent_space_are_not_estimated() -> None:
    """Their width is not the hidden size; the memory gate then says what it leaves out."""
    for name in ("Kimi-K3", "Nemotron-3-Super-120B-A12B"):
        model = read_model(name)
        assert model.parameters is None
        assert any("latent space" in note for note in model.notes)


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({"layers_block_type": ["mamba", "hybrid", "attention", "conv"]},
         "linear full full linear"),
        ({"attn_type_list": [0, 1, 0, 1]}, "linear full linear full"),
        ({"attn_layer_period": 2, "attn_layer_offset": 1}, "linear full linear full"),
        ({"hybrid_override_pattern": "M*-E"}, "linear full none none"),
        ({"model_type": "llama4_text", "attention_chunk_size": 8, "no_rope_layers": [1, 0, 1, 0]},
         "chunked full chunked full"),
        ({"model_type": "cohere2", "sliding_window": 8, "sliding_window_pattern": 4},
         "sliding sliding sliding full"),
    ],
    ids=["blocks", "types", "jamba", "letters", "llama4", "cohere2"],
)  # fmt: skip
def test_spellings_of_layer_kinds(fields: dict[str, Any], kinds: str) -> None:
    """Each family writes it in its own way."""
    base = {
        "model_type": "llama", "hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 12
    }  # fmt: skip
    model = model_from_config({**base, **fields}, "tiny")

    assert " ".join(layer.kind for layer in model.layers) == kinds


def test_unknown_letters_and_missing_indexer_fields_are_named() -> None:
    """What a family would need is listed with the aliases that were tried."""
    base = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 12}
    with pytest.raises(UsageError, match=r"letter 'Z' of hybrid_override_pattern is unknown"):
        model_from_config({**base, "hybrid_override_pattern": "*Z"}, "tiny")
    mla = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    with pytest.raises(UsageError, match=r"indexer heads \(tried index_n_heads\)"):
        model_from_config({**base, **mla, "index_topk": 4}, "tiny")
