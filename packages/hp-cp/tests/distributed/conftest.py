from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Any]:
    """Build a small float64 causal LM of transformers, the same weights on every call.

    ``mistral`` has a window shorter than the sequences of the tests, ``qwen2`` has it in some of
    its layers. 6 query heads share 2 KV heads; no size is a power of two.
    """
    transformers = pytest.importorskip("transformers", reason="the extra is not installed")
    families = {
        "llama": ("Llama", {}),
        "mistral": ("Mistral", {"sliding_window": 5}),
        "qwen2": (
            "Qwen2",
            {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        ),
        "qwen3": ("Qwen3", {}),
    }

    def build(family: str = "llama", implementation: str = "sdpa", **changes: Any) -> Any:
        name, special = families[family]
        sizes: dict[str, Any] = {
            "vocab_size": 61,
            "hidden_size": 36,
            "intermediate_size": 44,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 10,
            "max_position_embeddings": 96,
            "initializer_range": 0.3,
            "attn_implementation": implementation,
        }
        config = getattr(transformers, f"{name}Config")(**{**sizes, **special, **changes})
        model = getattr(transformers, f"{name}ForCausalLM")(config).double()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            # not the model's own initialisation: it draws from the generator that threads share
            for parameter in model.parameters():
                drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.copy_(0.2 * drawn + (parameter.ndim == 1))
        return model

    return build
