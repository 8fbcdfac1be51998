"""The view inside a boundary of hp-cp, and what ranks must say alike in the middle of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch.distributed import ProcessGroup

from hp_comm import preflight
from hp_mesh.view import View

__all__ = ["CPView", "agreed", "compare"]

T = TypeVar("T")


@dataclass(eq=False, kw_only=True)
class CPView(View):
    """The view inside a boundary of hp-cp.

    Attributes:
        group: The CP ranks.
        call_index: How many calls of the boundary went before.
    """

    group: ProcessGroup
    call_index: int = 0


def compare(
    view: View,
    where: str,
    told: Callable[[], Mapping[str, object]],
    error: Exception | None = None,
) -> None:
    """Let the ranks compare what attention is ``told`` beside q, k and v, by name.

    The boundary does not see it, and ranks that differ, as in where documents start, would each
    compute another attention without a word. Compared when the boundary's own call is.

    Raises:
        ValueError: If the ranks differ or one has an ``error``, with one text on all of them.
    """
    if isinstance(view, CPView):
        preflight(view.group, where, told, error=error, call_index=view.call_index)
    elif error is not None:  # the boundary of another package, which compares for itself
        raise error


def agreed(view: View, where: str, read: Callable[[], Mapping[str, T]]) -> Mapping[str, T]:
    """Return what ``read`` does once the ranks have compared it; what it raises, all raise."""
    error: Exception | None = None
    found: Mapping[str, T] = {}
    try:
        found = read()
    except Exception as problem:  # whatever it is, the others would wait for this rank
        error = problem
    compare(view, where, lambda: found, error)
    return found
