"""The views that are open on this thread, and what attention may ask of the innermost one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import FrameType

from torch.distributed.tensor import DTensor, Placement, Replicate

from hp_mesh._torch import patch_dtensor_exits, push_function_mode, remove_function_modes
from hp_mesh.view import View
from hp_mesh.window import AttentionWindow

__all__ = ["attention_window", "close_view", "current_view", "open_view"]


class _Stack(threading.local):
    """The views of this thread, outermost first."""

    def __init__(self) -> None:
        self.views: list[View] = []


_stack = _Stack()


def _sweep() -> None:
    """Take the views off the stack whose module call has ended; the others keep their order."""
    dead = [view for view in _stack.views if not view.is_live()]
    _stack.views = [view for view in _stack.views if view not in dead]
    remove_function_modes(lambda mode: mode in dead)
    for view in dead:
        view.frame = None


def open_view(view: View, frame: FrameType) -> View:
    """Activate ``view`` for the module call that runs in ``frame``; clears views left by others."""
    patch_dtensor_exits(_default_grad_placements)
    _sweep()
    view.frame = frame
    _stack.views.append(view)
    push_function_mode(view)
    return view


def close_view(view: View) -> None:
    """Deactivate ``view``, wherever it stands on the stack, and the dead ones left there."""
    view.frame = None  # dead from here on
    _sweep()


def current_view() -> View | None:
    """Return the view of the innermost boundary that this code runs in, or None outside."""
    for view in reversed(_stack.views):
        if view.is_live():
            return view
    return None


def attention_window() -> AttentionWindow | None:
    """Return the rows and keys that this rank computes, or None outside a boundary.

    Answers in both conventions: with DTensors (the default) and with plain local tensors
    (``use_local_input=True``). Query row ``i`` of this rank is global row ``query_start + i``.

    Example::

        window = attention_window()
        rows = torch.arange(window.query_start, window.query_end)
        mask = rows[:, None] >= torch.arange(window.key_length)[None, :]
    """
    view = current_view()
    if view is None:
        return None
    view.refuse_checkpoint()
    return view.window


def _default_grad_placements(tensor: DTensor, whole: bool) -> Sequence[Placement] | None:
    view = current_view()
    if view is None or not view.owns(tensor):
        return None
    if view.streamed is not None and view.streamed.holds(tensor):
        raise view.streamed.refusal("full_tensor" if whole else "to_local")
    if whole:  # full_tensor: replicated on every axis before it becomes local
        placements: Sequence[Placement] = [Replicate()] * view.mesh.ndim
    else:
        placements = tensor.placements
    grads = view.partial_grads(placements)
    return None if grads == tuple(placements) else grads
