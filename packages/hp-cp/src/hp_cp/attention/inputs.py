"""Bring the arguments of one attention call to the one form that every path takes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hp_mesh.checks import fail, require
from hp_mesh.window import AttentionWindow

__all__ = ["Inputs", "prepare"]


class Inputs(NamedTuple):
    """Tensors of one call, 4-D, equal batch, one dtype, unit stride in the last dim.

    Attributes:
        q: ``[B, H, Lq, D]``.
        k: ``[B, Hkv, K, D]``, ``Hkv`` divides ``H``.
        v: ``[B, Hkv, K, Dv]``.
        mask: Broadcastable to ``[B, H, Lq, K]``, or None.
        shape: Shape of the result as the caller expects it, ``[..., H, Lq, Dv]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    shape: torch.Size


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    window: AttentionWindow,
    enable_gqa: bool,
    where: str,
) -> Inputs:
    """Check shapes and dtypes, apply autocast, and view everything as 4-D (no copy if it is)."""
    for name, x, rows, kind in (
        ("query", q, window.query_length, "query rows of the window"),
        ("key", k, window.key_length, "keys of the window"),
        ("value", v, window.key_length, "keys of the window"),
    ):
        if x.ndim < 2 or x.shape[-2] != rows:
            raise fail(
                where,
                f"{name} (shape {list(x.shape)}) must have {rows} rows in dim -2, the {kind}",
                "pass tensors as [..., heads, tokens, head size]",
            )
    q, k, v, mask = _as_autocast_would(q, k, v, mask)
    require(
        q.dtype == k.dtype == v.dtype,
        where,
        f"query, key and value must have the same dtype, not {q.dtype}, {k.dtype} and {v.dtype}",
        "cast them before attention",
    )
    if mask is not None:
        require(
            mask.dtype in (torch.bool, torch.float32, q.dtype),
            where,
            f"attn_mask ({mask.dtype}) must be bool, float32 or have the query's dtype ({q.dtype})",
            "cast it before attention",
        )
    plain = q.ndim == 2
    if plain:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    q, k, v = _match_heads(q, k, v, enable_gqa, where)
    lead = q.shape[:-3]
    if not lead == k.shape[:-3] == v.shape[:-3]:
        lead = _broadcast_shape(lead, k.shape[:-3], v.shape[:-3])
    shape = torch.Size((*lead, *q.shape[-3:-1], v.shape[-1]))
    q, k, v = (_flat_lead(x, lead) for x in (q, k, v))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if mask is not None:
        mask = mask[(None,) * max(4 - mask.ndim, 0)]
        if mask.ndim > 4 or len(lead) > 1:
            mask = _flat_lead(mask, lead)
    return Inputs(q, k, v, mask, shape[1:] if plain else shape)


def _broadcast_shape(*shapes: torch.Size) -> torch.Size:
    shape: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return shape


def _flat_lead(x: Tensor, lead: torch.Size) -> Tensor:
    """Broadcast the dims in front of the last three to ``lead`` and flatten them to one."""
    tail = x.shape[-3:]
    if x.ndim == 4 and x.shape[:1] == lead:
        return x
    return x.expand(*lead, *tail).reshape(lead.numel(), *tail)


def _match_heads(
    q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool, where: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Give k and v one head count that divides q's; torch's rules on which counts may meet."""
    H, Hk, Hv = q.shape[-3], k.shape[-3], v.shape[-3]
    if H == Hk == Hv:
        return q, k, v
    for name, count in (("key", Hk), ("value", Hv)):
        if enable_gqa:
            require(
                count > 0 and H % count == 0,
                where,
                f"{name} heads ({count}) must divide query heads ({H})",
                "repeat the heads so that they do",
            )
        elif count not in (1, H):
            raise fail(
                where,
                f"{name} heads ({count}) must equal query heads ({H})",
                "pass enable_gqa=True to share key and value heads",
            )
    if Hk == Hv:
        return q, k, v
    return q, k.repeat_interleave(H // Hk, -3), v.repeat_interleave(H // Hv, -3)


def _as_autocast_would(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Cast as autocast casts torch's own attention, which our autograd functions bypass."""
    kind = q.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return q, k, v, mask
    target = torch.get_autocast_dtype(kind)

    def cast(x: Tensor) -> Tensor:
        eligible = x.is_floating_point() and x.dtype != torch.float64 and x.device.type == kind
        return x.to(target) if eligible else x

    return cast(q), cast(k), cast(v), None if mask is None else cast(mask)
