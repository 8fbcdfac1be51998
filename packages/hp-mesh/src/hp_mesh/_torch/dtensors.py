"""DTensors from the inside: local tensors, specs, moves axis by axis, and writes in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

__all__ = [
    "count_write",
    "dtensor_of",
    "lies_elsewhere",
    "local_shard",
    "redistribute",
    "shard_offset",
    "spec_of",
    "tie_views",
    "without_communication",
    "wrap_detached",
]


def local_shard(tensor: DTensor) -> Tensor:
    """Return the local tensor of a DTensor, outside autograd."""
    local: Tensor = tensor._local_tensor
    return local


def wrap_detached(
    local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], requires_grad: bool
) -> DTensor:
    """Build a DTensor around ``local`` outside autograd: for use inside an autograd function."""
    if torch.compiler.is_compiling():
        spec = _spec(local, mesh, placements)
    else:
        specs: _Specs = mesh.__dict__.setdefault("_hp_specs", _Specs())
        key = (placements, local.shape, local.stride(), local.dtype)
        spec = specs.get(key)
        if spec is None:
            if len(specs) >= 256:  # lengths that keep changing must not pile up
                specs.clear()
            spec = specs[key] = _spec(local, mesh, placements)
    # not DTensor(...): its __init__ does nothing, behind a wrapper that costs more than the rest
    wrapped: DTensor = DTensor.__new__(DTensor, local, spec, requires_grad=requires_grad)
    return wrapped


class _Specs(dict[object, Any]):
    """Specs of one mesh, kept on the mesh because they hold it; not a part of its checkpoints."""

    def __reduce__(self) -> tuple[type[dict[object, Any]], tuple[()]]:
        return dict, ()


def _spec(local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Any:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._utils import compute_global_tensor_info

    shape, stride = compute_global_tensor_info(local, mesh, placements)
    meta = TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    return DTensorSpec(mesh, placements, tensor_meta=meta)


def shard_offset(
    shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and global offset of this rank's shard of a tensor of global ``shape``."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local_shape, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(local_shape), tuple(offset)


def redistribute(tensor: DTensor, target: Sequence[Placement]) -> DTensor:
    """Redistribute axis by axis, shards undone from the right.

    Several axes at once make DTensor (2.13) flatten them by slicing the mesh by name, which fails
    where their order is not that of the root mesh (TP stands left of CP inside the boundary).
    """
    present = list(tensor.placements)
    axes = [axis for axis, want in enumerate(target) if present[axis] != want]
    shards = [axis for axis in axes if isinstance(present[axis], Shard)]
    for axis in (*reversed(shards), *(axis for axis in axes if axis not in shards)):
        present[axis] = target[axis]
        tensor = tensor.redistribute(tensor.device_mesh, present)
    return tensor


def without_communication() -> AbstractContextManager[Any]:
    """Return a context in which DTensor raises instead of moving data between ranks by itself."""
    from torch.distributed.tensor._utils import ExplicitRedistributionContext

    return ExplicitRedistributionContext()


def lies_elsewhere(tensor: DTensor) -> bool:
    """Whether ``tensor`` should be a view but holds data of its own, so that writes are lost."""
    base = tensor._base
    if not isinstance(base, DTensor):
        return False
    mine, its = tensor._local_tensor, base._local_tensor
    return mine.untyped_storage().data_ptr() != its.untyped_storage().data_ptr()


def count_write(tensor: DTensor) -> None:
    """Tell autograd that ``tensor`` was written in place.

    DTensor (2.13) counts the write of the wrapper, not of the local tensor, which a kernel may have
    saved: its gradients would be wrong without a word.
    """
    if not tensor._local_tensor.is_inference():
        torch.autograd.graph.increment_version(tensor._local_tensor)


def tie_views(results: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    """Let what shows data of a source share its version counter, as views of plain tensors do.

    DTensor (2.13) runs an op below the dispatch key that ties a view to what it shows: what is
    written to the data later is not counted where a kernel saved the local tensor of the view, and
    gradients would be computed from it without a word.
    """
    held = [x._local_tensor for x in sources if isinstance(x, DTensor)]
    for result in results:
        if not isinstance(result, DTensor):
            continue
        local = result._local_tensor
        for source in held:
            if source is local:
                break
            if (
                source.untyped_storage()._cdata == local.untyped_storage()._cdata
                and source.dtype == local.dtype
                and type(source) is type(local) is Tensor
                and not (source.is_conj() or local.is_conj() or source.is_neg() or local.is_neg())
            ):
                with torch.no_grad():
                    result._local_tensor = source.as_strided(
                        local.size(), local.stride(), local.storage_offset()
                    )
                break


def spec_of(tensor: DTensor) -> Any:
    """Return what a DTensor is, all but its data."""
    return tensor._spec


def dtensor_of(local: Tensor, spec: Any) -> DTensor:
    """Return the DTensor of ``spec`` with other data, outside autograd."""
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
