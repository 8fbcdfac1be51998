"""What torch and FSDP2 keep about modules in private: hooks of all modules, managed parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

__all__ = ["ManagedParameter", "fsdp_parameters", "global_forward_hooks"]


def global_forward_hooks() -> list[Any]:
    """Return the forward hooks of all modules, which run before a module's own.

    Those of torch itself (flop counters, memory trackers) look on and are left out.
    """
    from torch.nn.modules import module

    hooks = list(module._global_forward_hooks.values())
    return [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("torch.")]


@dataclass(frozen=True)
class ManagedParameter:
    """A parameter that `fully_shard` manages.

    Attributes:
        places: The modules that hold it, each with its name there; several if it is shared.
        shard: This rank's shard.
        mesh: The mesh of data parallelism, as `fully_shard` was given it.
    """

    places: tuple[tuple[nn.Module, str], ...]
    shard: DTensor
    mesh: DeviceMesh


def fsdp_parameters(model: nn.Module) -> list[ManagedParameter]:
    """Return the parameters under ``model`` that `fully_shard` manages.

    From FSDP's state and not from ``model.parameters()``: between forward and backward those may be
    the unsharded ones.
    """
    from torch.distributed.fsdp import FSDPModule

    groups = [
        group
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    ]
    found = []
    for managed in (parameter for group in groups for parameter in group.fsdp_params):
        held: Any = managed._module_info
        shared = zip(held.shared_modules, held.shared_param_names, strict=True)
        places = ((held.module, held.param_name), *shared)
        shard: Any = managed.sharded_param
        found.append(ManagedParameter(places, shard, managed.mesh_info.mesh))
    return found
