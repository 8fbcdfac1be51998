"""Uninitialised memory made visible, and the memory that operators ask for, on CPU."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hp_mesh.testing._watch import Watch, tensors_in

__all__ = ["largest_allocation", "peak_memory", "poison_empty"]

_FACTORIES = ("empty", "empty_like", "empty_strided")
_METHODS = ("new_empty", "new_empty_strided")
_lock = threading.RLock()
_depth = 0
_kept: list[tuple[Any, str, Any]] = []


@contextmanager
def poison_empty() -> Iterator[None]:
    """Fill what `torch.empty` and its relatives give with NaN (integers: their largest value).

    An output that is never written, or read before the transfer has ended, then shows. It replaces
    torch's Python functions for every thread of the process, inside custom operators too; it nests,
    and ranks that are threads may each enter it.
    """
    global _depth
    with _lock:
        if _depth == 0:
            for owner, names in ((torch, _FACTORIES), (torch.Tensor, _METHODS)):
                for name in names:
                    _kept.append((owner, name, owner.__dict__.get(name)))
                    setattr(owner, name, _poisoned(getattr(owner, name)))
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                while _kept:
                    owner, name, original = _kept.pop()
                    if original is None:
                        delattr(owner, name)  # it was inherited
                    else:
                        setattr(owner, name, original)


def _poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(make)
    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        made = make(*args, **kwargs)
        with torch.no_grad():
            if made.dtype.is_floating_point or made.dtype.is_complex:
                made.fill_(float("nan"))
            elif made.dtype is not torch.bool:
                made.fill_(torch.iinfo(made.dtype).max)
        return made

    return poisoned


class peak_memory(Watch):  # type: ignore[no-untyped-call]
    """Record the memory that operators in the block allocate in this thread, backward included.

    Counted are the storages of operators' results, while they live, custom operators in Python
    looked into; what a built-in operator uses inside and frees before it returns is not seen, nor
    is what existed before the block.

    Attributes:
        peak: Most bytes alive at one time.
        live: Bytes alive now.
        largest: Bytes of the largest single storage.
        largest_op: The operator that made it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.live = 0
        self.largest = 0
        self.largest_op = ""
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def before(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Any) -> None:
        """Take note of the arguments' storages, so that a view of them costs nothing."""
        for x in tensors_in((args, kwargs)):
            storage = _storage(x)
            if storage is not None and id(storage) not in self._seen:
                self._watch(storage, 0)

    def after(self, func: torch._ops.OpOverload, result: Any) -> None:
        """Add the storages that the operator made."""
        for x in tensors_in(result):
            self._add(x, str(func))

    def _add(self, x: Tensor, op: str) -> None:
        storage = _storage(x)
        if storage is None or id(storage) in self._seen:
            return
        size = storage.nbytes()
        self._watch(storage, size)
        self.live += size
        self.peak = max(self.peak, self.live)
        if size > self.largest:
            self.largest, self.largest_op = size, op

    def _watch(self, storage: torch.UntypedStorage, size: int) -> None:
        key = id(storage)

        def gone(_: object) -> None:
            self._seen.pop(key, None)
            self.live -= size

        self._seen[key] = weakref.ref(storage, gone)


class largest_allocation(peak_memory):  # type: ignore[no-untyped-call]
    """`peak_memory`, under the name of what most tests ask: ``.largest``, the largest storage.

    Example::

        with largest_allocation() as memory:
            attention(q, k, v).sum().backward()
        assert memory.largest < S * S * 8, memory.largest_op
    """


def _storage(x: Tensor) -> torch.UntypedStorage | None:
    try:
        return x.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None  # a subclass without storage: its inner tensors are seen on their own
