"""``torch.nn.attention.varlen`` inside the boundary: its documents are cut to a rank's rows.

The function calls one operator, which the global view sees; the operator keeps its kernels and its
backward, and is handed other starts of documents, and the keys that they need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from hp_cp.unwrap import keys_beside, on_mesh, query_window
from hp_cp.view import agreed
from hp_cp.windowed import check_documents, drop_front, fetch_band, halo_of
from hp_mesh._torch import from_local, to_local
from hp_mesh.checks import fail, require
from hp_mesh.cu_seqlens import read_cu_seqlens
from hp_mesh.documents import packed_window
from hp_mesh.handlers import register_handler
from hp_mesh.view import View

__all__ = ["register_varlen"]

_OPERATOR = "torch_attn::_varlen_attn"


def register_varlen() -> None:
    """Let ``varlen_attn`` run on this rank's rows inside every boundary."""
    register_handler(_OPERATOR, _varlen, streams=True)


def _varlen(
    view: View, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    schema = getattr(func, "_schema", None) or func.default._schema
    given = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    given |= dict(zip((a.name for a in schema.arguments), args, strict=False)) | dict(kwargs)
    tensors = [given.pop(name) for name in ("query", "key", "value")]
    where = f"{view.where}: varlen_attn"
    placements: tuple[Any, ...] = ()
    q: Any = None
    if any(view.owns(t) for t in tensors):
        q = on_mesh(view, tensors[0])
        placements, grads = tuple(q.placements), view.partial_grads(q.placements)
        num_keys = tensors[1].size(0)
        window = query_window(view, q, 0, num_keys)
    elif any(isinstance(t, DTensor) for t in tensors):
        return tuple(func(*args, **kwargs))
    else:
        window, num_keys = view.window, view.window.key_length
        rows, keys = tensors[0].size(0), tensors[1].size(0)
        if (rows, keys) != (window.query_length, window.key_length):
            return tuple(func(*args, **kwargs))
    total = view.window.global_length
    totals = {"cu_seq_q": total, "cu_seq_k": num_keys}

    def read() -> dict[str, list[int]]:
        return {name: _ends(given, name, rows, where) for name, rows in totals.items()}

    ends = list(agreed(view, where, read).values())
    require(
        len(ends[0]) == len(ends[1]),
        where,
        f"cu_seq_q ({len(ends[0])} documents) must have as many documents as cu_seq_k "
        f"({len(ends[1])})",
    )
    is_causal = _is_causal(given, where)
    found = packed_window((window.query_start, window.query_end), *ends, causal=is_causal)
    q_local, *kv = tensors
    first, last = found.keys
    start, offset = first, 0
    if placements:
        halo = halo_of(view, kv[0], kv[1], where)
        if halo is None:
            kv = [keys_beside(view, on_mesh(view, x), q, 0, where) for x in kv]
        else:
            left = (given.get("window_size") or (-1, -1))[0]
            check_documents(halo, ends, None if left < 0 else left + 1, is_causal, where)
            *kv, (offset, _) = fetch_band(view, halo, q, kv[0], kv[1], 0, where)
            start = max(first, offset)
        q_local = to_local(q, grads)
    kv = [x[start - offset : last - offset] for x in kv]
    for name, of, lengths in (
        ("cu_seq_q", "max_q", found.query_lengths),
        ("cu_seq_k", "max_k", drop_front(found.key_lengths or (), start - first)),
    ):
        starts = [0, *(lengths or ())]
        given[name] = torch.tensor(starts, dtype=given[name].dtype, device=given[name].device)
        given[of] = max((b - a for a, b in pairwise(starts)), default=0)
    out, lse, rng = func(q_local, *kv, **given)
    if not placements:
        return out, lse, rng
    # log-sum-exp: [heads, rows]
    statistics = [Shard(1 - p.dim) if isinstance(p, Shard) else p for p in placements]
    wrapped = from_local(out, view.mesh, placements, view.partial_grads(placements))
    return wrapped, from_local(lse, view.mesh, statistics), rng


def _ends(given: Mapping[str, Any], name: str, total: int, where: str) -> list[int]:
    value = given[name]
    require(isinstance(value, Tensor), where, f"{name} ({value}) must be a tensor")
    return read_cu_seqlens(where, value, total, name=name, whole=True)[1:]


def _is_causal(given: Mapping[str, Any], where: str) -> bool:
    """Say whether the call is causal, or refuse what no cut of the keys can express."""
    for name in ("seqused_k", "block_table"):
        require(
            given.get(name) is None,
            where,
            f"{name} must be None under context parallelism",
            "it is for decoding with a cache",
        )
    left, right = given.get("window_size") or (-1, -1)
    if (left, right) == (-1, -1):
        return bool(given.get("is_causal"))
    if right != 0:
        raise fail(
            where,
            f"window_size ({(left, right)}) must end at the query's own key under context "
            "parallelism",
            "use (w, 0) for a causal window, or (-1, -1) for whole documents",
        )
    return True
