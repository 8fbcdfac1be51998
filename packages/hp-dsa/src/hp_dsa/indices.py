"""Indices of keys, checked for the whole sequence and fitted to a window.

An index that its row does not see is skipped, on one device as on many. In a window it may also lie
behind the last key that is handed over; such entries are moved behind the others and become -1,
which changes nothing: no row of the window sees them.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from hp_mesh.checks import require
from hp_mesh.documents import KeyWindow

__all__ = ["check_indices", "drop_unseen"]


def check_indices(where: str, name: str, indices: Tensor, num_keys: int) -> None:
    """Require integers that are -1 or count a key of the whole sequence; waits for the device."""
    require(
        indices.dtype in (torch.int32, torch.int64),
        where,
        f"{name} ({indices.dtype}) must be int32 or int64",
        "indices travel as integers, not in the dtype of the model",
    )
    if indices.numel() == 0:
        return
    low, high = (int(x) for x in torch.stack(torch.aminmax(indices)).tolist())
    require(
        low >= -1 and high < num_keys,
        where,
        f"{name} ({low if low < -1 else high}) must be -1 or below the number of keys ({num_keys})",
        "indices count keys of the whole sequence, from the start of their row or document",
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
