"""Device meshes: torch's, with our checks and the two derived meshes that CP needs.

Whatever makes process groups here is a collective of the whole job: every rank calls it, in the
same order, also ranks outside the mesh. Derived meshes are kept by the root mesh, so that asking
again makes no new groups.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from hp_mesh._torch import (
    flatten_axes,
    flattened_meshes,
    mesh_cache,
    mesh_key,
    mesh_replicas,
    rename_axes,
    root_mesh,
    split_axis,
)
from hp_mesh.checks import fail, nearest, require, require_divisible, require_positive
from hp_mesh.exiting import wait_for_gloo_at_exit

__all__ = ["Mesh", "flatten_mesh", "init_device_mesh", "split_cp_mesh"]

DEVICE_TYPES = ("cpu", "cuda", "npu")
OTHER_AXES = ("dp", "fsdp", "tp", "pp", "ep")
"""First words of names of axes whose ranks do not share a sequence, such as `dp_shard`."""
CP_AXES = ("co", "ds")
"""Axes of a split CP mesh: Colossal (K/V gather) outside, Ulysses (heads) inside."""


class Mesh(DeviceMesh):
    """A `DeviceMesh` whose slices can be flattened by name, as the guide writes it.

    It is a torch mesh in every other way, and goes wherever one goes (DTensor, FSDP2, TP).

    Example::

        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_shard", "cp", "tp"))
        fully_shard(model, mesh=mesh[("dp_shard", "cp")].flatten(mesh_dim_name="fsdp"))
    """

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> Mesh:
        """Return the sub-mesh of one axis or of several in this mesh's order."""
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        own = self.mesh_dim_names
        if own is None:
            raise fail("Mesh", "a mesh without mesh_dim_names can't be sliced by name", "name it")
        flat = flattened_meshes(self) if root_mesh(self) is self else {}
        if len(names) == 1 and names[0] in flat:
            return _adopt(flat[names[0]])
        known = [*own, *flat]
        for name in names:
            if name not in known:
                close = nearest(name, known)
                hint = f"; did you mean {close!r}?" if close else ""
                raise fail("Mesh", f"axis {name!r} must be one of {known}{hint}")
        places = [own.index(name) for name in names if name in own]
        require(
            places == sorted(set(places)),
            "Mesh",
            f"axes {names} must each be named once and in the order of the mesh {own}",
            f"use {tuple(own[place] for place in sorted(set(places)))}",
        )
        return _adopt(super().__getitem__(names))

    def flatten(self, mesh_dim_name: str | None = None) -> Mesh:
        """Return the 1-D mesh of all ranks of this mesh; see `flatten_mesh`."""
        return _adopt(flatten_mesh(self, mesh_dim_name))

    @property
    def rank_list(self) -> tuple[int, ...]:
        """The global ranks of this mesh in its order, the last axis varying fastest."""
        return tuple(self.mesh.flatten().tolist())

    @property
    def root_mesh(self) -> DeviceMesh:
        """The mesh that this one was cut from; itself if it was made by `init_device_mesh`."""
        return root_mesh(self)


def _adopt(mesh: DeviceMesh) -> Mesh:
    """Make a mesh that torch just built (or keeps for us) one of ours, in place."""
    if not isinstance(mesh, Mesh):
        mesh.__class__ = Mesh
    assert isinstance(mesh, Mesh), "the class was just set"
    return mesh


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: dict[int | str, Any] | None = None,
) -> Mesh:
    """Make a mesh over all ranks of the job, in rank order.

    Args:
        device_type: ``"cpu"``, ``"cuda"`` or ``"npu"``, without an index. For ``"npu"`` torch_npu
            is imported; it registers the device with torch.
        mesh_shape: Number of ranks on each axis; their product is the world size.
        mesh_dim_names: One name per axis, such as ``("dp_shard", "cp", "tp")``.
        backend_override: As in torch: backend or options by axis.

    Raises:
        ValueError: An argument is wrong; the same on every rank, before any group is made.
        ImportError: ``"npu"`` without torch_npu.
        RuntimeError: ``"cuda"`` without a GPU, or with a torch that knows none.
    """
    where = "init_device_mesh"
    if device_type not in DEVICE_TYPES:
        raise fail(
            where,
            f"device_type ({device_type!r}) must be one of {', '.join(DEVICE_TYPES)}",
            "the index of the device is chosen by set_device" if ":" in str(device_type) else "",
        )
    require(
        not isinstance(mesh_shape, int),
        where,
        f"mesh_shape ({mesh_shape!r}) must be a tuple of sizes",
        f"use ({mesh_shape!r},)",
    )
    shape = tuple(mesh_shape)
    require(len(shape) > 0, where, "mesh_shape () must have at least one axis")
    for axis, size in enumerate(shape):
        require_positive(where, f"mesh_shape[{axis}]", size)
    names = None if mesh_dim_names is None else tuple(mesh_dim_names)
    if names is not None:
        require(
            not isinstance(mesh_dim_names, str),
            where,
            f"mesh_dim_names ({mesh_dim_names!r}) must be a tuple of names",
            f"use ({mesh_dim_names!r},)",
        )
        require(
            len(names) == len(shape),
            where,
            f"mesh_dim_names {names} must have one name per axis of mesh_shape {shape}",
        )
        require(
            len(set(names)) == len(names),
            where,
            f"mesh_dim_names {names} must differ from each other",
        )
    if device_type == "npu":
        _require_torch_npu()
    if device_type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            'init_device_mesh: device_type "cuda" needs a CUDA build of torch and a GPU, and '
            f'torch {torch.__version__} finds none; use "cpu" to debug without a GPU'
        )
    wait_for_gloo_at_exit()
    made = device_mesh.init_device_mesh(
        device_type, shape, mesh_dim_names=names, backend_override=backend_override
    )
    return _adopt(made)


def _require_torch_npu() -> None:
    try:
        importlib.import_module("torch_npu")
    except ImportError as error:
        raise ImportError(
            'init_device_mesh: device_type "npu" needs torch_npu and a CANN installation; '
            f"install the extra npu of hp-cp or hp-dsa on the Ascend machine ({error})"
        ) from error


def flatten_mesh(mesh: DeviceMesh, mesh_dim_name: str | None = None) -> DeviceMesh:
    """Return the 1-D mesh of all ranks of ``mesh``, in its order.

    Args:
        mesh: Any mesh, or slice of one. A 1-D mesh is returned as it is unless the name is new.
        mesh_dim_name: Name of the one axis; default: the names joined by ``_``, or ``"flat"``.

    Returns:
        A mesh that is the same object each time. Groups are made by the first call only.

    Raises:
        ValueError: The name is taken, or the ranks don't ascend (groups number their ranks in
            ascending order, so shards and collectives would disagree about who is first).
    """
    names = mesh.mesh_dim_names
    if mesh.ndim == 1 and mesh_dim_name in (None, *(names or ())):
        return mesh
    name = mesh_dim_name or ("_".join(names) if names else "flat")
    cache, key = mesh_cache(mesh), ("flatten", mesh_key(mesh), name)
    if key in cache:
        kept: DeviceMesh = cache[key]
        return kept
    taken = [*(root_mesh(mesh).mesh_dim_names or ()), *flattened_meshes(mesh)]
    require(
        name not in taken,
        "flatten_mesh",
        f"mesh_dim_name ({name!r}) must not be the name of another axis ({', '.join(taken)})",
        "choose another name",
    )
    require_ascending("flatten_mesh", mesh)
    flat = flatten_axes(mesh, name)
    cache[key] = _adopt(flat) if isinstance(root_mesh(mesh), Mesh) else flat
    return flat


def split_cp_mesh(mesh: DeviceMesh, ulysses_degree: int) -> DeviceMesh:
    """Return the CP mesh as two axes: Colossal first, Ulysses second, on adjacent ranks.

    ::

        ranks [10, 11, 12, 13], ulysses_degree=2           ds
                                                  co   [[10, 11],
                                                        [12, 13]]

    Args:
        mesh: The CP mesh: 1-D (``mesh["cp"]``, strided or not), or 2-D with names, which is used as
            it is if its second axis has ``ulysses_degree`` ranks.
        ulysses_degree: Ranks on the second axis.

    Returns:
        ``[co, ds]``; a 1-D mesh gives the names ``("co", "ds")``, a 2-D one keeps its own, so refer
        to the axes by index. The same object each time; groups are made by the first call only.
    """
    where = "split_cp_mesh"
    degree = require_positive(where, "ulysses_degree", ulysses_degree)
    require(
        mesh.ndim in (1, 2),
        where,
        f"the CP mesh (shape {tuple(mesh.shape)}) must have 1 axis, or 2 axes named {CP_AXES}",
        "pass the CP slice of the mesh, such as mesh['cp']",
    )
    if mesh.ndim == 2:
        return _as_split(mesh, degree)
    colossal = require_divisible(where, "cp_size", mesh.size(), "ulysses_degree", degree)
    cache, key = mesh_cache(mesh), ("split", mesh_key(mesh), degree)
    if key not in cache:
        require_ascending(where, mesh)
        named = mesh if mesh.mesh_dim_names else rename_axes(mesh, ("cp",))
        split = split_axis(named, (colossal, degree), CP_AXES)
        cache[key] = _adopt(split) if isinstance(root_mesh(mesh), Mesh) else split
    kept: DeviceMesh = cache[key]
    return kept


def _as_split(mesh: DeviceMesh, degree: int) -> DeviceMesh:
    """Check that a 2-D mesh is what `split_cp_mesh` would have made."""
    where, names, shape = "split_cp_mesh", mesh.mesh_dim_names, tuple(mesh.shape)
    way_out = f"make it with mesh_dim_names={CP_AXES}, or pass a 1-D CP mesh"
    require(
        names is not None,
        where,
        f"a 2-D CP mesh (shape {shape}) must have mesh_dim_names, to tell Colossal from Ulysses",
        way_out,
    )
    require(
        names != CP_AXES[::-1],
        where,
        f"mesh_dim_names {names} must be in the order {CP_AXES}",
        way_out,
    )
    require(
        shape[1] == degree,
        where,
        f"the second axis of the CP mesh (shape {shape}) must be ulysses_degree ({degree})",
        f"use ulysses_degree={shape[1]}, or a mesh of shape ({mesh.size() // degree}, {degree})"
        if mesh.size() % degree == 0
        else f"use ulysses_degree={shape[1]}",
    )
    require_ascending(where, mesh)
    return mesh


def require_ascending(where: str, mesh: DeviceMesh) -> None:
    """Refuse orders that groups can't have; looks at every replica, so all ranks raise alike."""
    for replica in mesh_replicas(mesh).flatten(1).tolist():
        require(
            replica == sorted(replica),
            where,
            f"the ranks of the mesh ({replica}) must ascend: a process group numbers its ranks so",
            "order the axes as in the root mesh",
        )


def require_cp_axes(where: str, mesh: DeviceMesh) -> None:
    """Refuse a mesh of several axes, one of which has the name of another kind of parallelism.

    Ranks along ``dp_shard`` or ``tp`` hold no other part of the sequence: taken for CP ranks they
    would attend to each other's batches, and nothing else would tell. Beside an axis ``cp`` any
    other is of that kind. Names are all there is to see, so ``("outer", "inner")`` passes.
    """
    names = mesh.mesh_dim_names or ()
    others = [
        name
        for name in names
        if name.split("_")[0] in OTHER_AXES or ("cp" in names and name != "cp")
    ]
    if mesh.ndim > 1 and others:
        own = [name for name in names if name not in others]
        raise fail(
            where,
            f"the CP mesh (axes {names}) must hold the ranks of one sequence only, and those along "
            f"{others[0]!r} hold others",
            f"pass the CP slice of the mesh, mesh[{(*own, 'cp')[0]!r}]",
        )
