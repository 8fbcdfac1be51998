"""``F.scaled_dot_product_attention`` under ``sliding_window``: a mask says the window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hp_cp.attention.masks import refuse_flag_beside_mask
from hp_cp.sdpa_rows import sdpa_of_rows
from hp_cp.unwrap import on_mesh, query_window
from hp_cp.windowed import Halo, check_mask, fetch_keys, halo_of, rows_of_mask
from hp_mesh.checks import fail
from hp_mesh.view import View
from hp_mesh.window import AttentionWindow

__all__ = ["windowed_sdpa"]


def windowed_sdpa(
    view: View,
    halo: Halo,
    tensors: Sequence[Tensor],
    mask: Tensor | None,
    given: Mapping[str, Any],
    where: str,
) -> Tensor:
    """Compute the op for this rank's rows, with the keys that its mask shows.

    Args:
        view: The active view.
        halo: The window, whose keys are fetched.
        tensors: q, k and v as the op got them.
        mask: ``attn_mask``; without one the op sees keys that are not fetched.
        given: The other arguments of the op.
        where: Name of the op, for errors.
    """
    query, key, value = tensors
    halo_of(view, key, value, where)  # both of the two, or neither
    q = on_mesh(view, query)
    seq_dim, length = q.ndim - 2, q.size(-2)
    window = query_window(view, q, seq_dim, length)
    if mask is None:
        causal = given["is_causal"]
        raise fail(
            where,
            f"is_causal ({causal}) without attn_mask sees {'all earlier' if causal else 'all'} "
            f"keys, of which {halo.option} fetches those of a window; the call must say its window",
            "call hp_cp.sliding_window_attention, which is the same on one device, pass a mask of "
            f"the window, or leave {halo.option} out",
        )
    refuse_flag_beside_mask(mask, given["is_causal"])
    check_mask(halo, mask, length, where)
    k, v, spans = fetch_keys(view, halo, q, key, value, seq_dim, where)
    rows = rows_of_mask(mask, window.query_start, window.query_length, spans)
    # the mask says everything: these rows of these keys are a whole of their own
    window = AttentionWindow(0, window.query_length, spans.length, window.query_length)
    return sdpa_of_rows(view, q, k, v, window, rows, given, where)
