"""`add_core_attention`: give every attention layer of a model a module to apply a style to."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

from hp_cp.transformers.call import enter_model
from hp_cp.transformers.core import IMPLEMENTATIONS, PREFIX, CoreAttention
from hp_cp.transformers.loss import GlobalCausalLoss
from hp_mesh.checks import fail, require, require_positive

__all__ = ["add_core_attention", "remove_core_attention"]

_WHERE = "add_core_attention"
_HANDLES = "_hp_cp_handles"

Model = TypeVar("Model", bound=PreTrainedModel)


def add_core_attention(model: Model, *, gradient_divisor: int | None = None) -> Model:
    """Give each attention layer of ``model`` a ``core_attention`` submodule, in place.

    The submodule takes q, k, v as ``[B, H, S, D]`` after the rotary embedding, so that a
    ``ContextParallel(seq_dim=2, head_dim=1)`` can be applied to
    ``"model.layers.*.self_attn.core_attention"``. Until one is, the model computes exactly what
    it did. The model's code, its parameters and its state dict stay as they are: the attention
    implementation becomes ``hp_cp_sdpa`` or ``hp_cp_eager``, both entries of transformers' own
    registries.

    With a style applied to every layer, a call of the model on a rank's contiguous shard

    - gets the rank's global ``position_ids`` if it has none; position ids that restart are packed
      documents, kept apart across shards;
    - takes ``attention_mask`` as this rank's shard or whole, 2-D, or as a 4-D mask over all keys;
    - returns with ``labels`` (this rank's shard or whole) or ``shift_labels`` the loss of the whole
      sequence; its gradients are scaled so that their *average* over the CP ranks, which is what
      FSDP and DDP take, is the gradient of the loss (see ``gradient_divisor``);
    - refuses a KV cache, ``output_attentions`` and ``logits_to_keep``.

    Args:
        model: A decoder of transformers, with or without its causal LM head, with the ``sdpa`` or
            ``eager`` attention implementation.
        gradient_divisor: By how much the reduction of gradients divides their sum over the CP
            ranks. Default: the CP size, as FSDP and DDP do over a mesh that contains the CP ranks;
            1 if you sum gradients yourself. As in `hp_comm.global_loss`.

    Returns:
        The same model. A second call changes nothing.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"{_WHERE}: model ({type(model).__name__}) must be a transformers PreTrainedModel; "
            "pass the model that AutoModelForCausalLM returned, before wrapping it"
        )
    if gradient_divisor is not None:
        require_positive(_WHERE, "gradient_divisor", gradient_divisor)
    if hasattr(model, _HANDLES):
        return model
    name = _check_implementation(model)
    layers = _attention_layers(model)
    _check_head(model)

    for layer in layers:
        layer.core_attention = CoreAttention()
        layer.core_attention.train(layer.training)
    model.set_attn_implementation(PREFIX + name)

    entered = {id(m): m for m in (model, model.base_model)}.values()
    handles: list[Any] = [
        m.register_forward_pre_hook(enter_model, with_kwargs=True) for m in entered
    ]
    if model is not model.base_model:
        model.loss_function = GlobalCausalLoss(model.loss_function, gradient_divisor)
    setattr(model, _HANDLES, handles)
    return model


def remove_core_attention(model: Model) -> Model:
    """Undo `add_core_attention`: the model is as transformers made it."""
    if not hasattr(model, _HANDLES):
        return model
    for handle in getattr(model, _HANDLES):
        handle.remove()
    delattr(model, _HANDLES)
    for layer in list(model.modules()):
        if isinstance(getattr(layer, "core_attention", None), CoreAttention):
            del layer.core_attention
    if isinstance(getattr(model, "_loss_function", None), GlobalCausalLoss):
        model.loss_function = model.loss_function.stock
    model.set_attn_implementation(model.config._attn_implementation.removeprefix(PREFIX))
    return model


def _check_implementation(model: PreTrainedModel) -> str:
    name = str(model.config._attn_implementation).removeprefix(PREFIX)
    require(
        name in IMPLEMENTATIONS,
        _WHERE,
        f"the attention implementation ({name}) must be sdpa or eager",
        'model.set_attn_implementation("sdpa") first',
    )
    require(
        bool(type(model)._supports_attention_backend),
        _WHERE,
        f"{type(model).__name__} must take its attention from transformers' attention registry",
        "use a model with _supports_attention_backend, such as Llama, Qwen2, Qwen3 or Mistral",
    )
    return name


def _attention_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers that call the attention registry: they know their KV groups and index."""
    layers = [
        module
        for module in model.modules()
        if hasattr(module, "num_key_value_groups")
        and hasattr(module, "layer_idx")
        and hasattr(sys.modules[type(module).__module__], "eager_attention_forward")
    ]
    expected = model.config.get_text_config().num_hidden_layers
    if len(layers) != expected:
        raise fail(
            _WHERE,
            f"{type(model).__name__} has {len(layers)} attention layers that can be found and must "
            f"have one in each of its {expected} layers",
            "decoders such as Llama, Qwen2, Qwen3 and Mistral are supported",
        )
    return layers


def _check_head(model: PreTrainedModel) -> None:
    """Refuse heads that pool over the sequence: they would pool over this rank's shard."""
    if model is model.base_model:
        return
    require(
        type(model).__name__.endswith("ForCausalLM"),
        _WHERE,
        f"{type(model).__name__} must be a base model or a causal LM: other heads read the tokens "
        "of this rank's shard as if they were the whole sequence",
        f"use {type(model.base_model).__name__} and put the head on gathered hidden states",
    )
