"""A dispatch mode that looks at operators as they reach the kernels: the counters build on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Watch", "tensors_in"]

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_BUILT_IN = {"aten", "prim", "prims", "c10d", "_c10d_functional", "_dtensor"}


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Call `before` and `after` around each operator in this thread.

    A DTensor operator is taken apart first, and a custom operator written in Python is looked
    into, so that the collectives and buffers inside them are seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def before(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Any) -> None:
        """Look at an operator's arguments."""

    def after(self, func: torch._ops.OpOverload, result: Any) -> None:
        """Look at an operator's result."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # they go first, and come back with what they are made of
        if FakeTensor in types or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)  # shapes only, as DTensor asks for them: nothing runs
        self.before(func, args, kwargs)
        if func.namespace in _BUILT_IN or not _all_on_cpu(args, kwargs):
            result = func(*args, **kwargs)
        else:
            # straight to the kernel: through the dispatcher it would come back here for ever
            with self:
                result = func.redispatch(_CPU, *args, **kwargs)
        self.after(func, result)
        return result


def _all_on_cpu(args: Any, kwargs: Any) -> bool:
    devices = {x.device.type for x in tensors_in((args, kwargs))}
    return devices == {"cpu"}


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested arguments or results."""
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
