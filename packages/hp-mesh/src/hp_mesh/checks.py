"""One wording for one mistake: *where: what (value) must ... what (value); way out*.

No torch here. Every function returns the checked value or raises ``ValueError`` (``TypeError`` for
a wrong type), so that a constructor reads as a list of promises.
"""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

__all__ = [
    "advise_on_shards",
    "divisors",
    "fail",
    "nearest",
    "read_integers",
    "require",
    "require_divisible",
    "require_positive",
    "require_type",
]


def fail(where: str, problem: str, way_out: str = "") -> ValueError:
    """Build the error ``where: problem; way_out`` (to be raised by the caller)."""
    return ValueError(f"{where}: {problem}; {way_out}" if way_out else f"{where}: {problem}")


def require(condition: bool, where: str, problem: str, way_out: str = "") -> None:
    """Raise ``ValueError`` with the house's wording unless ``condition`` holds."""
    if not condition:
        raise fail(where, problem, way_out)


def require_positive(where: str, name: str, value: object, way_out: str = "") -> int:
    """Return ``value`` if it is an ``int`` of at least 1; ``bool`` is not an integer here."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise fail(where, f"{name} ({value!r}) must be an integer of at least 1", way_out)
    if value < 1:
        raise fail(where, f"{name} ({value}) must be at least 1", way_out)
    return value


def require_type(
    where: str, name: str, value: object, kind: type, words: str, way_out: str = ""
) -> None:
    """Raise ``TypeError`` unless ``value`` is a ``kind``, in words ``a torch.nn.Module``."""
    if not isinstance(value, kind):
        problem = f"{name} ({type(value).__name__}) must be {words}"
        raise TypeError(str(fail(where, problem, way_out)))


def require_divisible(
    where: str, name: str, value: int, by_name: str, by: int, way_out: str = ""
) -> int:
    """Return ``value // by``, or say which of the two does not divide."""
    if value % by:
        raise fail(where, f"{name} ({value}) must be divisible by {by_name} ({by})", way_out)
    return value // by


def read_integers(where: str, name: str, given: Any) -> list[int]:
    """Return the integers of a list, or of a tensor of one dim, whose device is waited for.

    Raises:
        ValueError: If one is none. 5.0 is none: a length that was computed may be 4.999 as well.
    """
    is_tensor = hasattr(given, "tolist")
    try:
        numbers = list(given.tolist() if is_tensor else given)
        if not any(isinstance(n, bool) for n in numbers):
            return [n if isinstance(n, int) else operator.index(n) for n in numbers]
    except TypeError:  # a number and no list of them, or what is in the list
        pass
    shown = f"{given.dtype} of shape {tuple(given.shape)}" if is_tensor else repr(given)
    raise fail(where, f"{name} ({shown}) must be integers, a list or a tensor of one dim")


def divisors(value: int) -> list[int]:
    """Return the divisors of ``value`` in ascending order."""
    small = [d for d in range(1, math.isqrt(value) + 1) if value % d == 0]
    return small + [value // d for d in reversed(small) if d * d != value]


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to ``name``, or None if nothing is close."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return found[0] if found else None


def advise_on_shards(lengths: Sequence[str], padded: Callable[[int], int]) -> str:
    """Name the way out where ranks disagree about the length of a shard.

    Args:
        lengths: What the ranks said, in order; none if they agree.
        padded: The length that a whole sequence of some length must be padded to.

    Returns:
        What to do, or "" where not all of them are lengths: some ranks are in another call.
    """
    if not lengths or not all(length.isdigit() for length in lengths):
        return ""
    total = sum(map(int, lengths))
    shards = f"if these are the shards of one sequence of {total}"
    if padded(total) == total:
        return f"{shards}, cut it evenly with shard_sequence"
    return f"{shards}, pad it to {padded(total)} with pad_sequence before it is cut"
