"""What ``torch.autocast`` means to the operators: their inputs' dtype, and nothing inside.

Sums and statistics are float32 by promise, so no implementation may run under autocast, which would
round the operands of its products: not forward, and not backward, where the caller's state holds.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

__all__ = ["cast_by_autocast", "without_autocast"]

P = ParamSpec("P")
R = TypeVar("R")


def cast_by_autocast(*names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Under autocast, cast the tensors of these names to its dtype and run without it.

    As torch does for its own attention: float64 stays, and so does what is not named. The cast is
    recorded by autograd, so that gradients come in the dtype of what the caller gave. A tensor that
    is given twice is cast once, so that a value that is the key stays the key.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        positional = list(inspect.signature(function).parameters)
        cast = [name in names for name in positional]

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            device = _device_under_autocast((*args, *kwargs.values()))
            if device is None:
                return function(*args, **kwargs)
            dtype = torch.get_autocast_dtype(device)
            done: dict[int, Any] = {}

            def like(x: Any) -> Any:
                if not isinstance(x, Tensor) or x.device.type != device:
                    return x
                if not x.is_floating_point() or x.dtype is torch.float64:
                    return x
                if id(x) not in done:
                    done[id(x)] = x.to(dtype)
                return done[id(x)]

            given: list[Any] = [
                like(x) if i < len(cast) and cast[i] else x for i, x in enumerate(args)
            ]
            named: Any = {name: like(x) if name in names else x for name, x in kwargs.items()}
            with torch.autocast(device, enabled=False):
                return function(*given, **named)

        return call

    return decorate


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Run ``function``, a backward or what takes tensors, as if the caller were not in autocast."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        device = _device_under_autocast((*args, *kwargs.values()))
        if device is None:
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return call


def _device_under_autocast(given: Iterable[object]) -> str | None:
    """Return the device type of the first tensor if autocast is on for it, else None."""
    device = next((x.device.type for x in given if isinstance(x, Tensor)), None)
    if device is None or not torch.amp.is_autocast_available(device):
        return None
    return device if torch.is_autocast_enabled(device) else None
