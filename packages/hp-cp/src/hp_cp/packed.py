"""`packed_attention`: attention of packed documents, the same with and without a style.

On one device it is what it says. Inside a boundary the global view hands it to `_packed`, which
cuts the documents to this rank's rows: in every mode, with documents that straddle ranks, and under
load balance for each half of the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import handle_torch_function, has_torch_function

from hp_cp.attention.packed import packed_rows
from hp_cp.unwrap import keys_beside, on_mesh, query_window
from hp_cp.view import agreed
from hp_cp.windowed import check_documents, drop_front, fetch_band, halo_of
from hp_mesh._torch import from_local, to_local
from hp_mesh.checks import require, require_positive
from hp_mesh.cu_seqlens import read_cu_seqlens
from hp_mesh.documents import packed_window
from hp_mesh.handlers import register_handler
from hp_mesh.view import View
from hp_mesh.window import AttentionWindow, Range

__all__ = ["packed_attention", "register_packed_attention"]

_WHERE = "packed_attention"


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Sequence[int] | Tensor,
    *,
    cu_seqlens_k: Sequence[int] | Tensor | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute attention within each document of a packed sequence.

    Inside `ContextParallel` the tensors stand for the whole sequence, so pass the ``cu_seqlens`` of
    the whole sequence, the same on every rank. A padded tail is a document of its own
    (`hp_mesh.shard_packed` makes it one). In bfloat16 on CUDA this is
    ``torch.nn.attention.varlen``, on an NPU ``npu_fusion_attention`` in TND; elsewhere one call of
    ``F.scaled_dot_product_attention`` for each document.

    Args:
        query: ``[T, H, D]``; use ``seq_dim=0, head_dim=1`` for the style.
        key: ``[Tk, Hkv, D]``; ``Hkv`` divides ``H``.
        value: ``[Tk, Hkv, Dv]``.
        cu_seqlens: Where documents start, and the end: ``[0, ..., T]``. A list saves the wait for
            the device that reading a tensor is.
        cu_seqlens_k: The same for the keys, ``[0, ..., Tk]``, as many. Default: ``cu_seqlens``.
        causal: Whether a query sees no later key than its own. With other lengths of queries and
            keys the last query of a document sees its last key.
        sliding_window: With ``causal``, how many keys a query sees, its own included.
        scale: Factor on the scores, ``1 / sqrt(D)`` by default.

    Returns:
        ``[T, H, Dv]``. Queries without a key give 0.

    Raises:
        ValueError: If the lengths do not add up, on every rank.
    """
    if has_torch_function((query, key, value)):
        result: Tensor = handle_torch_function(
            packed_attention,
            (query, key, value),
            query,
            key,
            value,
            cu_seqlens,
            cu_seqlens_k=cu_seqlens_k,
            causal=causal,
            sliding_window=sliding_window,
            scale=scale,
        )
        return result
    _check_options(causal, sliding_window)
    query_ends, key_ends = _ends(query, key, value, cu_seqlens, cu_seqlens_k)
    options: Any = {"causal": causal, "window": sliding_window, "scale": scale}
    return packed_rows(query, key, value, query_ends, key_ends, **options)


def register_packed_attention() -> None:
    """Let `packed_attention` run on this rank's rows inside every boundary."""
    register_handler(packed_attention, _packed, streams=True)


def _packed(
    view: View, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    names = ("query", "key", "value", "cu_seqlens")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value = (given[name] for name in names[:3])
    tensors = (query, key, value)
    where = f"{view.where}: {_WHERE}"
    if not any(view.owns(t) for t in tensors) and any(isinstance(t, DTensor) for t in tensors):
        return func(*args, **kwargs)  # DTensors of another mesh
    _check_options(given["causal"], given["sliding_window"], where)

    def read() -> dict[str, list[int]]:
        lengths = given["cu_seqlens"], given["cu_seqlens_k"]
        found = _ends(query, key, value, *lengths, where, view)
        return dict(zip(("cu_seqlens", "cu_seqlens_k"), found, strict=True))

    query_ends, key_ends = agreed(view, where, read).values()
    ends = query_ends, key_ends
    options = {
        "causal": given["causal"],
        "window": given["sliding_window"],
        "scale": given["scale"],
    }
    if not any(view.owns(t) for t in tensors):
        return _rows(query, key, value, view.window, ends, options)
    halo, held = halo_of(view, key, value, where), (0, key.size(0))
    q = on_mesh(view, query)
    placements, grads = tuple(q.placements), view.partial_grads(q.placements)
    if halo is None:
        k, v = (keys_beside(view, on_mesh(view, x), q, 0, where) for x in (key, value))
    else:
        check_documents(halo, ends, given["sliding_window"], given["causal"], where)
        k, v, held = fetch_band(view, halo, q, key, value, 0, where)
    window = query_window(view, q, 0, key.size(0))
    result = _rows(to_local(q, grads), k, v, window, ends, options, held)
    return from_local(result, view.mesh, placements, grads)


def _rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: AttentionWindow,
    ends: tuple[list[int], list[int]],
    options: Mapping[str, Any],
    held: Range | None = None,
) -> Tensor:
    """Cut the documents to the rows of ``window``, and compute those; k holds the keys ``held``."""
    found = packed_window(
        (window.query_start, window.query_end), *ends, causal=bool(options["causal"])
    )
    assert found.query_lengths is not None and found.key_lengths is not None, "packed"
    first, last = found.keys
    # without what lies before the window the documents still end where they did
    start = first if held is None else max(first, held[0])
    key_ends = drop_front(found.key_lengths, start - first)
    offset = 0 if held is None else held[0]
    keys = slice(start - offset, last - offset)
    return packed_rows(q, k[keys], v[keys], found.query_lengths, key_ends, **options)


def _check_options(causal: bool, sliding_window: int | None, where: str = _WHERE) -> None:
    if sliding_window is None:
        return
    require_positive(where, "sliding_window", sliding_window, "it counts the query's own key")
    require(
        causal,
        where,
        f"sliding_window ({sliding_window}) must come with causal=True, not causal ({causal})",
    )


def _ends(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Sequence[int] | Tensor,
    cu_seqlens_k: Sequence[int] | Tensor | None,
    where: str = _WHERE,
    view: View | None = None,
) -> tuple[list[int], list[int]]:
    """Return the ends of the documents' queries and keys, checked against the tensors.

    Only what all ranks see alike decides: global shapes, and lengths that they were given alike.
    """
    for name, x in (("query", q), ("key", k), ("value", v)):
        require(
            x.ndim == 3,
            where,
            f"{name} (shape {list(x.shape)}) must have 3 dims, [tokens, heads, head size]",
            "flatten a batch of one with squeeze(0); the style needs seq_dim=0, head_dim=1",
        )
    plain = view is not None and not isinstance(q, DTensor)
    rows, keys = q.size(0), k.size(0)
    if plain and view is not None:  # local tensors: they must be the rows that are known
        window = view.window
        require(
            (rows, keys) == (window.query_length, window.key_length),
            where,
            f"query and key ({rows} and {keys} rows) must be the rows ({window.query_length}) and "
            f"keys ({window.key_length}) of the attention window",
            "pass them as the module was handed them",
        )
    # q of a half under load balance is told by the view; the documents are those of the whole
    total = rows if view is None else view.window.global_length
    require(
        v.size(0) == keys,
        where,
        f"value ({v.size(0)} rows) must have as many rows as key ({keys})",
    )
    _, *query_ends = read_cu_seqlens(where, cu_seqlens, total, whole=True)
    if cu_seqlens_k is None:
        require(
            keys == total,
            where,
            f"key ({keys} rows) must have as many rows as query ({total}) without cu_seqlens_k",
            "pass the boundaries of the keys as cu_seqlens_k",
        )
        return query_ends, query_ends
    _, *key_ends = read_cu_seqlens(where, cu_seqlens_k, keys, name="cu_seqlens_k", whole=True)
    require(
        len(key_ends) == len(query_ends),
        where,
        f"cu_seqlens_k ({len(key_ends)} documents) must have as many documents as cu_seqlens "
        f"({len(query_ends)})",
    )
    return query_ends, key_ends
