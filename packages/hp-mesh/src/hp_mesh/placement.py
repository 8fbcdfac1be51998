"""Where a tensor lies: its own layout (TP, ...) with the CP axes put on, and taken off again.

Nothing here moves data. A tensor that enters the boundary is split into its local shard and a
`TensorLayout`; the layout composes the placements inside the boundary and restores them outside.

Inside, axes that are not CP stand *left* of the CP axes, whatever their order in the root mesh::

    TP=2 x CP=2, Ulysses, H=8      (tp, cp) with (Shard(2), Shard(2)):  tp t, cp c holds heads
                                    [4t + 2c, 4t + 2c + 2)

The heads a TP rank owns are cut further by CP, so this order needs no strided shard, which
DTensor's view rules (2.13) refuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from hp_mesh._torch import concatenate_meshes, from_local
from hp_mesh.checks import fail, require

__all__ = ["TensorLayout", "compose", "normalize_dim", "read_layout"]


def normalize_dim(dim: int, ndim: int, name: str, where: str) -> int:
    """Return ``dim`` counted from the front, or say that the tensor has no such dim."""
    require(
        -ndim <= dim < ndim,
        where,
        f"{name} ({dim}) must be a dim of a tensor with {ndim} dims",
        f"choose {name} in [{-ndim}, {ndim - 1}]",
    )
    return dim % ndim


@dataclass(frozen=True)
class TensorLayout:
    """The layout that a tensor had outside the boundary.

    Attributes:
        mesh: Mesh of the DTensor that came in; None for a plain tensor.
        placements: Its placements on that mesh.
        cp_axes: Axes of ``mesh`` that belong to context parallelism.
    """

    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()
    cp_axes: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether a plain tensor came in."""
        return self.mesh is None

    @property
    def foreign_axes(self) -> tuple[int, ...]:
        """Axes of ``mesh`` that are not CP: tensor parallel and the like."""
        return tuple(a for a in range(len(self.placements)) if a not in self.cp_axes)

    @property
    def foreign_placements(self) -> tuple[Placement, ...]:
        """Placements on the axes that are not CP."""
        return tuple(self.placements[a] for a in self.foreign_axes)

    @property
    def is_whole(self) -> bool:
        """Whether every CP rank came with the whole sequence."""
        return bool(self.cp_axes) and all(self.placements[a].is_replicate() for a in self.cp_axes)

    def foreign_mesh(self) -> DeviceMesh | None:
        """Return the mesh of the axes that are not CP, or None if there are none."""
        if self.mesh is None or not self.foreign_axes:
            return None
        if not self.cp_axes:
            return self.mesh
        names = self.mesh.mesh_dim_names
        assert names is not None, "an axis is matched with CP only on a named mesh"
        return self.mesh[tuple(names[a] for a in self.foreign_axes)]

    def foreign_size(self, dim: int) -> int:
        """Return the number of parts that the axes other than CP cut tensor dim ``dim`` into."""
        size = 1
        for axis in self.foreign_axes:
            if self.placements[axis].is_shard(dim):
                assert self.mesh is not None, "a plain tensor has no axes"
                size *= self.mesh.size(axis)
        return size

    def restore(self, local: Tensor, seq_dim: int, foreign: Sequence[Placement]) -> Tensor:
        """Wrap ``local`` as the tensor that leaves the boundary, laid out as the one that came in.

        Args:
            local: This rank's shard, sequence sharded along ``seq_dim``.
            seq_dim: Sequence dim of ``local``, counted from the front.
            foreign: Placements of the output on the axes that are not CP.
        """
        if self.mesh is None:
            return local
        placements: list[Placement] = [Shard(seq_dim)] * len(self.placements)
        for axis, placement in zip(self.foreign_axes, foreign, strict=True):
            placements[axis] = placement
        return from_local(local, self.mesh, placements)


def _axis_ranks(mesh: DeviceMesh, axis: int) -> frozenset[int]:
    """Return the global ranks that share this rank's position on every axis but ``axis``."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "the boundary runs on ranks of its mesh only"
    index = tuple(slice(None) if a == axis else c for a, c in enumerate(coordinate))
    ranks: list[int] = mesh.mesh[index].tolist()
    return frozenset(ranks)


def read_layout(
    tensor: Tensor,
    cp_mesh: DeviceMesh,
    seq_dim: int,
    name: str,
    where: str,
    *,
    may_be_whole: bool = False,
) -> tuple[Tensor, TensorLayout]:
    """Split ``tensor`` into its local shard and the layout it came with.

    Args:
        tensor: Plain local shard, CP DTensor (``Shard(seq_dim)`` on the CP axis), DTensor on other
            axes (TP), or DTensor on both.
        cp_mesh: The CP mesh, 1-D or ``("co", "ds")``.
        seq_dim: Sequence dim, counted from the front.
        name: Name of the argument, for the message.
        where: Name of the style, for the message.
        may_be_whole: Whether it may be ``Replicate()`` on all CP axes instead. The gradient of such
            a tensor is a sum that is pending there (``Partial()``).

    Raises:
        ValueError: If the tensor is not sharded along ``seq_dim`` on a CP axis, or is sharded along
            it on another axis.
    """
    if not isinstance(tensor, DTensor):
        return tensor, TensorLayout()
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    cp_ranks = frozenset(cp_mesh.mesh.flatten().tolist())
    cp_axes = tuple(
        axis
        for axis in range(mesh.ndim)
        if mesh.size(axis) > 1 and _axis_ranks(mesh, axis) <= cp_ranks
    )
    if not cp_axes and mesh == cp_mesh:  # a CP mesh of one rank
        cp_axes = tuple(range(mesh.ndim))
    covered = 1
    is_whole = may_be_whole and TensorLayout(mesh, placements, cp_axes).is_whole
    for axis in cp_axes:
        covered *= mesh.size(axis)
        require(
            is_whole or placements[axis].is_shard(seq_dim),
            where,
            f"{name} with placements {placements} on axes {mesh.mesh_dim_names} must be "
            f"Shard({seq_dim}) on the CP axis, the sequence dim",
            f"redistribute it to Shard({seq_dim}), or pass the local shard as a plain tensor",
        )
    require(
        not cp_axes or covered == cp_mesh.size(),
        where,
        f"{name} lies on {covered} of the {cp_mesh.size()} CP ranks; a DTensor must name all CP "
        "axes or none",
        "use one mesh for both",
    )
    layout = TensorLayout(mesh, placements, cp_axes)
    for axis in layout.foreign_axes:
        placement = placements[axis]
        require(
            not placement.is_partial() and not placement.is_shard(seq_dim),
            where,
            f"{name} has placement {placement} on axis {axis} ({mesh.mesh_dim_names}), which is "
            f"not CP; it must be Replicate() or a shard of a dim other than the sequence "
            f"({seq_dim})",
            "redistribute it on that axis first",
        )
    if is_whole:
        pending = [Partial() if a in cp_axes else p for a, p in enumerate(placements)]
        return tensor.to_local(grad_placements=pending), layout
    return tensor.to_local(), layout


def compose(
    layout: TensorLayout, cp_mesh: DeviceMesh, cp_placements: Sequence[Placement], where: str
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return mesh and placements inside the boundary: the tensor's own axes, then the CP axes."""
    foreign = layout.foreign_mesh()
    if foreign is None:
        return cp_mesh, tuple(cp_placements)
    try:
        mesh = concatenate_meshes(foreign, cp_mesh)
    except RuntimeError as error:
        raise fail(
            where,
            f"the mesh of the tensor ({foreign}) and the CP mesh ({cp_mesh}) must be slices of one "
            f"root mesh ({error})",
            'build one mesh, for example ("cp", "tp"), and slice both from it',
        ) from error
    return mesh, (*layout.foreign_placements, *cp_placements)
