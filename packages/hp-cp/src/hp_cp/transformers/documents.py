"""Packed documents of a model call: from ``cu_seq_lens_q`` or from positions that restart."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hp_mesh.checks import fail, read_integers, require

__all__ = ["bounds_of", "check_same", "positions_of", "read_cu_seq_lens"]


def read_cu_seq_lens(
    named: dict[str, Any], batch: int, whole: int, where: str
) -> tuple[int, ...] | None:
    """Return the boundaries that a collator for flash attention adds, ``(0, ..., S)``.

    Args:
        named: The arguments of the call; ``cu_seq_lens_q`` and ``cu_seq_lens_k`` are those of the
            whole sequence on every rank.
        batch: Rows of the batch: one, since the documents lie in one sequence.
        whole: ``S``.
        where: Name of the model, for errors.
    """
    given = [named.get(f"cu_seq_lens_{x}") for x in "qk"]
    if given == [None, None]:
        return None
    q, k = (
        None if x is None else tuple(read_integers(where, f"cu_seq_lens_{name}", x))
        for name, x in zip("qk", given, strict=True)
    )
    require(
        q is not None and (k is None or k == q),
        where,
        f"cu_seq_lens_q ({q}) and cu_seq_lens_k ({k}) must be the same boundaries",
        "give cu_seq_lens_q, or both",
    )
    assert q is not None, "just required"
    require(
        batch == 1
        and len(q) > 1
        and (q[0], q[-1]) == (0, whole)
        and all(a <= b for a, b in pairwise(q)),
        where,
        f"cu_seq_lens_q ({q}) must start with 0, not descend and end at {whole}, the whole "
        f"sequence in one batch row, not {batch}",
        "pass those of the whole sequence on every rank; a padded tail is a document of its own",
    )
    return q


def positions_of(bounds: tuple[int, ...], device: torch.device) -> Tensor:
    """Return positions that restart in each document, ``[1, S]``."""
    starts = torch.tensor(bounds, device=device)
    tokens = torch.arange(bounds[-1], device=device)
    return (tokens - starts[torch.searchsorted(starts, tokens, right=True) - 1])[None]


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
