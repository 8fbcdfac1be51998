"""``kv_chunks``: attention ops that take streamed k and v (`hp_mesh.streamed`) part by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hp_cp.attention.masks import refuse_flag_beside_mask
from hp_cp.attention.streamed import streamed_attention
from hp_cp.sdpa_rows import sdpa_of_rows
from hp_cp.unwrap import keys_beside, on_mesh, query_window
from hp_mesh.checks import require
from hp_mesh.streamed import Streamed
from hp_mesh.view import View
from hp_mesh.window import AttentionWindow

__all__ = ["streamed_sdpa"]


def streamed_sdpa(
    view: View,
    streamed: Streamed,
    tensors: Sequence[Tensor],
    mask: Tensor | None,
    given: Mapping[str, Any],
    where: str,
) -> Tensor:
    """Compute ``F.scaled_dot_product_attention`` of this rank's rows.

    Args:
        view: The active view.
        streamed: How k and v are streamed.
        tensors: q, k and v as the op got them.
        mask: ``attn_mask``.
        given: The other arguments of the op.
        where: Name of the op, for errors.
    """
    given = dict(given)
    axis, dropout_p = streamed.axis, given.pop("dropout_p")
    require(
        all(map(streamed.holds, tensors[1:])),
        where,
        f"under {streamed.option} key and value must both be made of the module's k and v",
        f"leave {streamed.option} out",
    )
    require(
        dropout_p == 0.0,
        where,
        f"dropout_p ({dropout_p}) must be 0 under {streamed.option}: the pattern would be drawn "
        "part by part",
        f"set it to 0, or leave {streamed.option} out",
    )
    require(
        mask is None or not mask.requires_grad,
        where,
        f"attn_mask must not require grad under {streamed.option}",
        f"detach it, or leave {streamed.option} out",
    )
    refuse_flag_beside_mask(mask, given["is_causal"])
    q, k, v = (on_mesh(view, t) for t in tensors)
    seq_dim = q.ndim - 2
    require(
        all(x.placements[axis].is_shard(x.ndim - 2) for x in (q, k, v)),
        where,
        f"under {streamed.option} query, key and value {[tuple(x.placements) for x in (q, k, v)]} "
        f"must have the sequence, cut over axis {axis}, in dim -2",
        "transpose them to [..., heads, tokens, head size]",
    )
    window = query_window(view, q, seq_dim, k.size(-2))
    keys, values = (keys_beside(view, x, q, seq_dim, where, streamed_axis=axis) for x in (k, v))

    def attend(q: Tensor, k: Tensor, v: Tensor, window: AttentionWindow, **options: Any) -> Tensor:
        return streamed_attention(q, k, v, window, streamed.group, streamed.parts, **options)

    return sdpa_of_rows(view, q, keys, values, window, mask, given, where, attend)
