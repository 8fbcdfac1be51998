"""Attention ops inside the boundary: unwrap, compute this rank's rows, wrap.

Registered in `hp_mesh.handlers`; the arithmetic on local tensors is in `hp_cp.attention`. An op may
be handed DTensors (the default convention) or plain local tensors (``use_local_input=True``, or a
core that calls ``to_local()`` itself).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard

from hp_cp.attention import rewrite_fusion_attention, window_sdpa
from hp_cp.attention.rng import seeded
from hp_cp.crossed import refuse_crossed_dims
from hp_cp.flex import register_flex_attention
from hp_cp.packed import register_packed_attention
from hp_cp.sdpa_rows import sdpa_of_rows
from hp_cp.sliding import register_sliding_window
from hp_cp.streamed import streamed_sdpa
from hp_cp.unwrap import (
    beside_scores,
    block_seed,
    keys_beside,
    on_mesh,
    query_window,
    rows_beside,
    shard_range,
)
from hp_cp.varlen import register_varlen
from hp_cp.view import compare
from hp_cp.windowed import Halo, check_band, fetch_band, halo_of
from hp_cp.windowed_sdpa import windowed_sdpa
from hp_mesh._torch import from_local, to_local
from hp_mesh.checks import fail, read_integers
from hp_mesh.handlers import register_handler
from hp_mesh.plain import parts_beside_cp
from hp_mesh.view import View
from hp_mesh.window import Range

__all__ = ["register_attention_handlers"]


def register_attention_handlers() -> None:
    """Register the handlers of this file; called once, when the style is imported."""
    register_handler(F.scaled_dot_product_attention, _sdpa, streams=True)
    register_handler(F.dropout, _dropout)
    register_handler(torch.dropout, _dropout)
    for version, suffix in ((1, ""), (2, "_v2"), (3, "_v3")):
        name = f"npu::npu_fusion_attention{suffix}"
        register_handler(name, _FusionHandler(version), streams=True)
    register_packed_attention()
    register_varlen()
    register_sliding_window()
    register_flex_attention()


def _sdpa_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> dict[str, Any]:
    """Name the arguments of ``F.scaled_dot_product_attention``, which has no signature."""
    return locals()


def _sdpa(
    view: View, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    given = _sdpa_arguments(*args, **kwargs)
    tensors = [given.pop(name) for name in ("query", "key", "value")]
    mask = given.pop("attn_mask")
    where = f"{view.where}: scaled_dot_product_attention"
    if not any(isinstance(t, DTensor) for t in tensors):
        return _local_sdpa(view, func, tensors, mask, given, where)
    if not any(view.owns(t) for t in tensors):
        return func(*args, **kwargs)  # DTensors of another mesh
    if view.owns(tensors[0]) and tensors[0].ndim > 2:
        seq_dim = tensors[0].ndim - 2
        refuse_crossed_dims(view, tensors[0], tensors[1], seq_dim, seq_dim - 1, where)
    if view.streamed is not None and any(map(view.streamed.holds, tensors[1:])):
        if isinstance(view.streamed, Halo):
            return windowed_sdpa(view, view.streamed, tensors, mask, given, where)
        return streamed_sdpa(view, view.streamed, tensors, mask, given, where)
    q, k, v = (on_mesh(view, t) for t in tensors)
    seq_dim = q.ndim - 2
    window = query_window(view, q, seq_dim, k.size(-2))
    keys, values = (keys_beside(view, x, q, seq_dim, where) for x in (k, v))
    return sdpa_of_rows(view, q, keys, values, window, mask, given, where)


def _local_sdpa(
    view: View,
    func: Callable[..., Any],
    tensors: Sequence[Tensor],
    mask: Tensor | None,
    given: dict[str, Any],
    where: str,
) -> Any:
    """Compute attention of plain local tensors, if they are the rows and keys of the window."""
    q, k, v = tensors
    if min(q.ndim, k.ndim) > 2:
        refuse_crossed_dims(view, q, k, -2, -3, where)
    window, rows, keys = view.window, q.size(-2), k.size(-2)
    if rows == window.query_length and keys == window.key_length:
        return window_sdpa(
            q,
            k,
            v,
            window,
            attn_mask=mask,
            heads=view.heads,
            num_heads=view.num_heads,
            dropout_seed=block_seed(view, view.query_placements, given["dropout_p"]),
            where=where,
            **given,
        )
    # rows of the window with other keys than its own: torch's flag would start at the wrong row
    if given["is_causal"] and (rows != keys or rows == window.query_length):
        raise fail(
            where,
            f"is_causal=True on {rows} query rows and {keys} keys must be the rows "
            f"({window.query_length}) and keys ({window.key_length}) of the attention window, "
            "whose place in the sequence is known",
            "pass attn_mask with rows from attention_window(), or q and k whole",
        )
    return func(q, k, v, attn_mask=mask, **given)


_DIMS = {"BSH": (1, 2), "SBH": (0, 2), "BSND": (1, 2), "BNSD": (2, 1), "TND": (0, 1)}
"""``(seq_dim, head_dim)`` of q by ``input_layout``; in BSH and SBH heads and head size are one."""

_BATCH_DIM = {"BSH": 0, "SBH": 1, "BSND": 0, "BNSD": 0}


def _compare_documents(view: View, given: Mapping[str, Any], where: str) -> None:
    def told() -> dict[str, object]:
        found = {name: given.get(name) for name in ("actual_seq_qlen", "actual_seq_kvlen")}
        return {n: None if x is None else read_integers(where, n, x) for n, x in found.items()}

    compare(view, where, told)


class _FusionHandler:
    """Runs one version of ``npu_fusion_attention`` on this rank's rows."""

    def __init__(self, version: int) -> None:
        self.version: Any = version

    def __call__(
        self, view: View, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        schema = getattr(func, "_schema", None) or func.default._schema
        names = [argument.name for argument in schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        tensors = [given.pop(name) for name in ("query", "key", "value")]
        head_num, layout = given.pop("head_num"), given.pop("input_layout")
        where = f"{view.where}: npu_fusion_attention"
        if layout not in _DIMS:
            raise fail(where, f"input_layout ({layout!r}) must be one of {', '.join(_DIMS)}")
        seq_dim, head_dim = _DIMS[layout]
        placements: tuple[Placement, ...]
        held: Range | None = None
        if any(view.owns(t) for t in tensors):
            if layout == "TND":
                _compare_documents(view, given, where)
            if view.owns(tensors[0]):
                refuse_crossed_dims(view, tensors[0], tensors[1], seq_dim, head_dim, where)
            q, k, v = (on_mesh(view, t) for t in tensors)
            placements, grads = tuple(q.placements), view.partial_grads(q.placements)
            window = query_window(view, q, seq_dim, k.size(seq_dim))
            halo = halo_of(view, k, v, where)
            if halo is not None:
                check_band(halo, given, self.version, layout, where)
            unit = q.size(head_dim) // head_num if layout in ("BSH", "SBH") else 1
            first, last = shard_range(view.mesh, placements, head_dim, q.size(head_dim))
            heads, num_heads = (first // unit, last // unit), q.size(head_dim) // unit
            batch_dim = _BATCH_DIM.get(layout)
            for name, dim in (("atten_mask", -3), ("pse", -3), ("sink", -1)):
                given[name] = beside_scores(
                    view,
                    given.get(name),
                    q,
                    batch_dim=batch_dim,
                    head_dim=dim,
                    parts=parts_beside_cp(view, q, head_dim),
                )
            if given.get("query_rope") is not None:
                given["query_rope"] = rows_beside(view, given["query_rope"], q)
            if given.get("key_rope") is not None:
                key_rope = on_mesh(view, given["key_rope"])
                given["key_rope"] = keys_beside(view, key_rope, q, seq_dim, where)
            q_local = to_local(q, grads)
            if halo is None:
                k_local, v_local = (keys_beside(view, x, q, seq_dim, where) for x in (k, v))
            else:
                k_local, v_local, held = fetch_band(view, halo, q, k, v, seq_dim, where)
        elif any(isinstance(t, DTensor) for t in tensors):
            return func(*args, **kwargs)
        else:
            rows, keys = tensors[0].size(seq_dim), tensors[1].size(seq_dim)
            if (rows, keys) != (view.window.query_length, view.window.key_length):
                return func(*args, **kwargs)
            if layout == "TND":
                _compare_documents(view, given, where)
            placements, window = (), view.window
            q_local, k_local, v_local = tensors
            heads, num_heads = view.heads, view.num_heads
        given = {name: value for name, value in given.items() if value is not None}
        q_local, k_local, v_local, head_num, given = rewrite_fusion_attention(
            self.version,
            q_local,
            k_local,
            v_local,
            head_num,
            layout,
            window,
            given,
            heads=heads,
            num_heads=num_heads,
            held=held,
            where=where,
        )
        seed = block_seed(
            view, placements or view.query_placements, 1.0 - given.get("keep_prob", 1.0)
        )
        with contextlib.nullcontext() if seed is None else seeded(q_local.device, seed):
            outputs = func(q_local, k_local, v_local, head_num, layout, **given)
        if not placements:
            return outputs
        return self._wrap(view, outputs, placements, layout)

    def _wrap(
        self, view: View, outputs: Sequence[Any], placements: Sequence[Placement], layout: str
    ) -> tuple[Any, ...]:
        """Wrap the output, and the softmax statistics ``[B, N, S, 8]`` or ``[T, N, 8]``.

        Without ``softmax_layout="TND"`` the kernel fills the latter head by head, whatever its
        shape says: gathered over ranks, they are blocks of the ranks' own.
        """
        seq_dim, head_dim = _DIMS[layout]
        moved = {seq_dim: 0, head_dim: 1} if layout == "TND" else {seq_dim: 2, head_dim: 1}
        statistics = [Shard(moved.get(p.dim, 0)) if isinstance(p, Shard) else p for p in placements]
        attention, softmax_max, softmax_sum, *rest = outputs
        return (
            from_local(attention, view.mesh, placements, view.partial_grads(placements)),
            from_local(softmax_max, view.mesh, statistics),
            from_local(softmax_sum, view.mesh, statistics),
            *rest,
        )


def _dropout(
    view: View, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Drop with a seed of this rank's block: ranks seeded alike must not drop alike."""
    names = ("input", "p", "training" if func is F.dropout else "train", "inplace")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x, p = given["input"], given.get("p", 0.5)
    training = given.get("training", given.get("train", True))
    if not view.owns(x) or not training or p == 0.0:
        return func(*args, **kwargs)
    if given.get("inplace", False):
        raise fail(
            view.where,
            "dropout with inplace (True) must not be used inside the boundary",
            "set inplace=False",
        )
    grads = view.partial_grads(x.placements)
    local = to_local(x, grads)
    seed = block_seed(view, x.placements, p)
    assert seed is not None, "p > 0 draws a seed"
    with seeded(local.device, seed):
        dropped = F.dropout(local, p, training=True)
    return from_local(dropped, view.mesh, x.placements, grads)
