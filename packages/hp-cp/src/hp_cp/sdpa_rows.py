"""``F.scaled_dot_product_attention`` for the rows of q on a rank, wherever the keys are from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from hp_cp.attention import window_sdpa
from hp_cp.unwrap import block_seed, local_mask, shard_range
from hp_mesh._torch import from_local, to_local
from hp_mesh.view import View
from hp_mesh.window import AttentionWindow

__all__ = ["sdpa_of_rows"]


def sdpa_of_rows(
    view: View,
    q: DTensor,
    k: Tensor,
    v: Tensor,
    window: AttentionWindow,
    mask: Tensor | None,
    given: Mapping[str, Any],
    where: str,
    attend: Callable[..., Tensor] = window_sdpa,
) -> DTensor:
    """Compute the op on local tensors and wrap the result as ``q`` is.

    Args:
        view: The active view.
        q: The queries, ``[..., H, Lq, D]``.
        k: What these rows and heads need of the keys, ``[..., Hkv, K, D]``, as a local tensor.
        v: The same of the values, ``[..., Hkv, K, Dv]``.
        window: Where the rows lie among the keys.
        mask: ``attn_mask``.
        given: The other arguments of the op.
        where: Name of the op, for errors.
        attend: What computes it; takes the arguments of `hp_cp.attention.window_sdpa`, and those of
            dropout only if ``given`` has a ``dropout_p``.
    """
    head_dim = q.ndim - 3 if q.ndim > 2 else None
    placements, grads = tuple(q.placements), view.partial_grads(q.placements)
    options = dict(given)
    if "dropout_p" in options:
        options["dropout_seed"] = block_seed(view, placements, options["dropout_p"])
    if head_dim is not None:
        options["num_heads"] = q.size(head_dim)
        options["heads"] = shard_range(view.mesh, placements, head_dim, q.size(head_dim))
    mask = local_mask(view, mask, q, head_dim)
    result = attend(to_local(q, grads), k, v, window, attn_mask=mask, where=where, **options)
    return from_local(result, view.mesh, placements, grads)
