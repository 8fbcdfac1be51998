"""While a module runs, what it saves of gathered tensors is noted, and not kept.

Torch has one stack of hooks on saved tensors per thread and calls the innermost pair only. A
`Recorder` puts its pair there for one call of the module, if nobody else's is active, and takes it
off whatever happens: a ``KeyboardInterrupt``, which skips the hooks of modules, leaves it behind
until the next tensor is saved.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hp_mesh._torch import (
    allows_saved_tensor_hooks,
    in_backward,
    keeps_graph,
    push_saved_tensor_hooks,
    remove_saved_tensor_hooks,
    top_saved_tensor_hooks,
    without_overrides,
)
from hp_mesh.refetch import Note, Refetch, Saved
from hp_mesh.view import View

__all__ = ["Recorder", "may_forget", "saved_by_others", "tensors_of"]


def may_forget() -> bool:
    """Whether what the call that begins here gathers can be left to a second gather.

    Not without a graph. Not while backward recomputes: it is about to use it. Not under hooks of
    others on saved tensors (checkpointing frees it anyway, offloading moves it): torch calls the
    innermost pair only, so theirs would be bypassed.
    """
    while (top := top_saved_tensor_hooks()) is not None:
        owner = getattr(top[0], "__self__", None)
        if not isinstance(owner, Recorder) or owner.is_live():
            return False
        owner.close()  # a KeyboardInterrupt has left it behind
    return torch.is_grad_enabled() and not in_backward() and allows_saved_tensor_hooks()


def saved_by_others() -> bool:
    """Whether tensors that are saved now go to hooks of others."""
    top = top_saved_tensor_hooks()
    return top is not None and not isinstance(getattr(top[0], "__self__", None), Recorder)


def _unpack(saved: Saved | Note) -> Tensor:
    return saved.unpack()


class _Launcher:
    """Prehook of a node of the graph: starts the gather when backward reaches the node.

    After a backward that frees the graph it keeps nothing alive; what saved tensors are left do.
    """

    def __init__(self, gathered: Refetch) -> None:
        self._gathered: Refetch | None = gathered
        self._weak = weakref.ref(gathered)

    def __call__(self, _: object) -> None:
        gathered = self._gathered or self._weak()
        if gathered is not None:
            gathered.launch()
        if not keeps_graph():
            self._gathered = None


class Recorder:
    """The hooks on saved tensors during one call of the module.

    Args:
        view: The view of the call: once it has ended, the hooks do nothing and go.
    """

    def __init__(self, view: View) -> None:
        self._view: View | None = view
        self._thread = threading.get_ident()
        self._parts: list[Refetch] = []
        self._witnesses: list[tuple[Saved, ...]] = []

    def open(self) -> None:
        """Be asked from here on about what is saved."""
        push_saved_tensor_hooks(self._pack, _unpack)

    def watch(self, gathered: Refetch, witnesses: Sequence[Sequence[Tensor]]) -> None:
        """Take notes of ``gathered``, which the module is handed next.

        Args:
            gathered: What is not to be kept.
            witnesses: For each of its tensors what shows a change: the tensor itself, and what the
                module sees of it (a DTensor counts its versions by itself).
        """
        self._parts.append(gathered)
        with without_overrides():
            self._witnesses = [tuple(Saved.of(x) for x in one) for one in witnesses]

    def is_live(self) -> bool:
        """Whether the call still runs on this thread."""
        return self._view is not None and self._view.is_live()

    def close(self) -> None:
        """Be asked no more."""
        if self._view is not None:
            self._view = None
            self._parts, self._witnesses = [], []
            remove_saved_tensor_hooks(self._pack)

    def launch_with(self, output: Any) -> None:
        """Let backward gather the last part again when it reaches ``output``."""
        for x in tensors_of(output):
            _launch_at(x, self._parts[-1])

    def launch_before_last(self, output: Tensor) -> None:
        """Let backward gather the part before the last again when it reaches the last's output."""
        if len(self._parts) > 1:
            _launch_at(output, self._parts[-2])

    def _pack(self, x: Tensor) -> Saved | Note:
        with without_overrides():
            if threading.get_ident() == self._thread and not self.is_live():
                self.close()
            return self._note(x) or Saved.of(x)

    def _note(self, x: Tensor) -> Note | None:
        note = self._parts[-1].note(x) if self._witnesses else None
        if note is None or not all(one.is_unchanged() for one in self._witnesses[note.which]):
            return None  # changed in place by the module: what was gathered is not what it needs
        return note


def _launch_at(x: Tensor, gathered: Refetch) -> None:
    if x.grad_fn is not None:
        x.grad_fn.register_prehook(_Launcher(gathered))


def tensors_of(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of what a module returned, at its first level."""
    values: Any = (output,)
    if isinstance(output, Mapping):
        values = output.values()
    elif isinstance(output, (tuple, list)):
        values = output
    yield from (value for value in values if isinstance(value, Tensor))
