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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hp_comm import Handle
from hp_mesh._torch import WeakStorage, local_shard

__all__ = ["Handoff", "Launched", "ViewRecipe", "is_pure_view", "learn_view"]

_VIEW_NODES = frozenset(
    name + "Backward" + str(i)
    for name in (
        "Alias",
        "Permute",
        "ReshapeAlias",
        "Slice",
        "Split",
        "SplitWithSizes",
        "Squeeze",
        "Transpose",
        "Unflatten",
        "UnsafeView",
        "Unsqueeze",
        "View",
    )
    for i in range(3)
)
"""Autograd nodes of ops that only look at data in another way."""


class Handoff(nn.Module):
    """An identity that marks where a tensor is final, so that its exchange can start there.

    Put it behind what stands between projection and attention (rotary, QK-norm) and name it as
    ``q_proj`` or ``k_proj`` of `AsyncContextParallel.apply`.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x


@dataclass(frozen=True)
class ViewRecipe:
    """How the core's argument is a view of what was handed off.

    Attributes:
        parts: For each dim of ``y``, the sizes it is split into; one part keeps any size.
        order: For each dim of the argument, which of the parts it is; None for a dim of size 1 that
            is added.
    """

    parts: tuple[tuple[int, ...], ...]
    order: tuple[int | None, ...]

    def apply(self, y: Tensor) -> Tensor | None:
        """Return the view of ``y``, or None if the sizes do not split as learned."""
        if y.ndim != len(self.parts):
            return None
        shape: list[int] = []
        for size, parts in zip(y.shape, self.parts, strict=True):
            if len(parts) == 1:
                shape.append(size)
                continue
            product = 1
            for factor in parts:
                product *= factor
            if product != size:
                return None
            shape.extend(parts)
        kept = [part for part in self.order if part is not None]
        dropped = [part for part in range(len(shape)) if part not in kept]
        if any(shape[part] != 1 for part in dropped):
            return None
        x = y.view(shape).permute(*kept, *dropped)
        for _ in dropped:
            x = x.squeeze(-1)
        for dim, which in enumerate(self.order):
            if which is None:
                x = x.unsqueeze(dim)
        return x


def learn_view(y: Tensor, x: Tensor) -> ViewRecipe | None:
    """Return how ``x`` (local) is a view of ``y`` (local), or None if it is not a plain one."""
    if not _same_storage(x, y) or x.storage_offset() != y.storage_offset():
        return None
    if x.numel() != y.numel() or y.numel() == 0:
        return None
    parts: list[tuple[int, ...]] = []
    place: dict[int, int] = {}  # dim of x -> index among all parts
    ones = [dim for dim in range(x.ndim) if x.size(dim) == 1]
    for size, stride in zip(y.shape, y.stride(), strict=True):
        first = sum(map(len, parts))
        if size == 1:
            parts.append((1,))
            if ones:
                place[ones.pop(0)] = first
            continue
        inside = sorted(
            (
                dim
                for dim in range(x.ndim)
                if x.size(dim) > 1 and stride <= x.stride(dim) < stride * size
            ),
            key=lambda dim: x.stride(dim),
            reverse=True,
        )
        span = stride * size
        for dim in inside:
            span //= x.size(dim)
            if x.stride(dim) != span:
                return None
        if not inside or span != stride:
            return None
        parts.append(tuple(x.size(dim) for dim in inside))
        place.update({dim: first + i for i, dim in enumerate(inside)})
    if any(x.size(dim) > 1 and dim not in place for dim in range(x.ndim)):
        return None
    recipe = ViewRecipe(tuple(parts), tuple(place.get(dim) for dim in range(x.ndim)))
    replayed = recipe.apply(y)
    same = replayed is not None and _Geometry.of(replayed).is_same(_Geometry.of(x))
    return recipe if same else None


def _same_storage(x: Tensor, y: Tensor) -> bool:
    return WeakStorage(y).holds(x)


@dataclass(frozen=True)
class _Geometry:
    """Which elements of its storage a tensor shows, and how."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> _Geometry:
        return cls(tuple(x.shape), x.stride(), int(x.storage_offset()), x.dtype)

    def is_same(self, other: _Geometry) -> bool:
        """Whether both show the same elements in the same places (strides of size 1 are free)."""
        return (
            self.size == other.size
            and self.offset == other.offset
            and self.dtype == other.dtype
            and all(
                a == b
                for n, a, b in zip(self.size, self.stride, other.stride, strict=True)
                if n > 1
            )
        )


def _local(x: Tensor) -> Tensor:
    return local_shard(x) if isinstance(x, DTensor) else x


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version


@dataclass
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
    """

    storage: WeakStorage
    local: _Geometry
    version: int
    grad_fn: Any
    leaf: Any
    requires_grad: bool
    handle: Handle[Tensor] | None
    view: _Geometry | None

    @classmethod
    def of(
        cls, y: Tensor, part: Tensor, handle: Handle[Tensor] | None, view: Tensor | None
    ) -> Launched:
        """Remember output ``y``, of which ``part`` (all of it, or one split) is handed off."""
        local = _local(part)
        return cls(
            storage=WeakStorage(local),
            local=_Geometry.of(local),
            version=_version(local),
            grad_fn=y.grad_fn,
            leaf=y if y.grad_fn is None and y.requires_grad else None,
            requires_grad=y.requires_grad,
            handle=handle,
            view=None if view is None else _Geometry.of(view),
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

    def matches(self, x: Tensor) -> bool:
        """Whether ``x`` is exactly the view that is being exchanged, unchanged since."""
        return (
            self.view is not None
            and self.view.is_same(_Geometry.of(_local(x)))
            and is_pure_view(x, self)
        )

    def leads_to(self, x: Tensor) -> bool:
        """Whether nothing but views lies between this output and ``x``, in data and graph."""
        return is_pure_view(x, self)

    def drop(self) -> None:
        """Finish work whose result nobody wants."""
        if self.handle is not None:
            self.handle.wait()
            self.handle = None


def is_pure_view(x: Tensor, source: Launched) -> bool:
    """Whether nothing but views lies between ``source`` and ``x``, in data and in the graph."""
    local = _local(x)
    if _version(local) != source.version or local.dtype != source.local.dtype:
        return False
    if not torch.is_grad_enabled() or not source.requires_grad:
        return True
    if not x.requires_grad or x._backward_hooks or x.retains_grad:
        return False
    node: Any = x.grad_fn
    while node is not None and node is not source.grad_fn:
        if getattr(node, "variable", None) is not None:
            return bool(node.variable is source.leaf)
        if node.name() not in _VIEW_NODES or len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
    return node is not None or x is source.leaf


def split_output(
    output: Any, sizes: Sequence[int] | None, index: int
) -> tuple[Tensor, Tensor] | None:
    """Return ``(y, part)`` of a handoff module's output, or None if it is not a tensor."""
    if isinstance(output, (tuple, list)) and len(output) == 1:
        output = output[0]
    if not isinstance(output, Tensor):
        return None
    if sizes is None:
        return output, output
    if output.size(-1) != sum(sizes):
        return None
    parts: tuple[Tensor, ...] = torch.split(output, list(sizes), dim=-1)
    return output, parts[index]
