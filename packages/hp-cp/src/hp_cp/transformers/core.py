"""`core_attention`: the module that a context-parallel style is applied to.

The attention interface that `add_core_attention` registers calls ``module.core_attention`` with
q, k, v after the rotary embedding. Without a style the core computes what transformers computes;
inside a style it sees the whole sequence and asks `attention_window` which rows are its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from hp_cp.transformers.masks import MaskDescription, describe_mask
from hp_cp.transformers.patterns import attend_without_mask
from hp_mesh.checks import fail, require
from hp_mesh.open_views import attention_window

if TYPE_CHECKING:
    from hp_cp.transformers.call import GlobalCall
    from hp_mesh.window import AttentionWindow

__all__ = ["IMPLEMENTATIONS", "PREFIX", "CoreAttention"]

PREFIX = "hp_cp_"
"""What our names in transformers' registries begin with."""

IMPLEMENTATIONS = ("sdpa", "eager")
"""The stock implementations that have a counterpart of ours."""

_WHERE = "core_attention"

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]


class CoreAttention(nn.Module):
    """The attention product of one layer, without projections. No parameters, no state."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | MaskDescription | None = None,
        *,
        layer: nn.Module,
        implementation: str,
        call: GlobalCall | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return ``(output, weights)`` as transformers' attention functions do.

        Args:
            query: ``[B, H, S, D]``, after the rotary embedding.
            key: ``[B, Hkv, S, D]``.
            value: ``[B, Hkv, S, Dv]``.
            attention_mask: What the mask interface described, or a 4-D tensor of the caller's own
                with global rows, or this rank's rows, over all keys.
            layer: The attention layer that calls: scale, dropout and causality are read from it.
            implementation: ``"sdpa"`` or ``"eager"``.
            call: The global facts of the model call; None outside context parallelism.
            **options: What the layer passes to its attention function.

        Returns:
            ``[B, S, H, Dv]`` (note the order), and the weights ``[B, H, S, S]`` where eager
            attention without context parallelism has them, else None.
        """
        window = attention_window()
        if window is None:
            if isinstance(attention_mask, MaskDescription):
                attention_mask = attention_mask.stock()
            stock = stock_attention(layer, implementation)
            return stock(layer, query, key, value, attention_mask, **options)

        if implementation == "sdpa" and isinstance(attention_mask, MaskDescription) and call:
            _check_options(options, None, window, implementation, masked=True)
            out = attend_without_mask(query, key, value, attention_mask, call, options)
            if out is not None:
                return out, None
        mask = _own_rows(attention_mask, window, call)
        _check_options(options, mask, window, implementation)
        groups = query.shape[1] // key.shape[1]
        if implementation == "sdpa":
            return _sdpa(layer, query, key, value, mask, window, groups, options), None
        seen = _WithGroups(layer, groups)
        output, _ = stock_attention(layer, "eager")(seen, query, key, value, mask, **options)
        return output, None


def stock_attention(layer: nn.Module, implementation: str) -> AttentionFunction:
    """Return transformers' own attention function for ``layer``.

    Eager attention is no entry of the registry: each model file has its own.
    """
    if implementation == "eager":
        home = sys.modules[type(layer).__module__]
        function: AttentionFunction = home.eager_attention_forward
        return function
    registered: AttentionFunction = ALL_ATTENTION_FUNCTIONS[implementation]
    return registered


def attend(
    implementation: str,
    layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | MaskDescription | None,
    hp_cp_call: GlobalCall | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Stand in for transformers' attention interface ``implementation``."""
    core = getattr(layer, "core_attention", None)
    if core is None:
        # a model that only shares its config with a prepared one
        core = CoreAttention()
    output: tuple[Tensor, Tensor | None] = core(
        query,
        key,
        value,
        attention_mask=attention_mask,
        layer=layer,
        implementation=implementation,
        call=hp_cp_call,
        **options,
    )
    return output


class _WithGroups:
    """A layer as its eager attention reads it, with the group count that q and k really have."""

    def __init__(self, layer: nn.Module, groups: int) -> None:
        self._layer = layer
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _own_rows(
    mask: Tensor | MaskDescription | None, window: AttentionWindow, call: GlobalCall | None
) -> Tensor | None:
    if isinstance(mask, MaskDescription):
        if call is None:
            raise fail(
                _WHERE,
                "the layer was called with a mask but without the facts of the global call",
                "call the model that add_core_attention returned",
            )
        return mask.rows(window, call)
    if mask is None:
        return None
    require(
        mask.ndim == 4,
        _WHERE,
        f"attention_mask (shape {tuple(mask.shape)}) must have 4 dims here",
        "pass [B, 1 or H, rows, keys], or a 2-D padding mask to the model",
    )
    rows, keys = mask.shape[2], mask.shape[3]
    require(
        keys == window.key_length,
        _WHERE,
        f"attention_mask has {keys} key columns and must have one per key of the whole sequence "
        f"({window.key_length})",
        "do not cut a mask along its keys",
    )
    if rows == window.global_length:
        return mask[:, :, window.query_start : window.query_end]
    require(
        rows in (1, window.query_length),
        _WHERE,
        f"attention_mask has {rows} rows and must have the global length ({window.global_length}) "
        f"or the rows of this rank ({window.query_length})",
        "pass the mask of the whole sequence",
    )
    return mask


def _check_options(
    options: dict[str, Any],
    mask: Tensor | None,
    window: AttentionWindow,
    implementation: str,
    *,
    masked: bool = False,
) -> None:
    # a model's own eager attention applies soft caps and learned sinks to the scores, which are
    # those of this rank's rows and heads; sdpa drops them in silence
    on_scores = () if implementation == "eager" else ("s_aux", "softcap")
    for name in ("position_bias", *on_scores):
        require(
            options.get(name) is None,
            _WHERE,
            f"{name} must be None under context parallelism with {implementation}",
            "soft caps and learned sinks need attn_implementation='eager'; biases of positions are "
            "not supported",
        )
    size = options.get("sliding_window")
    require(
        masked or mask is not None or size is None or size > window.global_length,
        _WHERE,
        f"sliding_window ({size}) must come with the mask that cuts it from a sequence of "
        f"{window.global_length} tokens",
        "let the model build its masks",
    )


def _sdpa(
    layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    window: AttentionWindow,
    groups: int,
    options: dict[str, Any],
) -> Tensor:
    # not transformers' wrapper: it cuts the keys to the length of q, which is wrong for a window
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(layer, "is_causal", True)
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=options.get("dropout", 0.0),
        scale=options.get("scaling"),
        is_causal=bool(causal) and mask is None and window.global_length > 1,
        enable_gqa=groups > 1,
    )
    return output.transpose(1, 2).contiguous()  # [B, S, H, Dv]


# at import, not in add_core_attention: a pickled model names these in its config
for _name in IMPLEMENTATIONS:
    AttentionInterface.register(PREFIX + _name, partial(attend, _name))
    AttentionMaskInterface.register(PREFIX + _name, partial(describe_mask, _name))
