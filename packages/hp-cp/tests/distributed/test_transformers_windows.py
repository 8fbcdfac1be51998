"""Models with sliding layers, soft caps and learned sinks: the numbers of one process.

Mistral and Qwen2 with windows are in ``test_transformers_cp.py``. The families here compute norms
in float32, which here is float64 so that sharded and whole can be compared.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra is not installed")

import transformers

from .test_transformers_cp import assert_equal_on_all_ranks, single

SIZES = {
    "vocab_size": 61,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 96,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma2": ("Gemma2Config", "Gemma2", {"query_pre_attn_scalar": 10}),
    "gemma3": ("Gemma3TextConfig", "Gemma3", {"query_pre_attn_scalar": 10}),
    "gpt_oss": (
        "GptOssConfig",
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "experts_implementation": "eager",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}


def model_of(monkeypatch: pytest.MonkeyPatch, family: str, implementation: str) -> Any:
    """Build a small float64 model whose norms are float64 as well."""
    config_name, name, special = FAMILIES[family]
    home = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    if family == "gpt_oss":

        def norm(self: Any, x: Any) -> Any:
            return self.weight * x * torch.rsqrt(x.square().mean(-1, True) + self.variance_epsilon)
    else:

        def norm(self: Any, x: Any) -> Any:
            return self._norm(x) * (1 + self.weight)

    monkeypatch.setattr(getattr(home, f"{name}RMSNorm"), "forward", norm)
    config = getattr(transformers, config_name)(
        **{**SIZES, **special, "attn_implementation": implementation}
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.copy_(0.2 * drawn + (parameter.ndim == 1))
    return model


@pytest.mark.parametrize(
    ("family", "implementation"),
    [("gemma2", "eager"), ("gemma3", "sdpa"), ("gemma3", "eager"), ("gpt_oss", "eager")],
)
def test_sliding_layers_caps_and_sinks_train_as_in_one_process(
    monkeypatch: pytest.MonkeyPatch, family: str, implementation: str
) -> None:
    """Logits, loss, every gradient: Gemma2's soft cap and the sinks of gpt-oss among them."""
    model = model_of(monkeypatch, family, implementation)
    expected = single(model)
    model.zero_grad()
    for size, mode in ((2, "ulysses"), (2, "colossal"), (4, "hybrid"), (2, "balanced")):
        assert_equal_on_all_ranks(model, size, mode, expected)
    if family == "gpt_oss":
        assert_equal_on_all_ranks(model, 4, "balanced hybrid", expected)


def test_soft_caps_need_eager_attention() -> None:
    """sdpa would drop the cap in silence, so it is refused by name."""
    from hp_cp.transformers.core import _check_options
    from hp_mesh.window import AttentionWindow

    window = AttentionWindow(0, 12, 24, 24)
    for name in ("softcap", "s_aux"):
        _check_options({name: 30.0}, None, window, "eager")
        with pytest.raises(ValueError, match=f"{name} must be None .* with sdpa"):
            _check_options({name: 30.0}, None, window, "sdpa")
    for implementation in ("eager", "sdpa"):
        with pytest.raises(ValueError, match="position_bias must be None"):
            _check_options({"position_bias": torch.zeros(1)}, None, window, implementation)
