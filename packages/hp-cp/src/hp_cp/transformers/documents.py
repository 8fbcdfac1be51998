"""Packed documents of a model call: from ``cu_seq_lens_q`` or from positions that restart."""

from __future__ import annotations

from torch import Tensor

from hp_mesh.checks import fail

__all__ = ["bounds_of", "check_same"]


def bounds_of(documents: Tensor) -> tuple[int, ...] | None:
    """Return ``(0, ..., S)`` of each token's document, ``[1, S]``; None for several rows."""
    if documents.shape[0] != 1:
        return None
    ends = (documents[0].diff() != 0).nonzero().flatten() + 1
    return (0, *(int(n) for n in ends.tolist()), documents.shape[1])


def check_same(bounds: tuple[int, ...], documents: Tensor | None, whole: int) -> None:
    """Refuse ``position_ids`` that restart elsewhere than ``cu_seq_lens_q`` says."""
    told = sorted({0, *bounds})
    found = (0, whole) if documents is None else bounds_of(documents)
    if list(found or ()) != told:
        raise fail(
            "position_ids",
            f"they restart at {None if found is None else list(found[:-1])} and must restart where "
            f"cu_seq_lens_q says, at {told[:-1]}",
            "leave one of the two out",
        )
