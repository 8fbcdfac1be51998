"""Functions as torch calls them: the stack of function modes, and functions written in Python."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = [
    "function_body",
    "function_mode_stack",
    "push_function_mode",
    "remove_function_modes",
    "without_innermost_mode",
    "without_overrides",
]


def function_mode_stack() -> list[TorchFunctionMode]:
    """Return the active function modes of this thread, outermost first."""
    from torch.overrides import _get_current_function_mode_stack

    return list(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def remove_function_modes(unwanted: Callable[[TorchFunctionMode], bool]) -> None:
    """Take the active modes that ``unwanted`` names off this thread's stack, wherever they are."""
    from torch.overrides import _pop_mode, _push_mode

    kept: list[TorchFunctionMode] = []
    stack = function_mode_stack()
    lowest = next((i for i, mode in enumerate(stack) if unwanted(mode)), len(stack))
    for mode in reversed(stack[lowest:]):
        _pop_mode()  # type: ignore[no-untyped-call]
        if not unwanted(mode):
            kept.append(mode)
    for mode in reversed(kept):
        _push_mode(mode)  # type: ignore[no-untyped-call]


def push_function_mode(mode: TorchFunctionMode) -> None:
    """Make ``mode`` the innermost active mode of this thread."""
    from torch.overrides import _push_mode

    _push_mode(mode)  # type: ignore[no-untyped-call]


@contextmanager
def without_innermost_mode(mode: TorchFunctionMode) -> Iterator[bool]:
    """Take ``mode`` off the stack for a while if it is the innermost one; says whether it was."""
    from torch.overrides import _pop_mode, _push_mode

    innermost = torch._C._len_torch_function_stack() - 1
    if innermost < 0 or torch._C._get_function_stack_at(innermost) is not mode:
        yield False
        return
    _pop_mode()  # type: ignore[no-untyped-call]
    try:
        yield True
    finally:
        _push_mode(mode)  # type: ignore[no-untyped-call]


def without_overrides() -> AbstractContextManager[Any]:
    """Return a context in which no function mode or subclass sees torch functions."""
    context: AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return context


_ASKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def function_body(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return ``func`` without its question for overrides: the ops in it are seen one by one.

    A mode is switched off while it handles a call: what ``F.multi_head_attention_forward`` calls
    would pass unseen. None for what is not such a function of ``torch.nn.functional``.
    """
    if not isinstance(func, types.FunctionType) or func.__module__ not in (
        "torch.nn.functional",
        "torch.functional",
    ):
        return None
    return _without_question(func)


@functools.cache
def _without_question(func: types.FunctionType) -> Callable[..., Any] | None:
    asked = [name for name in _ASKS if name in func.__code__.co_names]
    if not asked:
        return None
    names = {**func.__globals__, **dict.fromkeys(asked, lambda *_: False)}
    body = types.FunctionType(
        func.__code__, names, func.__name__, func.__defaults__, func.__closure__
    )
    body.__kwdefaults__ = func.__kwdefaults__
    return body
