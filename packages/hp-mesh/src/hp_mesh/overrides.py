"""Functions of our own that the view of a boundary can take over, as it does torch's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

__all__ = ["seen_by_views"]

P = ParamSpec("P")
R = TypeVar("R")


def seen_by_views(function: Callable[P, R]) -> Callable[P, R]:
    """Let torch function modes see calls of ``function``, so that a handler may run it.

    What it returns is the key for `hp_mesh.register_handler`. Outside a boundary it is ``function``
    itself.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        tensors = tuple(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        if has_torch_function(tensors):
            overridden: Any = handle_torch_function(cast(Any, call), tensors, *args, **kwargs)
            return cast(R, overridden)
        return function(*args, **kwargs)

    return call
