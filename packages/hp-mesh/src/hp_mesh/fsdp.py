"""Whether FSDP was given the mesh that context parallelism needs.

Ranks that share a sequence hold different tokens, so FSDP has to shard and reduce over them as over
data parallel ranks: over ``dp_shard`` and ``cp``, flattened into one axis. Two other meshes train
without an error, here for ``dp_shard`` 2 and ``cp`` 2:

=====================================  =====================  ====================================
mesh of `fully_shard`                  a rank holds           gradients are the mean over
=====================================  =====================  ====================================
``mesh["dp_shard", "cp"].flatten()``   1/4                    4 ranks
``mesh["dp_shard", "cp"]``             1/2: replicate, shard  4 ranks
``mesh["dp_shard"]``                   1/2                    2 ranks, so that CP ranks drift apart
=====================================  =====================  ====================================
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from hp_mesh._torch import ManagedParameter, fsdp_parameters
from hp_mesh.boundary import boundary_of
from hp_mesh.checks import fail, nearest, require

__all__ = ["check_fsdp_mesh"]

WHERE = "check_fsdp_mesh"


def check_fsdp_mesh(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    axes: Sequence[str] = ("dp_shard", "cp"),
    ignored_params: Collection[nn.Parameter] = (),
) -> None:
    """Raise unless FSDP shards and reduces ``model`` over data and context ranks together.

    Reads what `fully_shard` and the CP styles keep; nothing is sent and nothing changed. Call it on
    every rank after `fully_shard`, before or after any step; with pipelines, for each stage.

    Args:
        model: The module that `fully_shard` was applied to, or one around it.
        mesh: The mesh of the job, or a part of it that has ``axes``.
        axes: Axes whose ranks hold different tokens, and over which parameters are to be sharded.
            Other axes may replicate (HSDP) or shard (TP) as well.
        ignored_params: What FSDP is meant to leave out, as in `fully_shard`; you reduce it.

    Raises:
        ValueError: The mesh of FSDP leaves out an axis, or replicates over it; a parameter that
            needs a gradient is not managed by FSDP; a CP style works on ranks beyond ``axes``. The
            same message on every rank that has this model.
    """
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    _check_axes(mesh, axes)
    _check_styles(model, mesh, axes)
    managed = _check_coverage(model, ignored_params)
    along = {axis: _ranks_along(mesh, (axis,)) for axis in axes}

    def missing(ranks: frozenset[int]) -> list[str]:
        return [axis for axis in axes if not along[axis] <= ranks]

    apart = [(p, missing(p.reached)) for p in managed]
    _refuse([(p, left) for p, left in apart if left], mesh, axes, replicates=False)
    whole = [(p, missing(p.sharded)) for p in managed if p.sharded is not None]
    _refuse([(p, left) for p, left in whole if left], mesh, axes, replicates=True)


@dataclass(frozen=True)
class _Parameter:
    """A managed parameter, seen from this rank.

    Attributes:
        name: Its path in the model.
        given: Names, or else the shape, of FSDP's mesh.
        reached: Ranks over which its gradient is reduced, or which hold other parts of it.
        sharded: Ranks that hold different parts; None if FSDP shards nothing (`replicate`).
    """

    name: str
    given: tuple[object, ...]
    reached: frozenset[int]
    sharded: frozenset[int] | None


def _read(name: str, parameter: ManagedParameter) -> _Parameter:
    mesh = parameter.shard.device_mesh
    data_ranks = frozenset(parameter.mesh.mesh.flatten().tolist())
    each = range(mesh.ndim)
    ours = [_ranks(mesh, [i == axis for i in each]) <= data_ranks for axis in each]
    cut = [_is_cut(placement) for placement in parameter.shard.placements]
    is_sharded = any(a and b for a, b in zip(ours, cut, strict=True))
    return _Parameter(
        name,
        tuple(parameter.mesh.mesh_dim_names or parameter.mesh.shape),
        _ranks(mesh, [a or b for a, b in zip(ours, cut, strict=True)]),
        _ranks(mesh, cut) if is_sharded else None,
    )


def _is_cut(placement: Placement) -> bool:
    """Whether ranks along the axis hold different parts, strided shards among them."""
    return not placement.is_replicate() and not placement.is_partial()


def _ranks(mesh: DeviceMesh, along: Sequence[bool]) -> frozenset[int]:
    """Return the ranks that differ from this one on the chosen axes of ``mesh`` only."""
    here = mesh.get_coordinate()
    if here is None:
        raise fail(WHERE, f"this rank ({mesh.get_rank()}) must be in the mesh {mesh.mesh.tolist()}")
    index = [slice(None) if free else at for free, at in zip(along, here, strict=True)]
    return frozenset(mesh.mesh[tuple(index)].flatten().tolist())


def _ranks_along(mesh: DeviceMesh, axes: Sequence[str]) -> frozenset[int]:
    return _ranks(mesh, [name in axes for name in mesh.mesh_dim_names or ()])


def _check_axes(mesh: DeviceMesh, axes: tuple[str, ...]) -> None:
    known = mesh.mesh_dim_names or ()
    for axis in axes:
        close = nearest(axis, known)
        require(
            axis in known,
            WHERE,
            f"axis {axis!r} must be one of the mesh's {tuple(known)}",
            f"did you mean {close!r}?" if close else "name the axes of your mesh with axes=(...)",
        )


def _check_styles(model: nn.Module, mesh: DeviceMesh, axes: tuple[str, ...]) -> None:
    """Refuse axes that are not those of the model's CP styles."""
    ranks = _ranks_along(mesh, axes)
    for path, module in model.named_modules():
        boundary = boundary_of(module)
        if boundary is None:
            continue
        names = tuple(boundary.mesh.mesh_dim_names or boundary.mesh.shape)
        require(
            frozenset(boundary.mesh.mesh.flatten().tolist()) <= ranks,
            WHERE,
            f"axes {axes} must contain those of {boundary.where} on {path or 'the model'} {names}, "
            "whose ranks hold different tokens",
            f"for example axes={(*axes, *(n for n in names if n not in axes))}",
        )


def _check_coverage(model: nn.Module, ignored: Collection[nn.Parameter]) -> list[_Parameter]:
    """Return FSDP's parameters by path; refuse one that needs a gradient and is not among them."""
    managed = fsdp_parameters(model)
    by_place = {(id(module), name): p for p in managed for module, name in p.places}
    skipped = {id(parameter) for parameter in ignored}
    found: list[_Parameter] = []
    left: dict[int, str] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            entry = by_place.get((id(module), name))
            if entry is None:
                if parameter.requires_grad and id(parameter) not in skipped:
                    left.setdefault(id(parameter), full)
            elif id(entry) not in seen:
                seen.add(id(entry))
                found.append(_read(full, entry))
    require(
        not left,
        WHERE,
        f"{_first_of(list(left.values()))} must be managed by FSDP: a rank has the gradient of its "
        "own tokens only",
        "apply fully_shard to the whole model, too; or reduce the gradient over the ranks of "
        "mesh[axes] yourself and say so with ignored_params={...}",
    )
    return found


def _refuse(
    faults: Sequence[tuple[_Parameter, list[str]]],
    mesh: DeviceMesh,
    axes: tuple[str, ...],
    *,
    replicates: bool,
) -> None:
    """Raise for the first of ``faults``, parameters with the axes that FSDP does not cover."""
    if not faults:
        return
    parameter, missing = faults[0]
    named = _first_of([p.name for p, _ in faults])
    size = len(_ranks_along(mesh, axes))
    lacking = " and ".join(repr(axis) for axis in missing)
    flat = f"mesh[{', '.join(repr(axis) for axis in axes)}].flatten(mesh_dim_name='fsdp')"
    if replicates:
        raise fail(
            WHERE,
            f"fully_shard's mesh {parameter.given} must shard over {lacking}, and replicates "
            f"there: a rank holds 1/{len(parameter.sharded or ())} of {named}, not 1/{size}",
            f"flatten the axes into one, fully_shard(model, mesh={flat}), or leave those that are "
            "to be replicated out of axes=(...)",
        )
    raise fail(
        WHERE,
        f"fully_shard's mesh {parameter.given} must contain {lacking}: the gradient of {named} is "
        f"reduced over {len(parameter.reached)} of {size} ranks, and the copies drift apart",
        f"fully_shard(model, mesh={flat})",
    )


def _first_of(names: Sequence[str]) -> str:
    return f"{names[0]} (and {len(names) - 1} more)" if len(names) > 1 else "".join(names)
