"""Storages, told apart without being kept alive."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["WeakStorage"]


class WeakStorage:
    """A weak reference to the storage of a tensor: told apart from all others, never kept alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._ref: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a view into this storage."""
        return bool(self._ref.cdata == tensor.untyped_storage()._cdata)

    def expired(self) -> bool:
        """Whether no tensor uses the storage any more."""
        return bool(self._ref.expired())
