"""Indices of keys, checked against their document and fitted to a window.

An index that its row does not see is skipped, on one device as on many. In a window it may also lie
behind the last key that is handed over; such entries are moved behind the others and become -1,
which changes nothing: no row of the window sees them. An index that its document does not have is
refused before that, or it would be taken for one that is not seen.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hp_mesh.checks import fail, require
from hp_mesh.documents import KeyWindow

if TYPE_CHECKING:
    from hp_dsa.view import DSAView, Lengths

__all__ = ["check_documents", "check_indices", "drop_unseen"]


def check_indices(where: str, name: str, indices: Tensor, num_keys: int) -> None:
    """Require integers that are -1 or count a key of the whole sequence; waits for the device."""
    _check_dtype(where, name, indices)
    if indices.numel() == 0:
        return
    low, high = (int(x) for x in torch.stack(torch.aminmax(indices)).tolist())
    require(
        low >= -1 and high < num_keys,
        where,
        f"{name} ({low if low < -1 else high}) must be -1 or below the number of keys ({num_keys})",
        "indices count keys of the whole sequence, from the start of their row or document",
    )


def check_documents(
    where: str, name: str, indices: Tensor, view: DSAView, lengths: Lengths, block: int
) -> None:
    """Require each entry to be -1 or to count a key of its own document or batch row.

    On a device, which is waited for, only in the first call of the boundary. Rows of padding hold
    what they like, as on one device.

    Args:
        where: The style and the operator, for messages.
        name: What the indices are called there.
        indices: ``[B, S1/P, 1, K]`` or ``[T1/P, 1, K]``: the rows that this rank holds.
        view: The view of the call.
        lengths: Lengths of the whole sequence.
        block: Keys that one index stands for.
    """
    _check_dtype(where, name, indices)
    if indices.numel() == 0 or (view.call_index and indices.device.type != "cpu"):
        return
    batched = view.plan.layout == "BSND"
    # what a rank holds is what it computes: queries that travel are the indexer's, without indices
    own_rows = view.plan.rows(view.rank, view.num_queries)
    rows = torch.cat([torch.arange(start, end) for start, end in own_rows])
    queries, keys = lengths
    if batched:
        batch = indices.size(0)
        owner = torch.arange(batch).unsqueeze(1).expand(-1, len(rows))
        valid = torch.tensor(queries or [view.num_queries] * batch)
        is_real = rows < valid.unsqueeze(1)
        counts = list(keys or [view.num_keys] * batch)
    else:
        assert queries is not None and keys is not None, "TND has ends"
        owner = torch.bucketize(rows, torch.tensor(queries), right=True)
        is_real = torch.ones_like(owner, dtype=torch.bool)
        counts = [b - a for a, b in pairwise((0, *keys))]
    counts = [-(-count // block) for count in counts]
    low, high = (x.cpu() for x in torch.aminmax(indices.flatten(indices.ndim - 2), dim=-1))
    # a document without keys may be named by 0: nothing there is seen
    wrong = ((low < -1) | (high >= torch.tensor(counts)[owner].clamp(min=1))) & is_real
    if not bool(wrong.any()):
        return
    number = int(owner[wrong][0])
    own = wrong & (owner == number)
    least, most = int(low[own].min()), int(high[own].max())
    unit = "keys" if block == 1 else f"blocks of {block} keys"
    raise fail(
        where,
        f"{name} ({least if least < -1 else most}) must be -1 or below {counts[number]}, the "
        f"{unit} of {'row' if batched else 'document'} {number}",
        "indices count from the start of their own row or document",
    )


def _check_dtype(where: str, name: str, indices: Tensor) -> None:
    require(
        indices.dtype in (torch.int32, torch.int64),
        where,
        f"{name} ({indices.dtype}) must be int32 or int64",
        "indices travel as integers, not in the dtype of the model",
    )


def drop_unseen(indices: Tensor, window: KeyWindow, layout: str, block: int) -> Tensor:
    """Return ``indices`` of a window's rows without those of keys behind the window.

    Args:
        indices: ``[B, S1, 1, K]`` or ``[T1, 1, K]``.
        window: The window.
        layout: ``"BSND"`` or ``"TND"``.
        block: Keys that one index stands for.
    """
    unseen = indices >= _limits(indices, window, layout, block)
    if not bool(unseen.any()):
        return indices
    order = unseen.to(torch.uint8).argsort(dim=-1, stable=True)
    return indices.masked_fill(unseen, -1).gather(-1, order)


def _limits(indices: Tensor, window: KeyWindow, layout: str, block: int) -> Tensor:
    """Return for each row how many indices there are, to be compared with ``indices``."""
    device = indices.device
    if layout == "BSND":
        lengths = window.key_lengths or (window.num_keys,) * indices.size(0)
        keys = torch.tensor(lengths, device=device).view(-1, 1, 1, 1)
    else:
        assert window.query_lengths is not None and window.key_lengths is not None, "TND has ends"
        rows = [b - a for a, b in pairwise((0, *window.query_lengths))]
        ends = [b - a for a, b in pairwise((0, *window.key_lengths))]
        keys = torch.tensor(ends, device=device).repeat_interleave(
            torch.tensor(rows, device=device)
        )
        keys = keys.view(-1, 1, 1)
    return (keys + block - 1) // block
