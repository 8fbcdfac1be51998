"""Find the tensors of a call by position or keyword and put others in their place; outputs too."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hp_mesh.checks import fail

__all__ = ["Slot", "find_slots", "map_outputs", "replace_slots"]


@dataclass(frozen=True, slots=True)
class Slot:
    """One argument of a call: its key (position or keyword) and a name for messages."""

    name: str
    key: int | str


def find_slots(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    labels: Sequence[str],
    indices: Sequence[int],
    kwarg_names: Sequence[str],
    where: str,
) -> list[Slot]:
    """Return where the call holds each of the labelled tensors.

    A keyword that is present wins over the position, so mixed calls such as ``m(q, k, value=v)``
    are found.

    Raises:
        ValueError: If an argument is in neither place, with what the call does hold.
        TypeError: If what is there is not a tensor.
    """
    slots = []
    for i, label in enumerate(labels):
        keyword = kwarg_names[i] if i < len(kwarg_names) else None
        if keyword is not None and keyword in kwargs:
            slot, value = Slot(label, keyword), kwargs[keyword]
        elif i < len(indices) and -len(args) <= indices[i] < len(args):
            slot, value = Slot(label, indices[i]), args[indices[i]]
        else:
            expected = f"position {indices[i]}" if i < len(indices) else "no position"
            raise fail(
                where,
                f"{label} must be at {expected}"
                + (f" or keyword {keyword!r}" if keyword is not None else "")
                + f", but the call has {len(args)} positional arguments and keywords "
                f"{sorted(kwargs)}",
                "set qkv_indices or qkv_kwarg_names to what the module is called with",
            )
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{where}: {label} (argument {slot.key!r}) must be a tensor, got "
                f"{type(value).__name__}; set qkv_indices or qkv_kwarg_names to what the module is "
                "called with"
            )
        slots.append(slot)
    return slots


def read_slots(args: Sequence[Any], kwargs: Mapping[str, Any], slots: Sequence[Slot]) -> list[Any]:
    """Return the values in ``slots``."""
    return [kwargs[s.key] if isinstance(s.key, str) else args[s.key] for s in slots]


def replace_slots(
    args: Sequence[Any], kwargs: Mapping[str, Any], slots: Sequence[Slot], values: Sequence[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the call with ``values`` in ``slots`` and everything else as it was."""
    new_args, new_kwargs = list(args), dict(kwargs)
    for slot, value in zip(slots, values, strict=True):
        if isinstance(slot.key, str):
            new_kwargs[slot.key] = value
        else:
            new_args[slot.key] = value
    return tuple(new_args), new_kwargs


def map_outputs(
    output: Any,
    declared: Sequence[int | str] | None,
    convert: Callable[[Tensor], Any],
    other: Callable[[Tensor], Any],
    where: str,
) -> Any:
    """Apply ``convert`` to the declared tensors of an output and ``other`` to its other tensors.

    Tuples, lists, namedtuples and mappings keep their type; only their first level is looked at.

    Args:
        output: What the module returned.
        declared: Positions or keys of the tensors to convert; None for the first tensor.
        convert: What becomes of a declared tensor.
        other: What becomes of any other tensor.
        where: Name of the style, for messages.

    Raises:
        TypeError: If there is no tensor to convert.
    """
    if isinstance(output, Tensor):
        return convert(output)
    if isinstance(output, Mapping):
        items: list[tuple[int | str, Any]] = list(output.items())
    elif isinstance(output, (tuple, list)):
        items = list(enumerate(output))
    else:
        items = []
    keys = declared
    if keys is None:
        keys = [key for key, value in items if isinstance(value, Tensor)][:1]
    found = dict(items)
    if not keys or any(not isinstance(found.get(key), Tensor) for key in keys):
        raise TypeError(
            f"{where}: the module returned {_describe(output)}, which must hold a tensor at "
            f"{list(keys) if declared is not None else 'its first level'}; return the attention "
            "output as a tensor, tuple, list, namedtuple or mapping"
        )
    values = [
        convert(value) if key in keys else other(value) if isinstance(value, Tensor) else value
        for key, value in items
    ]
    return _rebuild(output, [key for key, _ in items], values)


def _rebuild(like: Any, keys: Sequence[int | str], values: Sequence[Any]) -> Any:
    kind: Any = type(like)
    if isinstance(like, Mapping):
        if not isinstance(like, MutableMapping):
            return kind(dict(zip(keys, values, strict=True)))
        filled = copy.copy(like)  # a default factory, fields of a model output that are None, ...
        for key, value in zip(keys, values, strict=True):
            filled[key] = value
        return filled
    if hasattr(like, "_fields"):
        return kind(*values)
    return kind(values)


def _describe(output: Any) -> str:
    if isinstance(output, (tuple, list)):
        return f"{type(output).__name__} of {[type(v).__name__ for v in output]}"
    if isinstance(output, Mapping):
        return f"{type(output).__name__} with keys {list(output)}"
    return type(output).__name__
