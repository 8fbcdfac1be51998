"""Which ops run by a handler inside a boundary, on local tensors, and not by DTensor's rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hp_mesh.contraction import CONTRACTIONS
from hp_mesh.reshape import RESHAPES

if TYPE_CHECKING:
    from hp_mesh.view import View

__all__ = ["Handler", "handler_of", "knows_order", "register_handler", "takes_streams"]

Handler = Callable[["View", Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
"""Runs one op under a view: ``handler(view, op, args, kwargs)``."""

_handlers: dict[object, Handler] = {**CONTRACTIONS, **RESHAPES}
_know_rows: set[Handler] = set()
_stream: set[Handler] = set()


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
        knows_rows: Whether it is right for rows in head-tail order, also where it mixes them.
        streams: Whether it takes streamed tensors itself (see `hp_mesh.streamed`).
    """
    _handlers[op] = handler
    if streams:
        _stream.add(handler)
    if knows_rows:
        _know_rows.add(handler)


def handler_of(op: Any) -> Handler | None:
    """Return what runs ``op``, a function as the function mode sees it, or None."""
    if isinstance(op, torch._ops.OpOverload):
        return _handlers.get(str(op._schema.name))
    if isinstance(op, torch._ops.OpOverloadPacket):
        return _handlers.get(op._qualified_op_name)
    try:
        return _handlers.get(op)
    except TypeError:  # an unhashable callable is nobody's key
        return None


def knows_order(handler: Handler | None) -> bool:
    """Whether ``handler`` is right for rows in head-tail order."""
    return handler in _know_rows


def takes_streams(handler: Handler | None) -> bool:
    """Whether ``handler`` takes streamed tensors itself."""
    return handler in _stream
