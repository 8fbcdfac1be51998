"""`sliding_window_attention`: causal attention in a window, the same with and without a style.

``F.scaled_dot_product_attention`` has no window but a mask of sequence length squared. This
operator holds no more than a block of scores, and reads no key outside the window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import handle_torch_function, has_torch_function

from hp_cp.attention.band import KeySpans, band_attention
from hp_cp.unwrap import keys_beside, on_mesh, query_window
from hp_cp.windowed import fetch_keys, halo_of
from hp_mesh._torch import from_local, to_local
from hp_mesh.checks import require, require_positive
from hp_mesh.handlers import register_handler
from hp_mesh.view import View

__all__ = ["register_sliding_window", "sliding_window_attention"]

_WHERE = "sliding_window_attention"


def sliding_window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sliding_window: int,
    *,
    sink_tokens: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Compute causal attention in which a query sees the last keys, and the first ones.

    Args:
        query: ``[B, H, S, D]``; use ``seq_dim=2, head_dim=1`` for the style, or transpose.
        key: ``[B, Hkv, S, D]``; ``Hkv`` divides ``H``.
        value: ``[B, Hkv, S, Dv]``.
        sliding_window: How many keys a query sees, its own included.
        sink_tokens: How many first keys of the sequence every query sees beside them.
        scale: Factor on the scores, ``1 / sqrt(D)`` by default.

    Returns:
        ``[B, H, S, Dv]``.

    Example::

        out = sliding_window_attention(q, k, v, 4096, sink_tokens=4)
    """
    if has_torch_function((query, key, value)):
        result: Tensor = handle_torch_function(
            sliding_window_attention,
            (query, key, value),
            query,
            key,
            value,
            sliding_window,
            sink_tokens=sink_tokens,
            scale=scale,
        )
        return result
    _check(_WHERE, query, key, value, sliding_window, sink_tokens)
    spans = KeySpans(0, (0, key.size(2)))
    return band_attention(
        query, key, value, start=0, spans=spans, window=sliding_window, sinks=sink_tokens,
        scale=scale,
    )  # fmt: skip


def register_sliding_window() -> None:
    """Let `sliding_window_attention` run on this rank's rows inside every boundary."""
    register_handler(sliding_window_attention, _sliding, streams=True)


def _sliding(
    view: View, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    query, key, value, window = args
    tensors, sinks = (query, key, value), kwargs["sink_tokens"]
    where = f"{view.where}: {_WHERE}"
    if not any(view.owns(t) for t in tensors) and any(isinstance(t, DTensor) for t in tensors):
        return func(*args, **kwargs)  # DTensors of another mesh
    options: dict[str, Any] = {"window": window, "sinks": sinks, "scale": kwargs["scale"]}
    if not any(view.owns(t) for t in tensors):
        here = view.window
        _check(where, query, key, value, window, sinks, (here.query_length, here.key_length))
        spans = KeySpans(0, (0, here.key_length))
        return band_attention(query, key, value, start=here.query_start, spans=spans, **options)
    whole = view.window.global_length
    rows = query.size(2) if view.is_balanced else whole  # a half of q is told by the view
    _check(where, query, key, value, window, sinks, (rows, whole))
    halo = halo_of(view, key, value, where)
    q = on_mesh(view, query)
    placements, grads = tuple(q.placements), view.partial_grads(q.placements)
    if halo is None:
        k, v = (keys_beside(view, on_mesh(view, x), q, 2, where) for x in (key, value))
        spans = KeySpans(0, (0, whole))
    else:
        what = f"sliding_window ({window}) and sink_tokens ({sinks})"
        halo.check_window(where, what, min(window, whole), sinks if window < whole else 0)
        k, v, spans = fetch_keys(view, halo, q, key, value, 2, where)
    start = query_window(view, q, 2, whole).query_start
    result = band_attention(to_local(q, grads), k, v, start=start, spans=spans, **options)
    return from_local(result, view.mesh, placements, grads)


def _check(
    where: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    sinks: int,
    lengths: tuple[int, int] | None = None,
) -> None:
    """Refuse what no rank can compute; only what all ranks see alike decides."""
    require_positive(where, "sliding_window", window, "it counts the query's own key")
    require(
        isinstance(sinks, int) and not isinstance(sinks, bool) and sinks >= 0,
        where,
        f"sink_tokens ({sinks!r}) must be an integer of at least 0",
    )
    shapes = [list(x.shape) for x in (query, key, value)]
    require(
        query.ndim == key.ndim == value.ndim == 4,
        where,
        f"query, key and value (shapes {shapes}) must have 4 dims, [batch, heads, tokens, size]",
        "transpose [B, S, H, D] with transpose(1, 2)",
    )
    rows, keys = (key.size(2), key.size(2)) if lengths is None else lengths
    require(
        (query.size(2), key.size(2), value.size(2)) == (rows, keys, keys),
        where,
        f"query, key and value (shapes {shapes}) must have {rows}, {keys} and {keys} tokens in dim "
        "2",
        "windows are for self-attention: a query's own key has its position",
    )
    require(
        key.size(1) == value.size(1) and query.size(1) % max(key.size(1), 1) == 0,
        where,
        f"key and value heads ({key.size(1)}, {value.size(1)}) must be equal and divide query "
        f"heads ({query.size(1)})",
    )
