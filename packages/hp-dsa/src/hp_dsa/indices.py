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

from hp_comm.agreement import compares_always
from hp_mesh.checks import fail, require, require_positive
from hp_mesh.documents import KeyWindow

if TYPE_CHECKING:
    from hp_dsa.view import DSAView, Lengths

__all__ = ["check_documents", "check_indices", "drop_unseen", "waits"]

_LEAST = torch.iinfo(torch.int32).min


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

    On a device, which is waited for, only in the first call of the boundary, or in each under
    ``HP_PREFLIGHT=always``; what later calls find is raised by the next one
    (`hp_dsa.late_errors`). Rows of padding may name any key of the whole sequence: what is none at
    all, `check_indices` has refused before lengths are known.

    Args:
        where: The style and the operator, for messages.
        name: What the indices are called there.
        indices: ``[B, S1/P, 1, K]`` or ``[T1/P, 1, K]``: the rows that this rank holds.
        view: The view of the call.
        lengths: Lengths of the whole sequence.
        block: Keys that one index stands for.
    """
    require_positive(where, "sparse_block_size", block)
    _check_dtype(where, name, indices)
    if indices.numel() == 0:
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
    low, high = torch.aminmax(indices.flatten(indices.ndim - 2), dim=-1)
    # a document without keys may be named by 0: nothing there is seen
    limits = torch.tensor(counts)[owner].clamp(min=1)
    unit = "keys" if block == 1 else f"blocks of {block} keys"
    kind = "row" if batched else "document"
    way_out = "indices count from the start of their own row or document"
    if view.call_index and waits(indices) and not compares_always():
        # a row of padding has no limit that it could pass
        least = torch.where(is_real, -1, _LEAST).to(low.device, non_blocking=True)
        most = torch.where(is_real, limits, -_LEAST).to(low.device, non_blocking=True)
        wrong = ((low < least) | (high >= most)).any()
        problem = f"{name} must be -1 or below the number of {unit} of their {kind}"
        view.late_errors.watch(wrong, where, problem, way_out)
        return
    low, high = low.cpu(), high.cpu()
    wrong = ((low < -1) | (high >= limits)) & is_real
    if not bool(wrong.any()):
        return
    number = int(owner[wrong][0])
    own = wrong & (owner == number)
    lowest, highest = int(low[own].min()), int(high[own].max())
    raise fail(
        where,
        f"{name} ({lowest if lowest < -1 else highest}) must be -1 or below {counts[number]}, the "
        f"{unit} of {kind} {number}",
        way_out,
    )


def waits(x: Tensor) -> bool:
    """Whether the host would have to wait to know what ``x`` holds."""
    return x.device.type != "cpu"


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
    seen = indices < _limits(indices, window, layout, block)
    if not waits(indices) and bool(seen.all()):
        return indices
    K = indices.size(-1)
    # entries move up to where those before them end; unseen ones fall off the end
    place = torch.where(seen, seen.cumsum(-1) - 1, K)
    packed = indices.new_full((*indices.shape[:-1], K + 1), -1).scatter_(-1, place, indices)
    return packed[..., :K].contiguous()


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
            torch.tensor(rows, device=device),
            output_size=sum(rows),  # or the device would be waited for, to say it
        )
        keys = keys.view(-1, 1, 1)
    return (keys + block - 1) // block
