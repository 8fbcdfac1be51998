"""What others see of our own work: views, selective activation checkpointing, torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from hp_mesh._torch import hidden_from_selective_checkpoint

__all__ = ["outside_compiled_code", "seen_by_views", "unseen_by_checkpoints"]

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

outside_compiled_code: Callable[[F], F] = torch.compiler.disable
"""Decorates what torch.compile must not trace: it looks at the call stack, or runs for each op."""


def seen_by_views(function: Callable[P, R]) -> Callable[P, R]:
    """Let torch function modes see calls of ``function``, so that a handler may run it.

    What it returns is the key for `hp_mesh.register_handler`. Outside a boundary it is ``function``
    itself. Under torch.compile it is a break in the graph: its body would be traced frame by frame,
    checks and loops over tiles included.
    """

    @functools.wraps(function)
    def traced(*args: P.args, **kwargs: P.kwargs) -> R:
        tensors = tuple(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        if has_torch_function(tensors):
            overridden: Any = handle_torch_function(call, tensors, *args, **kwargs)
            return cast(R, overridden)
        return function(*args, **kwargs)

    call = outside_compiled_code(traced)
    return call


def unseen_by_checkpoints(function: Callable[P, R]) -> Callable[P, R]:
    """Let selective activation checkpointing neither save nor count the ops of ``function``.

    It numbers the ops of each kind, in forward and in recomputation, and puts what it saved in the
    place of what has the same number. An exchange that was sent ahead in one of the two only would
    shift them; one that "was saved" would not run, and leave its buffer as it was allocated.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with hidden_from_selective_checkpoint():
            return function(*args, **kwargs)

    return call
