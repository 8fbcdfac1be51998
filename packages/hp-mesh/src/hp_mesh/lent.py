"""Tensors of the caller that a module is handed as they are, and what is written to them later.

Autograd counts what is written in place to a tensor and refuses a backward that needs what is no
longer there. A DTensor (2.13) counts for itself: what its owner writes to the data outside is not
seen, and gradients would be computed from it without a word. So what is lent is looked at again
when backward comes by, and counted where an op of the module may have saved the DTensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hp_mesh._torch import keeps_graph, local_shard
from hp_mesh.recorder import saved_by_others, tensors_of

if TYPE_CHECKING:
    from hp_mesh.view import View

__all__ = ["Lent", "count_writes_later", "lend"]


class Lent:
    """A DTensor around data of the caller, and how often they had been written to.

    Args:
        wrapped: What the module is handed.
    """

    def __init__(self, wrapped: DTensor) -> None:
        self._wrapped = wrapped
        self._version = 0

    def begin(self) -> None:
        """Count from here on: what the module itself wrote, autograd has counted."""
        self._version = local_shard(self._wrapped)._version

    def count(self) -> None:
        """Count what was written since: whatever saved the DTensor, or a view of it, says so."""
        now = local_shard(self._wrapped)._version
        if now != self._version:
            self._version = now
            torch.autograd.graph.increment_version(self._wrapped)


def lend(view: View, wrapped: Tensor, given: Tensor) -> None:
    """Note that ``wrapped`` is handed over in the call of ``view``, if it shows data of ``given``.

    Not under hooks of others on saved tensors: activation checkpointing computes them again, and
    what is kept here would not be freed.
    """
    if not isinstance(wrapped, DTensor) or not torch.is_grad_enabled() or saved_by_others():
        return
    local = local_shard(wrapped)
    if local.is_inference() or isinstance(given, DTensor):
        return
    if local.untyped_storage()._cdata == given.untyped_storage()._cdata:
        view.lent.append(Lent(wrapped))


class _Counter:
    """Prehook of the node of an output, which backward reaches before all others of the call."""

    def __init__(self, lent: list[Lent]) -> None:
        self._lent = lent

    def __call__(self, _: object) -> None:
        for one in self._lent:
            one.count()
        if not keeps_graph():
            self._lent = []


def count_writes_later(view: View, output: object) -> None:
    """Let backward from ``output`` of the call look at what was lent for it."""
    lent, view.lent = view.lent, []
    for one in lent:
        one.begin()
    if lent:
        for x in tensors_of(output):
            if x.grad_fn is not None:
                x.grad_fn.register_prehook(_Counter(lent))
