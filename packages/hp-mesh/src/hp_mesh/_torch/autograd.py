"""Autograd: the hooks on tensors that are saved for backward, and the backward that runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

__all__ = [
    "allows_saved_tensor_hooks",
    "at_end_of_backward",
    "backward_id",
    "in_backward",
    "is_transformed",
    "keeps_graph",
    "push_saved_tensor_hooks",
    "remove_saved_tensor_hooks",
    "top_saved_tensor_hooks",
]

_hooks: Any = torch._C._autograd

Pack = Callable[[Tensor], object]
Unpack = Callable[[Any], Tensor]


def top_saved_tensor_hooks() -> tuple[Pack, Unpack] | None:
    """Return the pair that this thread calls for each tensor it saves for backward, or None."""
    pair: tuple[Pack, Unpack] | None = _hooks._top_saved_tensors_default_hooks(True)
    return pair


def allows_saved_tensor_hooks() -> bool:
    """Whether hooks may be pushed: ``torch.func`` and others forbid them for a while."""
    return bool(_hooks._saved_tensors_hooks_is_enabled())


def push_saved_tensor_hooks(pack: Pack, unpack: Unpack) -> None:
    """Make a pair the one that this thread calls; pairs below it are not called."""
    _hooks._push_saved_tensors_default_hooks(pack, unpack)


def remove_saved_tensor_hooks(pack: Pack) -> None:
    """Take the pair of ``pack`` off this thread's stack, where torch can only pop."""
    above = []
    while (top := top_saved_tensor_hooks()) is not None:
        _hooks._pop_saved_tensors_default_hooks()
        if top[0] == pack:  # a bound method is made anew each time
            break
        above.append(top)
    for pair in reversed(above):
        push_saved_tensor_hooks(*pair)


def backward_id() -> int:
    """Return the number of the backward that runs in this thread, or -1."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Whether autograd runs in this thread: a forward pass seen there is a recomputation."""
    return backward_id() != -1


def is_transformed(x: Tensor) -> bool:
    """Whether a transform of ``torch.func`` wraps ``x``, or it has a tangent of forward-mode AD."""
    local: Tensor = x._local_tensor if isinstance(x, DTensor) else x
    kinds = torch._C._functorch
    if kinds.is_functorch_wrapped_tensor(local) or kinds.is_legacy_batchedtensor(local):
        return True
    if forward_ad._current_level < 0:
        return False
    dual = forward_ad.unpack_dual(local)  # type: ignore[no-untyped-call]
    return dual.tangent is not None


def keeps_graph() -> bool:
    """Whether the backward that runs leaves its graph intact, so that there may be another."""
    return bool(_hooks._get_current_graph_task_keep_graph())


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` once the backward that runs has ended; not if it fails."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)
