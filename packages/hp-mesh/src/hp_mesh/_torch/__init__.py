"""The only folder of this package that touches torch's private names: a file for each subject.

Written for torch 2.13; each entry says what it stands for, so that a newer torch is one look here.
The ranks of `hp_mesh.testing` have a door of their own.
"""

from __future__ import annotations

from hp_mesh._torch.autograd import (
    allows_saved_tensor_hooks,
    at_end_of_backward,
    backward_id,
    in_backward,
    is_transformed,
    keeps_graph,
    push_saved_tensor_hooks,
    remove_saved_tensor_hooks,
    top_saved_tensor_hooks,
)
from hp_mesh._torch.checkpoints import checkpoint_codes, hidden_from_selective_checkpoint
from hp_mesh._torch.dtensors import (
    count_write,
    dtensor_of,
    lies_elsewhere,
    local_shard,
    redistribute,
    spec_of,
    tie_views,
    without_communication,
    wrap_detached,
)
from hp_mesh._torch.functions import (
    function_body,
    function_mode_stack,
    push_function_mode,
    remove_function_modes,
    without_innermost_mode,
    without_overrides,
)
from hp_mesh._torch.gradients import from_local, patch_dtensor_exits, to_local
from hp_mesh._torch.meshes import (
    concatenate_meshes,
    current_mesh,
    flatten_axes,
    flattened_meshes,
    mesh_cache,
    mesh_key,
    mesh_replicas,
    rename_axes,
    root_mesh,
    split_axis,
)
from hp_mesh._torch.modules import ManagedParameter, fsdp_parameters, global_forward_hooks
from hp_mesh._torch.storages import WeakStorage
from hp_mesh._torch.tracing import hold_tracing, never_traced, resume_tracing

__all__ = [
    "ManagedParameter",
    "WeakStorage",
    "allows_saved_tensor_hooks",
    "at_end_of_backward",
    "backward_id",
    "checkpoint_codes",
    "concatenate_meshes",
    "count_write",
    "current_mesh",
    "dtensor_of",
    "flatten_axes",
    "flattened_meshes",
    "from_local",
    "fsdp_parameters",
    "function_body",
    "function_mode_stack",
    "global_forward_hooks",
    "hidden_from_selective_checkpoint",
    "hold_tracing",
    "in_backward",
    "is_transformed",
    "keeps_graph",
    "lies_elsewhere",
    "local_shard",
    "mesh_cache",
    "mesh_key",
    "mesh_replicas",
    "never_traced",
    "patch_dtensor_exits",
    "push_function_mode",
    "push_saved_tensor_hooks",
    "redistribute",
    "remove_function_modes",
    "remove_saved_tensor_hooks",
    "rename_axes",
    "resume_tracing",
    "root_mesh",
    "spec_of",
    "split_axis",
    "tie_views",
    "to_local",
    "top_saved_tensor_hooks",
    "without_communication",
    "without_innermost_mode",
    "without_overrides",
    "wrap_detached",
]
