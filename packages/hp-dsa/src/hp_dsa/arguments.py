"""Which argument of a boundary is what, and where a call holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from hp_mesh.arguments import Slot
from hp_mesh.checks import fail

__all__ = ["ATTENTION", "DENSE_LOSS", "INDEXER", "LENGTHS", "SPARSE_LOSS", "Argument", "find"]

Role = Literal["rows", "keys", "statistics"]
"""Sharded along the sequence; gathered; sharded along the statistics' own sequence dim."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a boundary.

    Attributes:
        name: As the boundary calls it; ``{name}_kwarg_name`` of the style renames it.
        role: What becomes of it.
        position: Its place among the positional arguments.
        keywords: Keywords that it is found under by default, the operators' own among them.
        required: Whether a call without it is an error.
    """

    name: str
    role: Role
    position: int
    keywords: tuple[str, ...]
    required: bool = True


_Row = tuple[str, Role, int, str, bool]


def _boundary(*rows: _Row) -> tuple[Argument, ...]:
    return tuple(
        Argument(name, role, place, (name, *also.split()), required)
        for name, role, place, also, required in rows
    )


INDEXER = _boundary(
    ("query", "rows", 0, "", True),
    ("key", "keys", 1, "", True),
    ("weights", "rows", 2, "", True),
)
ATTENTION = _boundary(
    ("query", "rows", 0, "", True),
    ("key", "keys", 1, "", True),
    ("value", "keys", 2, "", False),
    ("topk_indices", "rows", 3, "sparse_indices", True),
    ("query_rope", "rows", 4, "", False),
    ("key_rope", "keys", 5, "", False),
)
_LOSS_HEAD: tuple[_Row, ...] = (
    ("query", "rows", 0, "", True),
    ("key", "keys", 1, "", True),
    ("query_index", "rows", 2, "query_indexer", True),
    ("key_index", "keys", 3, "key_indexer", True),
    ("weights", "rows", 4, "", True),
)
SPARSE_LOSS = _boundary(
    *_LOSS_HEAD,
    ("topk_indices", "rows", 5, "sparse_indices", True),
    ("softmax_max", "statistics", 6, "", False),
    ("softmax_sum", "statistics", 7, "", False),
    ("query_rope", "rows", 8, "", False),
    ("key_rope", "keys", 9, "", False),
)
DENSE_LOSS = _boundary(
    *_LOSS_HEAD,
    ("softmax_max", "statistics", 5, "", False),
    ("softmax_sum", "statistics", 6, "", False),
    ("softmax_max_index", "statistics", 7, "softmax_max_indexer", False),
    ("softmax_sum_index", "statistics", 8, "softmax_sum_indexer", False),
    ("query_rope", "rows", 10, "", False),
    ("key_rope", "keys", 11, "", False),
)

LENGTHS: Mapping[str, frozenset[str]] = {
    "query": frozenset({"actual_seq_lengths_query", "actual_seq_qlen"}),
    "key": frozenset(
        {"actual_seq_lengths_key", "actual_seq_lengths_kv", "actual_seq_klen", "actual_seq_kvlen"}
    ),
}
"""Keywords under which the operators take the lengths of documents, by side."""


def find(
    boundary: Sequence[Argument],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    renamed: Mapping[str, str],
    where: str,
) -> dict[str, Slot]:
    """Return where a call holds each argument; a keyword that is present wins over the position.

    What is not a tensor at the place of an optional argument (None, a scale) is not that argument.

    Args:
        boundary: The arguments to look for.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        renamed: Keywords that the style was told, by name.
        where: Name of the style, for messages.

    Raises:
        ValueError: If a required argument is missing.
        TypeError: If what is there is not a tensor.
    """
    slots = {}
    for argument in boundary:
        names = [renamed[argument.name]] if argument.name in renamed else []
        names += argument.keywords
        key: int | str | None = next((name for name in names if name in kwargs), None)
        if key is None and argument.position < len(args):
            key = argument.position
        value = None if key is None else kwargs[key] if isinstance(key, str) else args[key]
        if isinstance(value, Tensor):
            assert key is not None, "a value was found somewhere"
            slots[argument.name] = Slot(argument.name, key)
            continue
        if not argument.required:
            continue
        way_out = f"set {argument.name}_kwarg_name to the keyword that the module is called with"
        if key is None:
            raise fail(
                where,
                f"{argument.name} must be at position {argument.position} or keyword "
                f"{' or '.join(map(repr, names))}, but the call has {len(args)} positional "
                f"arguments and keywords {sorted(kwargs)}",
                way_out,
            )
        raise TypeError(
            f"{where}: {argument.name} (argument {key!r}) must be a tensor, got "
            f"{type(value).__name__}; {way_out}"
        )
    return slots
