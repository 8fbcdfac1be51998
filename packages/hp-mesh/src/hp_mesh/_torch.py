"""The only file of this package that touches torch's private names.

Written for torch 2.13; each entry says what it stands for, so that a newer torch is one look here.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

# -- function modes: torch can only pop the innermost one -----------------------------------------


def function_mode_stack() -> list[TorchFunctionMode]:
    """Return the active function modes of this thread, outermost first."""
    from torch.overrides import _get_current_function_mode_stack

    return list(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def remove_function_modes(unwanted: Callable[[TorchFunctionMode], bool]) -> None:
    """Take the active modes that ``unwanted`` names off this thread's stack, wherever they are."""
    from torch.overrides import _pop_mode, _push_mode

    kept: list[TorchFunctionMode] = []
    stack = function_mode_stack()
    lowest = next((i for i, mode in enumerate(stack) if unwanted(mode)), len(stack))
    for mode in reversed(stack[lowest:]):
        _pop_mode()  # type: ignore[no-untyped-call]
        if not unwanted(mode):
            kept.append(mode)
    for mode in reversed(kept):
        _push_mode(mode)  # type: ignore[no-untyped-call]


def push_function_mode(mode: TorchFunctionMode) -> None:
    """Make ``mode`` the innermost active mode of this thread."""
    from torch.overrides import _push_mode

    _push_mode(mode)  # type: ignore[no-untyped-call]


@contextmanager
def without_innermost_mode(mode: TorchFunctionMode) -> Iterator[bool]:
    """Take ``mode`` off the stack for a while if it is the innermost one; says whether it was."""
    from torch.overrides import _pop_mode, _push_mode

    innermost = torch._C._len_torch_function_stack() - 1
    if innermost < 0 or torch._C._get_function_stack_at(innermost) is not mode:
        yield False
        return
    _pop_mode()  # type: ignore[no-untyped-call]
    try:
        yield True
    finally:
        _push_mode(mode)  # type: ignore[no-untyped-call]


# -- functions of torch that are written in Python ------------------------------------------------

_ASKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@functools.cache
def function_body(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return ``func`` without its question for overrides: the ops in it are seen one by one.

    A mode is switched off while it handles a call: what ``F.multi_head_attention_forward`` calls
    would pass unseen. None for what is not such a function of ``torch.nn.functional``.
    """
    if not isinstance(func, types.FunctionType) or func.__module__ not in (
        "torch.nn.functional",
        "torch.functional",
    ):
        return None
    asked = [name for name in _ASKS if name in func.__code__.co_names]
    if not asked:
        return None
    names = {**func.__globals__, **dict.fromkeys(asked, lambda *_: False)}
    body = types.FunctionType(
        func.__code__, names, func.__name__, func.__defaults__, func.__closure__
    )
    body.__kwdefaults__ = func.__kwdefaults__
    return body


@functools.cache
def checkpoint_codes() -> tuple[types.CodeType, types.CodeType]:
    """Return the code of ``torch.utils.checkpoint.checkpoint``, and of its reentrant forward."""
    from torch.utils.checkpoint import CheckpointFunction, checkpoint

    return inspect.unwrap(checkpoint).__code__, inspect.unwrap(CheckpointFunction.forward).__code__


@functools.cache
def _selective_checkpoint_modes() -> tuple[type, ...]:
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    return (_CachingTorchDispatchMode, _CachedTorchDispatchMode)


@contextmanager
def hidden_from_selective_checkpoint() -> Iterator[None]:
    """Take the modes of selective activation checkpointing off this thread's stack for a while."""
    from torch.utils._python_dispatch import (
        _get_current_dispatch_mode_stack,
        _pop_mode,
        _push_mode,
    )

    stack = _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else []
    kinds = _selective_checkpoint_modes()
    lowest = next((i for i, mode in enumerate(stack) if isinstance(mode, kinds)), len(stack))
    taken = stack[lowest:]
    others = [mode for mode in taken if not isinstance(mode, kinds)]
    for _ in taken:
        _pop_mode()
    for mode in others:
        _push_mode(mode)
    try:
        yield
    finally:
        if taken:
            for _ in others:
                _pop_mode()
            for mode in taken:
                _push_mode(mode)


# -- autograd -------------------------------------------------------------------------------------


def in_backward() -> bool:
    """Whether autograd runs in this thread: a forward pass seen there is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


def count_write(tensor: DTensor) -> None:
    """Tell autograd that ``tensor`` was written in place.

    DTensor (2.13) counts the write of the wrapper, not of the local tensor, which a kernel may have
    saved: its gradients would be wrong without a word.
    """
    if not tensor._local_tensor.is_inference():
        torch.autograd.graph.increment_version(tensor._local_tensor)


def global_forward_hooks() -> list[Any]:
    """Return the forward hooks of all modules, which run before a module's own.

    Those of torch itself (flop counters, memory trackers) look on and are left out.
    """
    from torch.nn.modules import module

    hooks = list(module._global_forward_hooks.values())
    return [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("torch.")]


# -- meshes ---------------------------------------------------------------------------------------


def concatenate_meshes(left: DeviceMesh, right: DeviceMesh) -> DeviceMesh:
    """Return the mesh with the axes of ``left``, then those of ``right``; makes no new groups.

    Kept on ``right``, so that a mesh of another thread's rank or of an earlier process group is
    never handed out.
    """
    known: dict[DeviceMesh, DeviceMesh] = right.__dict__.setdefault("_hp_concatenated", {})
    if left not in known:
        known[left] = DeviceMesh._concatenate([left, right])
    return known[left]


# -- DTensor --------------------------------------------------------------------------------------


def from_local(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    grad_placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Wrap ``local`` as a DTensor without checks or communication (all shards have one length).

    Where ``grad_placements`` is ``Partial()``, the gradient becomes this rank's share of the sum,
    whatever it came as; ``DTensor.from_local`` has no way from a shard to a partial one (2.13).
    """
    placed = tuple(placements)
    wanted = _whole_grads(placed) if grad_placements is None else tuple(grad_placements)
    wrapped: DTensor = _FromLocal.apply(local, mesh, placed, wanted)  # type: ignore[no-untyped-call]
    return wrapped


def to_local(tensor: DTensor, grad_placements: Sequence[Placement]) -> Tensor:
    """Return the local tensor of ``tensor``, whose gradient is laid out as ``grad_placements``."""
    local: Tensor = _ToLocal.apply(tensor, tuple(grad_placements))  # type: ignore[no-untyped-call]
    return local


def _whole_grads(placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """Return what torch takes for the placements of a gradient: those of a sum are whole."""
    return tuple(Replicate() if p.is_partial() else p for p in placements)


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        grad_placements: tuple[Placement, ...],
    ) -> DTensor:
        ctx.placements, ctx.grad_placements = placements, grad_placements
        ctx.set_materialize_grads(False)
        return wrap_detached(local.view_as(local), mesh, placements, local.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[Tensor | None, None, None, None]:
        if grad is None:
            return None, None, None, None
        if torch.is_grad_enabled() and grad.requires_grad:
            if tuple(grad.placements) != ctx.grad_placements:
                raise RuntimeError(
                    f"a second derivative of a DTensor with {ctx.placements} needs its gradient as "
                    f"{ctx.grad_placements}, and it came as {tuple(grad.placements)}; pass "
                    "use_local_input=True to the style and work on local tensors"
                )
            return to_local(grad, ctx.placements), None, None, None
        return partial_share(grad, ctx.grad_placements), None, None, None


class _ToLocal(torch.autograd.Function):
    """``DTensor.to_local``, whose backward computes the layout of the gradient anew every time."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, grad_placements: tuple[Placement, ...]) -> Tensor:
        ctx.mesh, ctx.grad_placements = tensor.device_mesh, grad_placements
        ctx.placements = tuple(tensor.placements)
        ctx.set_materialize_grads(False)
        local: Tensor = tensor._local_tensor
        return local.view_as(local)  # waits, if it is still under way

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[DTensor | None, None]:
        if grad is None:
            return None, None
        if torch.is_grad_enabled() and grad.requires_grad:
            return from_local(grad, ctx.mesh, ctx.grad_placements, ctx.placements), None
        return wrap_detached(grad, ctx.mesh, ctx.grad_placements, grad.requires_grad), None


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


def partial_share(grad: DTensor, wanted: Sequence[Placement]) -> Tensor:
    """Return the local tensor of ``grad`` as ``wanted``, without communication on partial axes.

    Where ``Partial()`` is wanted, any placement is a share of the sum: a partial one as it is, a
    shard with zeros around it, a replicated one on the first rank and zeros on the others.
    """
    mesh, present = grad.device_mesh, list(grad.placements)
    if present == list(wanted):
        return local_shard(grad)
    # zeros can be put around a shard only if no axis to its right cuts its dim and stays
    padded_axes = {
        axis
        for axis, placement in enumerate(present)
        if type(placement) is Shard
        and wanted[axis].is_partial()
        and not any(
            other.is_shard(placement.dim) and not want.is_partial()
            for other, want in zip(present[axis + 1 :], wanted[axis + 1 :], strict=True)
        )
    }
    if padded_axes:
        around = [Replicate() if axis in padded_axes else p for axis, p in enumerate(present)]
        shape, outer = shard_offset(grad.shape, mesh, around)
        _, inner = shard_offset(grad.shape, mesh, present)
        padded = grad._local_tensor.new_zeros(shape)
        part = padded
        for dim, (start, base) in enumerate(zip(inner, outer, strict=True)):
            part = part.narrow(dim, start - base, grad._local_tensor.size(dim))
        part.copy_(grad._local_tensor)
        present = [Partial() if axis in padded_axes else p for axis, p in enumerate(present)]
        grad = wrap_detached(padded, mesh, tuple(present), False)
    target = [
        want
        if not want.is_partial()
        else now
        if now.is_replicate() or now == Partial()
        else Replicate()
        for now, want in zip(present, wanted, strict=True)
    ]
    local = redistribute(grad, target)._local_tensor
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "backward runs on ranks of the mesh"
    for axis, (now, want) in enumerate(zip(target, wanted, strict=True)):
        if want.is_partial() and now.is_replicate() and coordinate[axis] != 0:
            local = torch.zeros_like(local)
    return local


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


def local_shard(tensor: DTensor) -> Tensor:
    """Return the local tensor of a DTensor, outside autograd."""
    local: Tensor = tensor._local_tensor
    return local


class WeakStorage:
    """A weak reference to the storage of a tensor: told apart from all others, never kept alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._ref: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a view into this storage."""
        return bool(self._ref.cdata == tensor.untyped_storage()._cdata)

    def expired(self) -> bool:
        """Whether no tensor uses the storage any more."""
        return bool(self._ref.expired())


def patch_dtensor_exits(
    default_grad_placements: Callable[[DTensor, bool], Sequence[Placement] | None],
) -> None:
    """Let ``to_local`` and ``full_tensor`` ask for their default ``grad_placements``.

    torch takes the forward placements as default: for a replicated tensor whose gradient is
    partial, each rank would keep its own part only and the sum over ranks would be lost without a
    word. No function mode sees ``to_local``, hence the change on the class. Where the callable
    returns None, torch's default stays.

    Args:
        default_grad_placements: Called with the DTensor and whether all of it is asked for.
    """
    if getattr(DTensor.to_local, "_hp_mesh", False):
        return
    to_local, full_tensor = DTensor.to_local, DTensor.full_tensor

    @functools.wraps(to_local)
    def to_local_with_default(
        self: DTensor, *, grad_placements: Sequence[Placement] | None = None
    ) -> Tensor:
        if grad_placements is None:
            grad_placements = default_grad_placements(self, False)
        return to_local(self, grad_placements=grad_placements)

    @functools.wraps(full_tensor)
    def full_tensor_with_default(
        self: DTensor, *, grad_placements: Sequence[Placement] | None = None
    ) -> Tensor:
        if grad_placements is None:
            grad_placements = default_grad_placements(self, True)
            if grad_placements is not None and all(p.is_replicate() for p in self.placements):
                # nothing to gather; redistribute's backward would all-reduce the partial gradient
                return to_local(self, grad_placements=grad_placements)
        return full_tensor(self, grad_placements=grad_placements)

    patched: Any = to_local_with_default
    patched._hp_mesh = True
    DTensor.to_local = to_local_with_default  # type: ignore[method-assign]
    DTensor.full_tensor = full_tensor_with_default  # type: ignore[method-assign]


def shard_offset(
    shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and global offset of this rank's shard of a tensor of global ``shape``."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local_shape, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(local_shape), tuple(offset)


# -- axes of a mesh -------------------------------------------------------------------------------


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


def current_mesh() -> DeviceMesh:
    """Return the mesh of the innermost ``with mesh:`` block; RuntimeError if there is none."""
    from torch.distributed.device_mesh import _mesh_resources

    mesh: DeviceMesh = _mesh_resources.get_current_mesh()
    return mesh


# -- FSDP2 keeps what it was given in a private state ---------------------------------------------


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
