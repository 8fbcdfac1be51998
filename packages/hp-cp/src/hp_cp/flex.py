"""`flex_attention`: torch's, told which rows and heads of the whole this rank has.

torch's own compiles itself, so a boundary cannot run it as it runs an operator, and of a rank's
part it would count rows and heads from 0. This one is the same function outside a boundary; inside,
``score_mod`` and ``mask_mod`` are asked about positions of the whole sequence, on every rank.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from hp_cp.crossed import refuse_crossed_dims
from hp_cp.flex_masks import Part, blocks_of, shifted_score_mod
from hp_cp.unwrap import keys_beside, on_mesh, query_window, shard_range
from hp_mesh._torch import from_local, to_local
from hp_mesh.checks import fail, require
from hp_mesh.handlers import register_handler
from hp_mesh.overrides import seen_by_views
from hp_mesh.view import View
from hp_mesh.window import Range

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["flex_attention", "register_flex_attention"]

_TORCHS = "torch.nn.attention.flex_attention"


@seen_by_views
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
) -> Tensor:
    """Compute ``torch.nn.attention.flex_attention.flex_attention``, inside a boundary as outside.

    Args:
        query: ``[B, H, S, D]``; use ``seq_dim=2, head_dim=1`` for the style, or transpose.
        key: ``[B, Hkv, S, D]``.
        value: ``[B, Hkv, S, Dv]``.
        score_mod: ``(score, batch, head, query, key)`` to a score; positions are of the whole.
        block_mask: Of the whole sequence, from ``create_block_mask`` with lengths taken from k.
            Blocks are cut where a rank's first row is a multiple of the block size (128), and made
            anew from its ``mask_mod`` otherwise.
        scale: Factor on the scores, ``1 / sqrt(D)`` by default.
        enable_gqa: Whether query heads share KV heads.
        kernel_options: Handed on to torch's kernels.

    Returns:
        ``[B, H, S, Dv]``.
    """
    given = None if kernel_options is None else dict(kernel_options)
    result = _kernel(query.device.type)(
        query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options=given
    )
    return cast(Tensor, result)


@functools.cache
def _kernel(device_type: str) -> Callable[..., Any]:
    """Return torch's function, compiled where there are kernels for it."""
    from torch.nn.attention.flex_attention import flex_attention as torchs

    kernel: Any = torchs if device_type == "cpu" else torch.compile(torchs)
    return cast(Callable[..., Any], kernel)


def register_flex_attention() -> None:
    """Let `flex_attention` run on this rank's rows inside every boundary, and torch's own not."""
    register_handler(flex_attention, _flex)
    register_handler(cast(Any, Tensor).is_nested.__get__, _is_nested, knows_rows=True, streams=True)


def _arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: Any = None,
    enable_gqa: bool = False,
    kernel_options: Any = None,
) -> dict[str, Any]:
    """Name the arguments."""
    return locals()


def _flex(
    view: View, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    given = _arguments(*args, **kwargs)
    tensors: list[Tensor] = [given.pop(name) for name in ("query", "key", "value")]
    where = f"{view.where}: flex_attention"
    owned = any(view.owns(t) for t in tensors)
    if not owned and any(isinstance(t, DTensor) for t in tensors):
        return func(*args, **kwargs)  # DTensors of another mesh
    require(
        all(t.ndim == 4 for t in tensors),
        where,
        f"query, key and value (shapes {[list(t.shape) for t in tensors]}) must have 4 dims, "
        "[batch, heads, tokens, size]",
        "transpose [B, S, H, D] with transpose(1, 2)",
    )
    refuse_crossed_dims(view, tensors[0], tensors[1], 2, 1, where)
    placements: tuple[Placement, ...] = ()
    window, heads = view.window, view.heads
    batch, of = (0, tensors[0].size(0)), (tensors[0].size(0), view.num_heads)
    if owned:
        q = on_mesh(view, tensors[0])
        placements, grads = tuple(q.placements), view.partial_grads(q.placements)
        window = query_window(view, q, 2, tensors[1].size(2))
        kv = [keys_beside(view, on_mesh(view, x), q, 2, where) for x in tensors[1:]]
        tensors = [to_local(q, grads), *kv]
        batch = shard_range(view.mesh, placements, 0, q.size(0))
        heads, of = _heads(view, q), (q.size(0), view.head_group[1] * q.size(1))
    rows, keys = tensors[0].size(2), tensors[1].size(2)
    require(
        (rows, keys) == (window.query_length, window.key_length),
        where,
        f"{rows} query rows and {keys} keys must be the rows ({window.query_length}) and keys "
        f"({window.key_length}) of the attention window, whose place in the sequence is known",
        "pass q and k whole",
    )
    part = Part(batch, heads, window, of)
    if given["score_mod"] is not None:
        given["score_mod"] = shifted_score_mod(given["score_mod"], part)
    if given["block_mask"] is not None:
        given["block_mask"] = blocks_of(part, given["block_mask"], tensors[0].device, where)
    out = _kernel(tensors[0].device.type)(*tensors, **given)
    return from_local(out, view.mesh, placements, grads) if placements else out


def _heads(view: View, q: DTensor) -> Range:
    """Return which of the model's query heads this rank has of ``q``, ``[B, H, S, D]``."""
    first, last = shard_range(view.mesh, q.placements, 1, q.size(1))
    group, groups = view.head_group
    if groups == 1:
        return first, last
    here = view.num_heads // groups  # of a rank of tensor parallelism, in this group
    start = first // here * view.num_heads + group * here
    return start + first % here, start + first % here + last - first


def _is_nested(
    view: View, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Refuse torch's function by the question that it begins with: whether q, k, v are nested."""
    frame = sys._getframe(1)
    while frame is not None and frame is not view.frame:
        if frame.f_globals.get("__name__") == _TORCHS:
            raise fail(
                view.where,
                f"{_TORCHS}.flex_attention inside the boundary would count this rank's rows and "
                "heads from 0; it must be hp_cp.flex_attention, which takes the same arguments",
                "from hp_cp import flex_attention",
            )
        frame = cast(Any, frame.f_back)
    return func(*args, **kwargs)
