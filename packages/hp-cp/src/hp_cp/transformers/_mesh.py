"""Which ranks share the sequence of a model: asked of its core attention modules.

`ContextParallel` records the mesh it was applied on; the model hook reads it from there, so that
`add_core_attention` needs no mesh and every layer can have a style of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hp_cp.transformers.core import CoreAttention
from hp_mesh.boundary import boundary_of
from hp_mesh.checks import require
from hp_mesh.mesh import flatten_mesh

__all__ = ["CpRanks", "cores", "cp_ranks"]


@dataclass(frozen=True)
class CpRanks:
    """The context-parallel ranks of a model, in sequence order."""

    group: ProcessGroup
    rank: int
    size: int


def cores(model: nn.Module) -> dict[str, CoreAttention]:
    """Return the core attention modules of ``model`` by their names in it."""
    return {name: m for name, m in model.named_modules() if isinstance(m, CoreAttention)}


def cp_ranks(found: dict[str, CoreAttention], *, where: str) -> CpRanks | None:
    """Return the ranks that share the sequence, or None if no core is context parallel.

    A layer left without a style would attend within its shard only, so all layers must have one,
    and all on the same ranks (their modes may differ).
    """
    boundaries = {name: boundary_of(core) for name, core in found.items()}
    applied = {name: b.mesh for name, b in boundaries.items() if b is not None}
    if not applied:
        return None
    bare = sorted(set(boundaries) - set(applied))
    require(
        not bare,
        where,
        f"{len(bare)} of {len(found)} core_attention modules have no context-parallel style "
        f"({', '.join(bare[:3])}{', ...' if len(bare) > 3 else ''}) and every one must",
        "let the plan of parallelize_module match all layers",
    )
    meshes_by_ranks = {tuple(mesh.mesh.flatten().tolist()): mesh for mesh in applied.values()}
    require(
        len(meshes_by_ranks) == 1,
        where,
        f"the layers use different context-parallel ranks ({sorted(meshes_by_ranks)}) and must "
        "share one sequence",
        "apply all styles on one mesh",
    )
    mesh = next(iter(meshes_by_ranks.values()))
    return _ranks(mesh)


def _ranks(mesh: DeviceMesh) -> CpRanks:
    line = mesh if mesh.ndim == 1 else flatten_mesh(mesh)
    return CpRanks(line.get_group(), line.get_local_rank(), line.size())
