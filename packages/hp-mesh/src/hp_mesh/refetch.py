"""Backward gathers K and V again, and only this rank's part is kept for it.

While the module runs, torch asks `hp_mesh.recorder` about every tensor it saves for backward. One
that shows the data of the gathered tensors (a slice, a transpose, a DTensor around it) is replaced
by a note of what it shows; all others are kept as they are::

    forward     shard -> gather -> K, V -> attention        saves notes; K and V are freed
    backward    output's gradient arrives -> gather again -> attention's backward -> reduce-scatter
                                             K, V live until their own gradients are complete

The second gather hangs on the output's node in the graph and not on whether a note is read: every
rank takes part in it at the same place, whatever its rows made attention save.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hp_mesh._torch import (
    WeakStorage,
    at_end_of_backward,
    backward_id,
    dtensor_of,
    local_shard,
    spec_of,
)
from hp_mesh.geometry import Geometry
from hp_mesh.handoff import Waitable

__all__ = ["Note", "Refetch", "Saved"]


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


@dataclass(frozen=True, eq=False)
class Saved:
    """A tensor with its version counter, as torch itself would save it."""

    tensor: Tensor
    version: int | None

    @classmethod
    def of(cls, x: Tensor) -> Saved:
        """Save ``x``."""
        return cls(x.detach(), _version(x))

    def is_unchanged(self) -> bool:
        """Whether nothing has changed it in place."""
        return self.version == _version(self.tensor)

    def unpack(self) -> Tensor:
        """Return it, or say that it was changed in place."""
        if not self.is_unchanged():  # torch does not look where there are hooks
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {list(self.tensor.shape)} is at version "
                f"{_version(self.tensor)}; expected version {self.version} instead"
            )
        return self.tensor


@dataclass(frozen=True, eq=False)
class Note:
    """What a saved tensor showed of what was gathered."""

    source: Refetch
    which: int
    view: Geometry
    spec: Any  # of the DTensor, if it was one

    def unpack(self) -> Tensor:
        """Return the same view of the tensor that was gathered again."""
        whole, view = self.source.whole(self.which), self.view
        local = torch.as_strided(whole, view.size, view.stride, view.offset)
        return local if self.spec is None else dtensor_of(local, self.spec)


class _Copy:
    """What was gathered again for one backward; empty once it is not needed any more."""

    def __init__(self, handle: Waitable, consumers: int) -> None:
        self.handle: Waitable | None = handle
        self.tensors: tuple[Tensor, ...] | None = None
        self.pending = set(range(consumers))

    def drop(self) -> None:
        """Finish the gather if nobody has, and free its results."""
        handle, self.handle, self.tensors = self.handle, None, None
        if handle is not None:
            with torch.no_grad():
                handle.wait()

    def __del__(self) -> None:
        if self.handle is not None and not sys.is_finalizing():
            # backward failed in between; the peers have sent their part
            with contextlib.suppress(Exception):
                self.drop()


class Refetch(ABC):
    """What one call gathered, and how to get it again.

    Nothing here depends on the thread: on accelerators backward runs in one of its own.

    Args:
        where: Name of the style, for messages.
        names: Of the gathered tensors, for messages.
        option: The style's option that asks for this, for messages.
        shards: What this rank had before the gather.
        watched: Other tensors that show the data of ``shards``; a change of theirs is one too.
        gathered: The tensors as they were gathered.
        overlap: Whether something can run beside the second gather.
    """

    def __init__(
        self,
        where: str,
        names: Sequence[str],
        option: str,
        shards: Sequence[Tensor],
        watched: Sequence[Tensor],
        gathered: Sequence[Tensor],
        *,
        overlap: bool,
    ) -> None:
        self.where, self.names, self.option = where, names, option
        self.overlap = overlap
        self._shards = [Saved.of(x) for x in shards]
        self._watched = [Saved.of(x) for x in watched]
        self._storages = [WeakStorage(x) for x in gathered]
        self._geometry = [Geometry.of(x) for x in gathered]
        self._copies: dict[int, _Copy] = {}
        self._lock = threading.RLock()
        # with the last of these, all gradients are there: nobody reads what was gathered again
        nodes = [x.grad_fn for x in gathered if x.grad_fn is not None]
        nodes = [node for i, node in enumerate(nodes) if node not in nodes[:i]]
        self._consumers = len(nodes)
        for i, node in enumerate(nodes):
            node.register_prehook(functools.partial(_consumed, weakref.ref(self), i))

    @abstractmethod
    def start(self, shards: Sequence[Tensor], *, overlap: bool) -> Waitable:
        """Gather ``shards`` again; called on all ranks at the same place of backward."""

    @abstractmethod
    def finish(self, result: Any) -> tuple[Tensor, ...]:
        """Return the gathered tensors from what waiting for `start` gave."""

    def note(self, x: Tensor) -> Note | None:
        """Return what ``x`` shows of the gathered tensors; None if it is something else."""
        local, spec = x, None
        if isinstance(x, DTensor):
            local, spec = local_shard(x), spec_of(x)
        if type(local) is not Tensor or local.is_conj() or local.is_neg():
            return None
        for which, storage in enumerate(self._storages):
            if storage.holds(local) and local.dtype == self._geometry[which].dtype:
                return Note(self, which, Geometry.of(local), spec)
        return None

    def launch(self) -> None:
        """Start the gather for the backward that runs, unless it has been."""
        with self._lock:
            if backward_id() not in self._copies:
                self._copies[backward_id()] = self._start(self.overlap)
                self._end_with_backward()

    def whole(self, which: int) -> Tensor:
        """Return tensor number ``which``, gathered for the backward that runs."""
        backward = backward_id()
        if backward == -1:
            raise RuntimeError(
                f"{self.where}: {self.names[which]} saved with {self.option}=False must be read by "
                "backward, in which all ranks gather it together, and not from the graph outside; "
                f"set {self.option}=True to look at it there"
            )
        with self._lock:
            copy = self._copies.get(backward)
            if copy is None:
                copy = self._copies[backward] = self._start(overlap=False)
                self._end_with_backward()
            elif copy.handle is None and copy.tensors is None:
                copy = self._copies[backward] = self._start(overlap=False)
            if copy.tensors is None:
                copy.tensors = self._receive(copy)
            return copy.tensors[which]

    def consumed(self, node: int) -> None:
        """Let go of the copy if ``node`` was the last to complete a gradient of it."""
        with self._lock:
            copy = self._copies.get(backward_id())
            if copy is not None:
                copy.pending.discard(node)
                if not copy.pending:
                    copy.drop()

    def _start(self, overlap: bool) -> _Copy:
        if not all(saved.is_unchanged() for saved in (*self._shards, *self._watched)):
            versions = [_version(saved.tensor) for saved in self._shards]
            raise RuntimeError(
                f"{self.where}: {' and '.join(self.names)} (versions {versions}) must be as they "
                f"were in forward (versions {[saved.version for saved in self._shards]}), because "
                f"{self.option}=False gathers them again in backward; do not change them in place, "
                f"or set {self.option}=True"
            )
        with torch.no_grad():
            handle = self.start([saved.tensor for saved in self._shards], overlap=overlap)
        return _Copy(handle, self._consumers)

    def _receive(self, copy: _Copy) -> tuple[Tensor, ...]:
        handle, copy.handle = copy.handle, None
        assert handle is not None, "a copy without tensors has a handle"
        with torch.no_grad():
            whole = self.finish(handle.wait())
        assert [Geometry.of(x) for x in whole] == self._geometry, "gathered as in forward"
        return whole

    def _end_with_backward(self) -> None:
        backward = backward_id()

        def end() -> None:
            copy = self._copies.pop(backward, None)
            if copy is not None:
                copy.drop()

        at_end_of_backward(end)


def _consumed(source: weakref.ref[Refetch], node: int, _: object) -> None:
    gathered = source()
    if gathered is not None:
        gathered.consumed(node)
