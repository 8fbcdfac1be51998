"""An attention layer as a model has it: projections, handoffs and a core; MHA, GQA, MQA and MLA."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_cp.sliding import sliding_window_attention
from hp_mesh.handoff import Handoff
from hp_mesh.open_views import attention_window
from hp_tune.measured.request import LayerShape

__all__ = ["Core", "DenseLayer", "DenseParts", "linear"]


def linear(inputs: int, outputs: int, like: torch.Tensor) -> nn.Linear:
    """Return a layer without bias, of dtype and device of ``like``; drawn by `draw`."""
    return nn.Linear(inputs, outputs, bias=False, dtype=like.dtype, device=like.device)


class DenseParts(nn.Module):
    """The projections of a layer, which all configurations share."""

    def __init__(self, hidden: int, shape: LayerShape, like: Tensor) -> None:
        super().__init__()
        self.shape = shape
        H, Hkv, D, Dv = shape.num_heads, shape.num_kv_heads, shape.head_size, shape.v_head_size
        source = shape.q_latent_size
        self.q_down = linear(hidden, source, like) if source else None
        self.q_proj = linear(source or hidden, H * D, like)
        if shape.latent_size is None:
            self.k_proj = linear(hidden, Hkv * D, like)
            self.v_proj = linear(hidden, Hkv * Dv, like)
        else:
            self.kv_down = linear(hidden, shape.latent_size, like)
            self.kv_up = linear(
                shape.latent_size - shape.rope_size, Hkv * (shape.nope_size + Dv), like
            )
        self.o_proj = linear(H * Dv, hidden, like)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``[..., H, D]``, ``[..., Hkv, D]`` and ``[..., Hkv, Dv]`` of ``[..., hidden]``."""
        shape = self.shape
        source = x if self.q_down is None else self.q_down(x)
        q = self.q_proj(source).unflatten(-1, (shape.num_heads, shape.head_size))
        if shape.latent_size is None:
            k = self.k_proj(x).unflatten(-1, (shape.num_kv_heads, shape.head_size))
            v = self.v_proj(x).unflatten(-1, (shape.num_kv_heads, shape.v_head_size))
            return q, k, v
        latent = shape.latent_size - shape.rope_size
        latents, rope = self.kv_down(x).split([latent, shape.rope_size], -1)
        up = self.kv_up(latents).unflatten(-1, (shape.num_kv_heads, -1))
        k, v = up.split([shape.nope_size, shape.v_head_size], -1)
        shared = rope.unsqueeze(-2).expand(*k.shape[:-1], shape.rope_size)
        return q, torch.cat([k, shared], -1), v


class Core(nn.Module):
    """Softmax attention as written for one device.

    Causal windows are `hp_cp.sliding_window_attention`; chunks, and windows to both sides, are
    masks of ``F.scaled_dot_product_attention``, which computes what they hide.
    """

    def __init__(self, shape: LayerShape, layout: str, causal: bool) -> None:
        super().__init__()
        self.shape, self.layout, self.causal = shape, layout, causal
        self._masks: dict[tuple[int, int, int], Tensor] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend; q, k, v and the result in the layout."""
        q, k, v = (_heads_first(x, self.layout) for x in (q, k, v))
        if self.causal and self.shape.slides:
            assert self.shape.window is not None, "a layer that slides has a window"
            sinks = self.shape.sink_tokens
            windowed = sliding_window_attention(q, k, v, self.shape.window, sink_tokens=sinks)
            return _heads_back(windowed, self.layout)
        mask = self._mask(q)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            mask,
            is_causal=self.causal and mask is None,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return _heads_back(out, self.layout)

    def _mask(self, q: Tensor) -> Tensor | None:
        """Return ``[L, S]``, True where a row of this rank sees a key, or None for all of them."""
        size, length = self.shape.window, q.shape[-2]
        if size is None or size >= length:
            return None
        window = attention_window()
        start, rows = (window.query_start, window.query_length) if window else (0, length)
        keys = window.key_length if window else length
        mask = self._masks.get((start, rows, keys))
        if mask is None:
            row = torch.arange(start, start + rows, device=q.device)[:, None]
            key = torch.arange(keys, device=q.device)[None, :]
            if self.shape.kind == "chunked":
                mask = row // size == key // size
            else:
                mask = (row - key < size) & (key - row < size)
            if self.causal:
                mask &= row >= key
            self._masks[start, rows, keys] = mask
        return mask


class DenseLayer(nn.Module):
    """One layer under one configuration.

    Attributes:
        core: What a style is put on.
        handoffs: Where q, k and v are final.
    """

    def __init__(self, parts: DenseParts, layout: str, causal: bool) -> None:
        super().__init__()
        self.parts, self.layout = parts, layout
        self.core = Core(parts.shape, layout, causal)
        self.handoffs = nn.ModuleDict({name: Handoff() for name in "qkv"})

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., hidden]`` of ``[..., hidden]``: ``[B, L]``, ``[L, B]`` or ``[T]`` rows."""
        q, k, v = (
            self.handoffs[name](tensor.transpose(1, 2) if self.layout == "BNSD" else tensor)
            for name, tensor in zip("qkv", self.parts.qkv(x), strict=True)
        )
        out = self.core(q, k, v)
        out = out.transpose(1, 2) if self.layout == "BNSD" else out
        result: Tensor = self.parts.o_proj(out.flatten(-2))
        return result


def _heads_first(x: Tensor, layout: str) -> Tensor:
    """Return ``[B, H, S, D]``."""
    match layout:
        case "BSHD":
            return x.transpose(1, 2)
        case "SBHD":
            return x.permute(1, 2, 0, 3)
        case "TND":
            return x.transpose(0, 1).unsqueeze(0)
    return x


def _heads_back(x: Tensor, layout: str) -> Tensor:
    match layout:
        case "BSHD":
            return x.transpose(1, 2)
        case "SBHD":
            return x.permute(2, 0, 1, 3)
        case "TND":
            return x.squeeze(0).transpose(0, 1)
    return x
