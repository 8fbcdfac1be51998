"""What is measured: the shapes of groups that context parallelism uses, and the sizes of messages.

With 4 ranks, two on each host::

    ulysses_degree   all-to-all among      gather among          swap among
    4                0 1 2 3
    2                0 1 | 2 3             0 2 | 1 3             0 2 | 1 3
    1                                      0 1 2 3               0 3 | 1 2

All groups of a shape are busy at once, as they are in a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from hp_mesh.checks import divisors
from hp_tune.clusters.collective_times import Kind

__all__ = ["Shape", "cp_shapes", "groups_of", "message_sizes"]


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """Groups of ``size`` ranks, ``stride`` apart, that run one kind of collective."""

    kind: Kind
    size: int
    stride: int


def cp_shapes(world_size: int, nproc_per_node: int) -> list[Shape]:
    """Return the shapes that any configuration of ``world_size`` CP ranks uses, and the tiers'.

    A tier is measured with all ranks of a host, and with one rank of each host.
    """
    found: set[Shape] = set()
    across = (world_size // nproc_per_node, nproc_per_node)
    for size in divisors(world_size):
        stride = world_size // size
        if size > 1:
            found |= {Shape("all_to_all", size, 1)}
            found |= {Shape(kind, size, stride) for kind in ("all_gather", "reduce_scatter", "p2p")}
    for size, stride in ((nproc_per_node, 1), across):
        if size > 1:
            found |= {
                Shape(kind, size, stride) for kind in ("all_to_all", "all_gather", "reduce_scatter")
            }
    return sorted(found)


def groups_of(shape: Shape, world_size: int) -> list[list[int]]:
    """Return the ranks of every group of a shape; each rank is in one."""
    block = shape.size * shape.stride
    return [
        list(range(first + offset, first + offset + block, shape.stride))
        for first in range(0, world_size, block)
        for offset in range(shape.stride)
    ]


def message_sizes(smallest: int, largest: int) -> list[int]:
    """Return sizes in bytes from ``smallest`` to ``largest``, each four times the one before."""
    sizes = [smallest]
    while sizes[-1] * 4 < largest:
        sizes.append(sizes[-1] * 4)
    return sizes if sizes[-1] == largest else [*sizes, largest]
