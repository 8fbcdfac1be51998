"""Axes of a DeviceMesh: the mesh they come from, the same ranks under other names and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "concatenate_meshes",
    "current_mesh",
    "flatten_axes",
    "flattened_meshes",
    "mesh_cache",
    "mesh_key",
    "mesh_replicas",
    "rename_axes",
    "root_mesh",
    "split_axis",
]


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that ``mesh`` was sliced, flattened or split from; itself if it was made."""
    root: DeviceMesh = mesh._get_root_mesh()
    return root


def mesh_key(mesh: DeviceMesh) -> tuple[object, ...]:
    """Return what tells apart the meshes derived from one root: two equal slices have one key."""
    return (mesh._layout, mesh.mesh_dim_names)


def mesh_cache(mesh: DeviceMesh) -> dict[object, Any]:
    """Return a dict that lives as long as the root of ``mesh``, for meshes derived from it.

    Slices are made anew by every ``mesh["cp"]``, and equal meshes may have other groups (or ended
    ones), so neither the object nor its value can be the key of a cache.
    """
    cache: dict[object, Any] = root_mesh(mesh).__dict__.setdefault("_hp_mesh_cache", {})
    return cache


def mesh_replicas(mesh: DeviceMesh) -> Tensor:
    """Return the ranks of ``mesh`` and of its sisters in the root mesh, ``[replicas, *shape]``."""
    ranks: Tensor = mesh._layout.remap_to_tensor(mesh._rank_map)
    return ranks


def flattened_meshes(mesh: DeviceMesh) -> dict[str, DeviceMesh]:
    """Return the 1-D meshes that were flattened from the root of ``mesh``, by name."""
    return dict(root_mesh(mesh)._flatten_mapping)


def rename_axes(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """Return the same mesh with the same groups under other axis names."""
    renamed = DeviceMesh(
        mesh.device_type,
        _layout=mesh._layout,
        _rank_map=mesh._rank_map,
        mesh_dim_names=tuple(names),
        _root_mesh=root_mesh(mesh),
        _init_backend=False,
    )
    renamed._dim_group_names = list(mesh._dim_group_names)
    return renamed


def flatten_axes(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return a new 1-D mesh of all ranks of ``mesh``, known to its root under ``name``.

    What `DeviceMesh._flatten` does, for meshes without names too. A collective: groups are made for
    every sister of ``mesh`` in the root mesh, in one order.
    """
    root = root_mesh(mesh)
    flat = DeviceMesh(
        mesh.device_type,
        _layout=type(mesh._layout)([mesh._layout.collapse()]),
        _rank_map=mesh._rank_map,
        mesh_dim_names=(name,),
        _root_mesh=root,
    )
    root._flatten_mapping[name] = flat
    return flat


def split_axis(mesh: DeviceMesh, sizes: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """Cut the one axis of a named 1-D mesh into several, the last varying fastest.

    A collective: groups are made for every sister of ``mesh`` in the root mesh, in one order.
    """
    split: DeviceMesh = mesh._unflatten(0, tuple(sizes), tuple(names))
    return split


def concatenate_meshes(left: DeviceMesh, right: DeviceMesh) -> DeviceMesh:
    """Return the mesh with the axes of ``left``, then those of ``right``; makes no new groups.

    Kept on ``right``, so that a mesh of another thread's rank or of an earlier process group is
    never handed out.
    """
    known: dict[DeviceMesh, DeviceMesh] = right.__dict__.setdefault("_hp_concatenated", {})
    if left not in known:
        known[left] = DeviceMesh._concatenate([left, right])
    return known[left]


def current_mesh() -> DeviceMesh:
    """Return the mesh of the innermost ``with mesh:`` block; RuntimeError if there is none."""
    from torch.distributed.device_mesh import _mesh_resources

    mesh: DeviceMesh = _mesh_resources.get_current_mesh()
    return mesh
