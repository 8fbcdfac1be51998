"""Activation checkpointing: the code that runs it, and its dispatch modes."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["checkpoint_codes", "hidden_from_selective_checkpoint"]


@functools.cache
def checkpoint_codes() -> tuple[types.CodeType, types.CodeType]:
    """Return the code of ``torch.utils.checkpoint.checkpoint``, and of its reentrant forward."""
    from torch.utils.checkpoint import CheckpointFunction, checkpoint

    return inspect.unwrap(checkpoint).__code__, inspect.unwrap(CheckpointFunction.forward).__code__


@functools.cache
def _selective_checkpoint_modes() -> tuple[type, ...]:
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    return (_CachingTorchDispatchMode, _CachedTorchDispatchMode)


@contextmanager
def hidden_from_selective_checkpoint() -> Iterator[None]:
    """Take the modes of selective activation checkpointing off this thread's stack for a while."""
    from torch.utils._python_dispatch import (
        _get_current_dispatch_mode_stack,
        _pop_mode,
        _push_mode,
    )

    stack = _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else []
    kinds = _selective_checkpoint_modes()
    lowest = next((i for i, mode in enumerate(stack) if isinstance(mode, kinds)), len(stack))
    taken = stack[lowest:]
    others = [mode for mode in taken if not isinstance(mode, kinds)]
    for _ in taken:
        _pop_mode()
    for mode in others:
        _push_mode(mode)
    try:
        yield
    finally:
        if taken:
            for _ in others:
                _pop_mode()
            for mode in taken:
                _push_mode(mode)
