"""From a projection to the core: work that starts early, and the proof that it is the right work.

A handoff module (``q_proj``) produces ``y``; the core receives ``x``. If ``x`` is a pure view of
``y`` (head split, reshape, transpose), the exchange of ``x`` can start as soon as ``y`` exists,
because the view can be replayed on ``y``. The first call learns the view; later calls launch. When
the core is called, the argument must be that view of that ``y``, unchanged: same storage, sizes,
strides and version, and nothing but view nodes between the two in the autograd graph. Otherwise
the launched work is dropped and the argument is exchanged as usual, so a rotary embedding or a norm
in between is never bypassed.

The launched exchange hangs on ``y`` in the autograd graph (`hp_comm`: launch and wait are two
nodes), so its gradient is added to that of any other consumer of ``y``.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hp_mesh._torch import WeakStorage, local_shard
from hp_mesh.geometry import Geometry

__all__ = ["Handoff", "Lane", "Launched", "Waitable", "is_pure_view", "same_origin", "split_output"]

_VIEW_NODES = frozenset(
    name + "Backward" + str(i)
    for name in (
        "Alias",
        "AsStrided",
        "Expand",
        "Permute",
        "ReshapeAlias",
        "Select",
        "Slice",
        "Split",
        "SplitWithSizes",
        "Squeeze",
        "Transpose",
        "Unbind",
        "Unflatten",
        "UnsafeView",
        "Unsqueeze",
        "View",
    )
    for i in range(3)
)
"""Autograd nodes of ops that only look at data in another way."""

IN_FLIGHT = 8
"""Outputs of one projection that may be on their way to the core at a time; older ones are lost."""


class Waitable(Protocol):
    """Work under way, such as a handle of `hp_comm`."""

    def wait(self) -> Any:
        """Return its result."""


class Handoff(nn.Module):
    """An identity that marks where a tensor is final, so that its exchange can start there.

    Put it behind what stands between projection and attention (rotary, QK-norm) and name it as the
    module that the tensor comes from, such as ``q_proj`` of `AsyncContextParallel.apply`. What the
    boundary itself will do to the tensor may be said with it; the boundary's module must then be
    called with the same object.
    """

    def forward(self, x: Tensor, work: object = None) -> Tensor:
        """Return ``x``; ``work`` is for the boundary (see `hp_cp.PreparedAttention`)."""
        return x


def _local(x: Tensor) -> Tensor:
    return local_shard(x) if isinstance(x, DTensor) else x


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version


@dataclass(eq=False)
class Launched:
    """One output of a handoff module, and the exchange of its view if one was started.

    Attributes:
        storage: Weak: an output that nobody holds any more will not reach the core.
        local: What the handed-off part of the local output shows of its storage.
        version: Its version counter: an in-place change counts it up.
        grad_fn: Its node in the autograd graph; None for a leaf or without a graph.
        leaf: The output itself if it is a leaf that requires grad.
        requires_grad: Whether it had a graph.
        handle: The exchange; None while the view is being learned.
        view: The replayed view that is being exchanged.
        copy: Its data, while the view is being learned: ``.data`` changes without a new version.
        reached: Whether it has arrived at the core.
        work: What the boundary does to it, as it was handed off.
    """

    storage: WeakStorage
    local: Geometry
    version: int
    grad_fn: Any
    leaf: Tensor | None
    requires_grad: bool
    handle: Waitable | None = None
    view: Geometry | None = None
    copy: Tensor | None = None
    reached: bool = False
    work: object = None

    @classmethod
    def of(
        cls,
        y: Tensor,
        part: Tensor,
        handle: Waitable | None = None,
        view: Tensor | None = None,
    ) -> Launched:
        """Remember output ``y``, of which ``part`` (all of it, or one split) is handed off."""
        local = _local(part)
        return cls(
            storage=WeakStorage(local),
            local=Geometry.of(local),
            version=_version(local),
            grad_fn=y.grad_fn,
            leaf=y if y.grad_fn is None and y.requires_grad else None,
            requires_grad=y.requires_grad,
            handle=handle,
            view=None if view is None else Geometry.of(view),
            copy=local.detach().clone() if handle is None else None,
        )

    def is_alive(self) -> bool:
        """Whether the output can still reach the core."""
        return not self.storage.expired()

    def is_source_of(self, x: Tensor) -> bool:
        """Whether argument ``x`` lives in the storage of this output."""
        return self.storage.holds(_local(x))

    def part_like(self, x: Tensor) -> Tensor:
        """Return the handed-off output again, as a view into the storage of ``x``."""
        of = self.local
        return torch.as_strided(_local(x).detach(), of.size, of.stride, of.offset)

    def is_unchanged(self, x: Tensor) -> bool:
        """Whether the data in the storage of ``x`` is what it was, as far as it was copied."""
        if self.copy is None:
            return True
        now = self.part_like(x)
        return bool(((now == self.copy) | (now.ne(now) & self.copy.ne(self.copy))).all())

    def matches(self, x: Tensor, *, detached: bool = False) -> bool:
        """Whether ``x`` is exactly the view that is being exchanged, unchanged since."""
        return (
            self.view is not None
            and self.view.is_same(Geometry.of(_local(x)))
            and is_pure_view(x, self, detached=detached)
        )

    def drop(self) -> None:
        """Finish work whose result nobody wants, and let go of the graph."""
        handle, self.handle = self.handle, None
        self.grad_fn = self.leaf = self.copy = None
        if handle is not None:
            with torch.no_grad():
                handle.wait()

    def __del__(self) -> None:
        if self.handle is not None and not sys.is_finalizing():
            # a model that is thrown away; its peers have sent their part
            with contextlib.suppress(Exception):
                self.drop()


def is_pure_view(x: Tensor, source: Launched, *, detached: bool = False) -> bool:
    """Whether nothing but views lies between ``source`` and ``x``, in data and in the graph.

    The gradient of launched work goes from the core to ``source`` past ``x``: hooks on ``x``
    would not run, so ``x`` must have none. With ``detached`` an ``x`` that is cut from the graph
    counts as well; what was launched must then be detached too.
    """
    local = _local(x)
    if _version(local) != source.version or local.dtype != source.local.dtype:
        return False
    if not torch.is_grad_enabled() or (detached and not x.requires_grad):
        return True
    if x.requires_grad != source.requires_grad:
        return False
    if not x.requires_grad:
        return True
    if x is source.leaf:
        return True
    if x._backward_hooks or x.retains_grad:
        return x.grad_fn is source.grad_fn
    node: Any = x.grad_fn
    while node is not None and node is not source.grad_fn:
        if getattr(node, "variable", None) is not None:
            return bool(node.variable is source.leaf)
        if node.name() not in _VIEW_NODES or len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
    return node is not None


def same_origin(x: Tensor, y: Tensor) -> bool:
    """Whether ``x`` and ``y``, which show the same data, also pass their gradients to one place.

    Then a gradient of ``y`` may as well be one of ``x``. Hooks on either would notice.
    """
    if x is y:
        return True
    if x.requires_grad != y.requires_grad or x._backward_hooks or y._backward_hooks:
        return False
    if x.retains_grad or y.retains_grad:
        return False
    return not x.requires_grad or _origin(x) is _origin(y)


def _origin(x: Tensor) -> Any:
    """Return the leaf or the node whose output ``x`` is a view of."""
    node: Any = x.grad_fn
    while node is not None and node.name() in _VIEW_NODES and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return x if node is None else getattr(node, "variable", node)


@dataclass(eq=False)
class Lane:
    """Outputs of one projection on their way to the core: in one thread, forward or recomputed.

    What is given up and when follows from the order of calls alone, which is the same on all
    ranks, and never from when memory is freed.

    Attributes:
        items: Those that have not reached the core, oldest first.
        sent: The latest that were launched, arrived or not.
        closed: Whether nothing is launched here any more.
    """

    items: list[Launched] = field(default_factory=list)
    sent: deque[Launched] = field(default_factory=lambda: deque(maxlen=2 * IN_FLIGHT))
    closed: bool = False

    def add(self, item: Launched) -> None:
        """Take in the newest output."""
        self.items.append(item)
        if item.handle is not None:
            self.sent.append(item)

    def tidy(self) -> None:
        """Finish the work of outputs that nobody holds any more, and of those long overdue."""
        latest = list(self.sent)[1 - IN_FLIGHT :]
        learning = [item for item in self.items if item.handle is None][1 - IN_FLIGHT :]
        for item in list(self.items):
            is_young = item in (learning if item.handle is None else latest)
            if not is_young or not item.is_alive():
                self.items.remove(item)
                item.drop()

    def is_wasteful(self) -> bool:
        """Whether what was launched has failed to reach the core more than once."""
        overdue = list(self.sent)[: 1 - IN_FLIGHT]
        return sum(not item.reached for item in overdue) > 1

    def expects(self) -> bool:
        """Whether something was launched lately that has not arrived."""
        return any(not item.reached for item in list(self.sent)[-IN_FLIGHT:])

    def find(self, x: Tensor, *, detached: bool = False) -> Launched | None:
        """Return the output that ``x`` lives in; of several in one buffer, the one it matches."""
        found = [item for item in self.items if not item.reached and item.is_source_of(x)]
        matching = (item for item in found if item.matches(x, detached=detached))
        return next(matching, found[-1] if found else None)

    def drop_all(self) -> None:
        """Finish everything."""
        while self.items:
            self.items.pop().drop()


def split_output(
    output: Any, sizes: Sequence[int] | None, index: int
) -> tuple[Tensor, Tensor] | None:
    """Return ``(y, part)`` of what a handoff module returned, or None if that is not one tensor.

    Linear layers that return ``(output, bias)`` do so with None for the bias that was added.
    """
    if isinstance(output, (tuple, list)):
        tensors = [x for x in output if isinstance(x, Tensor)]
        output = tensors[0] if len(tensors) == 1 else None
    if not isinstance(output, Tensor):
        return None
    if sizes is None:
        return output, output
    if isinstance(output, DTensor) or output.size(-1) != sum(sizes):
        return None
    parts: tuple[Tensor, ...] = torch.split(output, list(sizes), dim=-1)
    return output, parts[index]
