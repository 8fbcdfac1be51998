"""Which ops run by a handler inside a boundary, on local tensors, and not by DTensor's rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hp_mesh.contraction import CONTRACTIONS
from hp_mesh.reshape import RESHAPES

if TYPE_CHECKING:
    from hp_mesh.view import View

__all__ = ["Handler", "Registration", "register_handler", "registration_of"]

Handler = Callable[["View", Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
"""Runs one op under a view: ``handler(view, op, args, kwargs)``."""


@dataclass(frozen=True, slots=True)
class Registration:
    """What runs one op, and what it takes.

    Attributes:
        handler: Runs the op.
        knows_rows: Whether it is right for rows in head-tail order, also where it mixes them.
        streams: Whether it takes streamed tensors itself (see `hp_mesh.streamed`).
    """

    handler: Handler
    knows_rows: bool = False
    streams: bool = False


_registered: dict[object, Registration] = {
    op: Registration(handler) for op, handler in {**CONTRACTIONS, **RESHAPES}.items()
}


def register_handler(
    op: Callable[..., Any] | str,
    handler: Handler,
    *,
    knows_rows: bool = False,
    streams: bool = False,
) -> None:
    """Let ``handler`` run ``op`` inside every boundary.

    Args:
        op: The torch function as the function mode sees it (``F.scaled_dot_product_attention``), or
            the qualified name of a ``torch.ops`` operator (``"npu::npu_fusion_attention"``), which
            may be registered later or never.
        handler: Called with the view, the op and its arguments; returns the op's result.
        knows_rows: As in `Registration`, for this op.
        streams: As in `Registration`, for this op.
    """
    _registered[op] = Registration(handler, knows_rows, streams)


def registration_of(op: Any) -> Registration | None:
    """Return what runs ``op``, a function as the function mode sees it, or None."""
    if isinstance(op, torch._ops.OpOverload):
        return _registered.get(str(op._schema.name))
    if isinstance(op, torch._ops.OpOverloadPacket):
        return _registered.get(op._qualified_op_name)
    try:
        return _registered.get(op)
    except TypeError:  # an unhashable callable is nobody's key
        return None
