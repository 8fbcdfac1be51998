"""How one tensor shows the data of another: learned once, replayed on later data."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from hp_mesh._torch import WeakStorage

__all__ = ["Geometry", "ViewRecipe", "learn_view"]


@dataclass(frozen=True)
class Geometry:
    """Which elements of its storage a tensor shows, and how."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> Geometry:
        """Return the geometry of a plain tensor."""
        return cls(tuple(x.shape), x.stride(), int(x.storage_offset()), x.dtype)

    def is_same(self, other: Geometry) -> bool:
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


@dataclass(frozen=True)
class ViewRecipe:
    """A view as splits, one permutation and merges: reshape, transpose, head split, and chains.

    Attributes:
        parts: For each dim of the source, the sizes it is split into; a single part is left whole
            and may have any size.
        order: For each dim of the view, the parts it joins, outermost first; none for a dim of
            size 1 that is added. A part that no dim takes must have size 1.
    """

    parts: tuple[tuple[int, ...], ...]
    order: tuple[tuple[int, ...], ...]

    def apply(self, y: Tensor) -> Tensor | None:
        """Return the view of ``y``, or None if ``y`` does not split or join as learned."""
        if y.ndim != len(self.parts):
            return None
        shape: list[int] = []
        for size, parts in zip(y.shape, self.parts, strict=True):
            if len(parts) > 1 and prod(parts) != size:
                return None
            shape.extend(parts if len(parts) > 1 else (size,))
        kept = [part for parts in self.order for part in parts]
        left = [part for part in range(len(shape)) if part not in kept]
        if any(shape[part] != 1 for part in left):
            return None
        sizes = [prod(shape[part] for part in parts) for parts in self.order]
        try:
            return y.view(shape).permute(*kept, *left).view(sizes)
        except RuntimeError:  # these strides cannot be joined
            return None


def learn_view(y: Tensor, x: Tensor) -> ViewRecipe | None:
    """Return how ``x`` is a view of all of ``y``, or None if it is not one of the usual kind."""
    if not WeakStorage(y).holds(x) or y.numel() == 0:
        return None
    split: list[list[tuple[int, int]]] = [[] for _ in range(y.ndim)]  # innermost first
    joined: list[list[tuple[int, int]]] = [[] for _ in range(x.ndim)]  # (dim of y, place in it)
    inner_y, inner_x = _dims_inside_out(y), _dims_inside_out(x)
    dim_y = dim_x = -1
    size_y = size_x = 1
    stride_y = stride_x = 0
    while inner_y or inner_x or size_y > 1 or size_x > 1:
        if size_y == 1:
            if not inner_y:
                return None
            dim_y = inner_y.pop()
            size_y, stride_y = y.size(dim_y), y.stride(dim_y)
        if size_x == 1:
            if not inner_x:
                return None
            dim_x = inner_x.pop()
            size_x, stride_x = x.size(dim_x), x.stride(dim_x)
        size = min(size_y, size_x)
        if stride_y != stride_x or size_y % size or size_x % size:
            return None
        joined[dim_x].append((dim_y, len(split[dim_y])))
        split[dim_y].append((size, stride_y))
        size_y, stride_y = size_y // size, stride_y * size
        size_x, stride_x = size_x // size, stride_x * size
    recipe = _recipe(y, x, split, joined)
    replayed = recipe.apply(y)
    same = replayed is not None and Geometry.of(replayed).is_same(Geometry.of(x))
    return recipe if same else None


def _dims_inside_out(x: Tensor) -> list[int]:
    """Return the dims that have a stride to speak of, the innermost last (to pop)."""
    return sorted((d for d in range(x.ndim) if x.size(d) > 1), key=x.stride, reverse=True)


def _recipe(
    y: Tensor,
    x: Tensor,
    split: list[list[tuple[int, int]]],
    joined: list[list[tuple[int, int]]],
) -> ViewRecipe:
    parts = [tuple(size for size, _ in reversed(sizes)) or (1,) for sizes in split]
    first = [sum(map(len, parts[:dim])) for dim in range(y.ndim)]
    order = [
        tuple(first[dim] + len(parts[dim]) - 1 - place for dim, place in reversed(places))
        for places in joined
    ]
    # dims of size 1 look alike: taken in order, and learned anew where that proves wrong
    ones = [dim for dim in range(x.ndim) if not order[dim]]
    for dim in range(y.ndim):
        if y.size(dim) == 1 and ones:
            order[ones.pop(0)] = (first[dim],)
    return ViewRecipe(tuple(parts), tuple(order))
