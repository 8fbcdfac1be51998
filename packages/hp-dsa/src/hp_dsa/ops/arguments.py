"""What every operator asks of its arguments, in one wording."""

from __future__ import annotations

from typing import SupportsFloat, cast

import torch
from torch import Tensor

from hp_dsa.ops.rows import Layout, Lengths, Rows
from hp_mesh.checks import fail, nearest, require

__all__ = [
    "NO_LIMIT",
    "check_count",
    "check_dtypes",
    "check_indices",
    "check_range",
    "check_shape",
    "check_tokens",
    "read_rows",
    "read_scale",
]

NO_LIMIT = (1 << 63) - 1
"""``pre_tokens`` and ``next_tokens`` of the torch_npu operators: the only value they take."""

_LAYOUTS = ("BSND", "TND")
_NDIM = {"BSND": 4, "TND": 3}


def check_tokens(where: str, pre_tokens: int, next_tokens: int) -> None:
    """Refuse a band: the operators know ``sparse_mode`` alone."""
    for name, value in (("pre_tokens", pre_tokens), ("next_tokens", next_tokens)):
        require(
            value == NO_LIMIT,
            where,
            f"{name} ({value}) must be its default (2^63 - 1)",
            "choose what a row sees with sparse_mode and the keys you pass",
        )


def read_rows(
    where: str,
    query: Tensor,
    key: Tensor,
    layouts: dict[str, str],
    sparse_mode: int,
    lengths: dict[str, Lengths | None],
) -> Rows:
    """Check layout and mode and return the call's rows.

    Args:
        where: The operator.
        query: ``[B, S1, N1, D]`` or ``[T1, N1, D]``.
        key: ``[B, S2, N2, D]`` or ``[T2, N2, D]``.
        layouts: Value by argument name; all must be the same.
        sparse_mode: 0 or 3.
        lengths: Query's and key's, by argument name, in this order.
    """
    for name, layout in layouts.items():
        if layout in _LAYOUTS:
            continue
        close = nearest("layout", {"layout"}) and str(layout).upper()
        require(
            False,
            where,
            f"{name} ({layout!r}) must be 'BSND' or 'TND'",
            f"use {close!r}"
            if close in _LAYOUTS
            else "transpose to sequence before heads; paged keys are for inference",
        )
    first, *others = layouts.values()
    require(
        all(other == first for other in others),
        where,
        " and ".join(f"{name} ({layout!r})" for name, layout in layouts.items())
        + " must be the same",
    )
    require(
        sparse_mode in (0, 3) and not isinstance(sparse_mode, bool),
        where,
        f"sparse_mode ({sparse_mode!r}) must be 0 (every key) or 3 (causal, aligned at the end)",
    )
    for name, x in (("query", query), ("key", key)):
        require(
            x.dim() == _NDIM[first],
            where,
            f"{name} (shape {tuple(x.shape)}) must have {_NDIM[first]} dims in layout {first!r}",
            "pass layout='TND' for packed tensors" if x.dim() == 3 else "",
        )
    batched = first == "BSND"
    if batched:
        require(
            query.shape[0] == key.shape[0],
            where,
            f"query (B = {query.shape[0]}) and key (B = {key.shape[0]}) must have one batch size",
        )
    (query_name, query_lengths), (key_name, key_lengths) = lengths.items()
    return Rows(
        where=where,
        layout=cast(Layout, first),
        sparse_mode=sparse_mode,
        batch=query.shape[0] if batched else 1,
        num_queries=query.shape[1 if batched else 0],
        num_keys=key.shape[1 if batched else 0],
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        names=(query_name, key_name),
    )


def check_shape(where: str, name: str, x: Tensor, shape: tuple[int, ...], why: str) -> None:
    """Require ``shape``; ``why`` names what it is made of, for example ``[B, S1, N1]``.

    Leading dims that are as they must be are not shown: under context parallelism ranks hand over
    different numbers of keys, and what is wrong is to read alike on all of them.
    """
    given = tuple(x.shape)
    if given == shape:
        return
    right = 0
    if len(given) == len(shape):
        right = next(i for i, (a, b) in enumerate(zip(given, shape, strict=True)) if a != b)
    shown, wanted = (
        f"({', '.join(['..'] * (right > 0) + [str(n) for n in sizes[right:]])})"
        for sizes in (given, shape)
    )
    raise fail(where, f"{name} (shape {shown}) must be {why} ({wanted})")


def check_dtypes(where: str, **tensors: Tensor | None) -> None:
    """Require floating tensors of one dtype on one device."""
    given = {name: x for name, x in tensors.items() if x is not None}
    first, *_ = given
    for name, x in given.items():
        require(
            x.is_floating_point(),
            where,
            f"{name} ({x.dtype}) must be a floating-point tensor",
        )
        require(
            x.dtype == given[first].dtype and x.device == given[first].device,
            where,
            f"{name} ({x.dtype} on {x.device}) must be like {first} "
            f"({given[first].dtype} on {given[first].device})",
        )


def check_count(where: str, sparse_count: int) -> None:
    """Require a number of keys to select that is an integer of at least 1."""
    require(
        isinstance(sparse_count, int) and not isinstance(sparse_count, bool) and sparse_count >= 1,
        where,
        f"sparse_count ({sparse_count!r}) must be an integer of at least 1",
    )


def read_scale(where: str, scale_value: object) -> float:
    """Return attention's scale as a float; it has no default that could be right."""
    require(
        isinstance(scale_value, SupportsFloat),
        where,
        f"scale_value ({scale_value!r}) must be a number",
        "the un-absorbed head size to the power -1/2",
    )
    return float(cast(SupportsFloat, scale_value))


def check_indices(where: str, indices: Tensor, leading: tuple[int, ...], why: str) -> None:
    """Require integer indices ``[*leading, K]`` with ``K >= 1``."""
    require(
        indices.dtype in (torch.int32, torch.int64),
        where,
        f"sparse_indices ({indices.dtype}) must be int32 or int64",
        "indices travel as integers, not in the dtype of the model",
    )
    check_shape(where, "sparse_indices", indices, (*leading, *indices.shape[-1:]), why)
    require(indices.shape[-1] >= 1, where, "sparse_indices (K = 0) must hold at least 1 entry")


def check_range(rows: Rows, indices: Tensor, block: int) -> None:
    """Require every entry to be -1 or a block that starts inside its own document's keys.

    An entry inside the document that the row does not see is no error: it is skipped, as the NPU
    kernel does. Waits for the device once.
    """
    if indices.numel() == 0:
        return
    batched = rows.batched(indices)
    limits = torch.full(batched.shape[:2], NO_LIMIT)
    for document in rows.documents:
        document.queries(limits).fill_(-(-document.key_length // block))
    limits = limits.to(indices.device)
    low, high = torch.aminmax(batched.flatten(2), dim=2)
    wrong = ((low < -1) | (high >= limits.clamp(min=1))) & (limits < NO_LIMIT)  # no padding rows
    if not bool(wrong.any()):
        return
    number, document = next(
        (number, document)
        for number, document in enumerate(rows.documents)
        if bool(document.queries(wrong).any())
    )
    own = document.queries(wrong)
    least, most = int(document.queries(low)[own].min()), int(document.queries(high)[own].max())
    count = -(-document.key_length // block)
    unit = "keys" if block == 1 else f"blocks of {block} keys"
    raise fail(
        rows.where,
        f"sparse_indices ({least if least < -1 else most}) must be -1 or below {count}, the "
        f"{unit} of {'row' if rows.layout == 'BSND' else 'document'} {number}",
        "indices count from the start of their own row or document",
    )
