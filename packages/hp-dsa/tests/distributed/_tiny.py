"""Tiny models of transformers in exact float64, and their losses from the formulas."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

FAMILIES = {"deepseek": "DeepseekV32", "glm": "GlmMoeDsa"}
MODULES = {"deepseek": deepseek, "glm": glm}
B, S, TOPK, VOCAB = 2, 24, 5, 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "intermediate_size": 44,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 14,
    "q_lora_rank": 22,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 8,
    "v_head_dim": 7,
    "index_topk": TOPK,
    "index_head_dim": 10,
    "index_n_heads": 8,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 96,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
SPECIAL: dict[str, dict[str, Any]] = {
    "deepseek": {
        # yarn, so that the scale has a factor of its own
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 24,
        }
    },
    "glm": {"indexer_types": ["full", "shared", "full"]},
}
IDS = torch.randint(0, VOCAB, (B, S), generator=torch.Generator().manual_seed(1))


class _Wide(types.ModuleType):
    """torch as a model's code sees it, with double precision where it asks for single."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def exact() -> Iterator[None]:
    """Let a float64 model be one: norms, softmax and router of transformers compute in float32.

    Rounding there would hide what a comparison in float64 is to show: 1e-7 instead of 1e-13.
    """
    for module in MODULES.values():
        module.torch = _Wide("torch")
    try:
        yield
    finally:
        for module in MODULES.values():
            module.torch = torch


def build(family: str, **changes: Any) -> Any:
    """Return a causal LM in float64, the same weights on every call, large enough to select by."""
    name = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **SPECIAL[family], **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        # not the model's own initialisation: it draws from the generator that threads share
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.copy_(0.3 * drawn + (parameter.ndim == 1))
    return model


def lm_loss(logits: Tensor, ids: Tensor = IDS) -> Tensor:
    """Return the mean over all targets, in float64, which transformers' own is not."""
    targets = F.pad(ids, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def formula_loss(
    model: Any,
    seen: dict[int, dict[str, Any]],
    *,
    dense: bool = False,
    ends: Sequence[int] = (S,),
) -> Tensor:
    """Return the indexers' summed loss, written down from the formulas; keys of all heads, masks.

    Args:
        model: An unmodified model.
        seen: What its attention layers were called with, by layer, from `watch`.
        dense: Over all visible keys, not the selected ones.
        ends: Of packed documents.
    """
    visible = torch.block_diag(
        *(torch.ones(b - a, b - a).tril() for a, b in pairwise([0, *ends]))
    ).bool()
    total = torch.zeros((), dtype=torch.float64)
    for number, call in seen.items():
        layer = model.model.layers[number].self_attn
        if layer.indexer is None:
            continue
        used = visible[None]
        if not dense:
            nothing = torch.zeros(*call["topk"].shape[:2], S, dtype=torch.bool)
            used = used & nothing.scatter(-1, call["topk"].long(), True)
        with torch.no_grad():
            target = _attention(layer, call["x"], call["rotary"], used).mean(1)  # [B, S, S]
        scores = _scores(layer, call["x"], call["rotary"]).masked_fill(~used, -torch.inf)
        log_q = scores.log_softmax(-1).masked_fill(~used, 0.0)
        log_p = target.masked_fill(~used, 1.0).log()
        total = total + (target * (log_p - log_q)).sum()
    return total


def watch(model: Any) -> dict[int, dict[str, Any]]:
    """Record what the attention layers of an unmodified model are called with, and select."""
    seen: dict[int, dict[str, Any]] = {}

    def attention(layer: Any, args: Any, kwargs: Any) -> None:
        x, rotary = kwargs["hidden_states"].detach(), kwargs["position_embeddings"]
        seen[layer.layer_idx] = {"x": x, "rotary": rotary}

    def indexer(layer: Any, args: Any, output: Tensor) -> None:
        seen[layer.layer_idx]["topk"] = output

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(attention, with_kwargs=True)
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.register_forward_hook(indexer)
    return seen


def _rotated(x: Tensor, rotary: tuple[Tensor, Tensor], *, pairs: bool) -> Tensor:
    """Rotate ``[B, S, H, D]``: by complex numbers, the model's own way being another."""
    half = x.shape[-1] // 2
    cos, sin = (t[..., :half].unsqueeze(2).double() for t in rotary)
    x1, x2 = (x[..., 0::2], x[..., 1::2]) if pairs else (x[..., :half], x[..., half:])
    turned = torch.complex(x1, x2) * torch.complex(cos, sin).expand(x1.shape)
    return torch.cat([turned.real, turned.imag], -1)


def _attention(layer: Any, x: Tensor, rotary: Any, used: Tensor) -> Tensor:
    """Return the probabilities ``[B, H, S, S]`` with keys of all heads."""
    nope, rope, heads = layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.num_heads
    q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(x))).unflatten(-1, (heads, nope + rope))
    latent, k_rope = layer.kv_a_proj_with_mqa(x).split([layer.kv_lora_rank, rope], -1)
    kv = layer.kv_b_proj(layer.kv_a_layernorm(latent)).unflatten(-1, (heads, -1))
    logits = torch.einsum("bthd,bshd->bhts", q[..., :nope], kv[..., :nope])
    q_rope = _rotated(q[..., nope:], rotary, pairs=True)
    k_rope = _rotated(k_rope.unsqueeze(2), rotary, pairs=True)[:, :, 0]
    logits = logits + torch.einsum("bthd,bsd->bhts", q_rope, k_rope)
    return (logits * layer.scaling).masked_fill(~used[:, None], -torch.inf).softmax(-1)


def _scores(layer: Any, x: Tensor, rotary: Any) -> Tensor:
    """Return the index scores ``[B, S, S]``; half-split in DeepSeek, pairs in GLM."""
    indexer, rope = layer.indexer, layer.qk_rope_head_dim
    pairs = type(layer).__name__.startswith("Glm")
    residual = layer.q_a_layernorm(layer.q_a_proj(x)).detach()
    q = indexer.wq_b(residual).unflatten(-1, (indexer.n_heads, -1))
    k = indexer.k_norm(indexer.wk(x)).unsqueeze(2)
    q, k = (
        torch.cat([_rotated(t[..., :rope], rotary, pairs=pairs), t[..., rope:]], -1) for t in (q, k)
    )
    dots = torch.einsum("bthd,bsd->bths", q, k[:, :, 0]).relu()
    weights = indexer.weights_proj(x) * (indexer.n_heads * indexer.head_dim) ** -0.5
    return torch.einsum("bths,bth->bts", dots, weights)
