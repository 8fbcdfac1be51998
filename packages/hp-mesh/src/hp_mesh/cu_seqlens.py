"""The boundaries of packed documents, ``[0, ..., end]``, as every function here wants them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from hp_mesh.checks import read_integers, require

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["read_cu_seqlens"]


def read_cu_seqlens(
    where: str,
    given: Sequence[int] | Tensor,
    length: int | None = None,
    *,
    name: str = "cu_seqlens",
    whole: bool = False,
) -> list[int]:
    """Return boundaries on the host, checked; the device of a tensor is waited for.

    Args:
        where: Start of an error message.
        given: ``[0, ..., end]``.
        length: Tokens of the sequence, if they are known; what follows the end is padding.
        name: Name of the argument, for errors.
        whole: Whether the last document must end where the sequence does.

    Raises:
        ValueError: They are no integers, descend, or begin or end elsewhere.
    """
    bounds = read_integers(where, name, given)
    rises = len(bounds) > 1 and bounds[0] == 0 and all(a <= b for a, b in pairwise(bounds))
    if whole:
        require(
            rises and bounds[-1] == length,
            where,
            f"{name} ({bounds}) must start with 0, not descend and end at {length}, the whole "
            "packed length",
            "pass those of the whole sequence on every rank; a padded tail is a document of its "
            "own",
        )
        return bounds
    require(rises, where, f"{name} ({bounds}) must start with 0 and not descend")
    require(
        length is None or bounds[-1] <= length,
        where,
        f"the end of {name} ({bounds[-1]}) must be at most the sequence length ({length})",
    )
    return bounds
