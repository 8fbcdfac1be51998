"""``keep_kv=False``: backward gathers K and V again, and only this rank's part is kept for it.

While the module runs, torch asks `hp_cp.kv_recorder` about every tensor it saves for backward. One
that shows the data of the gathered K or V (a slice, a transpose, a DTensor around it) is replaced
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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from hp_comm import Handle, gather_seq
from hp_cp import _autograd
from hp_mesh._torch import WeakStorage, local_shard
from hp_mesh.views import Geometry

__all__ = ["GatheredKV", "Note", "Saved"]

_NAMES = ("k", "v")


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
    """What a saved tensor showed of the gathered K or V."""

    source: GatheredKV
    which: int
    view: Geometry
    spec: Any  # of the DTensor, if it was one

    def unpack(self) -> Tensor:
        """Return the same view of K or V, gathered again."""
        whole, view = self.source.whole(self.which), self.view
        local = torch.as_strided(whole, view.size, view.stride, view.offset)
        return local if self.spec is None else _autograd.dtensor_of(local, self.spec)


class _Copy:
    """K and V gathered again for one backward; empty once they are not needed any more."""

    def __init__(self, handle: Handle[tuple[Tensor, ...]], consumers: int) -> None:
        self.handle: Handle[tuple[Tensor, ...]] | None = handle
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


class GatheredKV:
    """The gathered K and V of one call (or of one group of its heads): how to get them again.

    Nothing here depends on the thread: on accelerators backward runs in one of its own.

    Args:
        where: Name of the style, for messages.
        group: The ranks that gather.
        shards: K and V of this rank before the gather.
        watched: Other tensors that show the data of ``shards``; a change of theirs is one too.
        gathered: K and V as attention is to see them.
        seq_dim: Dim of the gather.
        head_dim: Dim of ``index``.
        index: KV head of each query head, taken after the gather; None to leave heads as they are.
        dense: As the first gather was asked.
        overlap: Whether something can run beside the second gather.
    """

    def __init__(
        self,
        where: str,
        group: ProcessGroup,
        shards: Sequence[Tensor],
        watched: Sequence[Tensor],
        gathered: Sequence[Tensor],
        *,
        seq_dim: int,
        head_dim: int,
        index: Tensor | None,
        dense: bool,
        overlap: bool,
    ) -> None:
        self.where = where
        self.group = group
        self.seq_dim, self.head_dim, self.index = seq_dim, head_dim, index
        self.dense, self.overlap = dense, overlap
        self._shards = [Saved.of(x) for x in shards]
        self._watched = [Saved.of(x) for x in watched]
        self._storages = [WeakStorage(x) for x in gathered]
        self._geometry = [Geometry.of(x) for x in gathered]
        self._copies: dict[int, _Copy] = {}
        self._lock = threading.RLock()
        # with the last of these, all gradients of K and V are there: nobody reads K and V again
        nodes = [x.grad_fn for x in gathered if x.grad_fn is not None]
        nodes = [node for i, node in enumerate(nodes) if node not in nodes[:i]]
        self._consumers = len(nodes)
        for i, node in enumerate(nodes):
            node.register_prehook(functools.partial(_consumed, weakref.ref(self), i))

    def note(self, x: Tensor) -> Note | None:
        """Return what ``x`` shows of the gathered K or V; None if it is something else."""
        local, spec = x, None
        if isinstance(x, DTensor):
            local, spec = local_shard(x), _autograd.spec_of(x)
        if type(local) is not Tensor or local.is_conj() or local.is_neg():
            return None
        for which, storage in enumerate(self._storages):
            if storage.holds(local) and local.dtype == self._geometry[which].dtype:
                return Note(self, which, Geometry.of(local), spec)
        return None

    def launch(self) -> None:
        """Start the gather for the backward that runs, unless it has been."""
        with self._lock:
            if _autograd.backward_id() not in self._copies:
                self._copies[_autograd.backward_id()] = self._start(self.overlap)
                self._end_with_backward()

    def whole(self, which: int) -> Tensor:
        """Return K (0) or V (1), gathered for the backward that runs."""
        backward = _autograd.backward_id()
        if backward == -1:
            raise RuntimeError(
                f"{self.where}: {_NAMES[which]} saved with keep_kv=False must be read by backward, "
                "in which all ranks gather it together, and not from the graph outside; set "
                "keep_kv=True to look at it there"
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
        """Let go of K and V if ``node`` was the last to complete a gradient of theirs."""
        with self._lock:
            copy = self._copies.get(_autograd.backward_id())
            if copy is not None:
                copy.pending.discard(node)
                if not copy.pending:
                    copy.drop()

    def _start(self, overlap: bool) -> _Copy:
        if not all(saved.is_unchanged() for saved in (*self._shards, *self._watched)):
            versions = [_version(saved.tensor) for saved in self._shards]
            raise RuntimeError(
                f"{self.where}: k and v (versions {versions}) must be as they were in forward "
                f"(versions {[saved.version for saved in self._shards]}), because keep_kv=False "
                "gathers them again in backward; do not change them in place, or set keep_kv=True"
            )
        shards = [saved.tensor for saved in self._shards]
        with torch.no_grad():
            if overlap:
                handle = gather_seq(
                    shards, self.group, seq_dim=self.seq_dim, dense=self.dense, async_op=True
                )
            else:
                rows = gather_seq(shards, self.group, seq_dim=self.seq_dim, dense=self.dense)
                handle = Handle.ready(self.where, rows)
        return _Copy(handle, self._consumers)

    def _receive(self, copy: _Copy) -> tuple[Tensor, ...]:
        handle, copy.handle = copy.handle, None
        assert handle is not None, "a copy without tensors has a handle"
        with torch.no_grad():
            whole = handle.wait()
            if self.index is not None:
                whole = tuple(x.index_select(self.head_dim, self.index) for x in whole)
        assert [Geometry.of(x) for x in whole] == self._geometry, "gathered as in forward"
        return whole

    def _end_with_backward(self) -> None:
        backward = _autograd.backward_id()

        def end() -> None:
            copy = self._copies.pop(backward, None)
            if copy is not None:
                copy.drop()

        _autograd.at_end_of_backward(end)


def _consumed(source: weakref.ref[GatheredKV], node: int, _: object) -> None:
    gathered = source()
    if gathered is not None:
        gathered.consumed(node)
