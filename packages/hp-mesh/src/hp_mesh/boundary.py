"""The boundary: two forward hooks between which a module sees the whole sequence.

A `BoundaryStyle` is configuration only and may be applied to any number of modules. Applying it
gives each module a `Boundary` (style + mesh), held by the two hooks and by nothing else:

    pre-hook    select, check, preflight, send, wrap, open the view
    module      runs unchanged
    post-hook   close the view, send back, wrap as the input was

The post-hook is registered with ``always_call=True``, so it also runs after an exception; it then
closes the view of its own call and does nothing more. Calls are told apart by the frame of
``Module._call_impl``, so re-entrant calls and recomputation under activation checkpointing each
have their own.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import FrameType
from typing import Any, Generic, TypeVar, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from hp_mesh._torch import global_forward_hooks, hold_tracing, never_traced, resume_tracing
from hp_mesh.checks import fail, require_type
from hp_mesh.exiting import wait_for_gloo_at_exit
from hp_mesh.lent import count_writes_later
from hp_mesh.mesh import require_cp_axes
from hp_mesh.open_views import close_view, open_view
from hp_mesh.overrides import outside_compiled_code, unseen_by_checkpoints
from hp_mesh.view import View

__all__ = ["Boundary", "BoundaryStyle", "Entry", "boundary_of", "inner_hooks", "remove_boundary"]


@dataclass
class Entry:
    """What one call keeps between its two hooks.

    Attributes:
        args: Positional arguments that the module is handed.
        kwargs: Keyword arguments that the module is handed.
        view: The view to activate while the module runs.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    view: View


E = TypeVar("E", bound=Entry)


class Boundary(ABC, Generic[E]):
    """One style applied to one module on one mesh.

    Shared by deep copies of the module; not picklable, because a mesh holds process groups.
    """

    def __init__(self, where: str, mesh: DeviceMesh) -> None:
        self.where = where
        self.mesh = mesh
        self._calls = threading.local()

    @abstractmethod
    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> E:
        """Return what the module is to be called with; may communicate."""

    def run_ahead(self, module: nn.Module, entry: E) -> None:
        """Run ``module.forward`` for what is not left to the module's own call.

        Runs with the view open; may change the call that ``entry`` holds.
        """

    @abstractmethod
    def leave(self, module: nn.Module, entry: E, output: Any) -> Any:
        """Return what the caller is to get for the module's ``output``; may communicate.

        Runs with the view still open, so that a style may call ``module.forward`` again.
        """

    def abandon(self, entry: E) -> None:
        """Finish what ``entry`` has in flight; called instead of `leave` when the module raised."""

    def next_call_index(self) -> int:
        """Return 0 for the first call of this module, then 1, 2, ...; the same on every rank."""
        index: int = getattr(self._calls, "count", 0)
        self._calls.count = index + 1
        return index

    def __deepcopy__(self, memo: dict[int, Any]) -> Boundary[E]:
        return self

    def __reduce__(self) -> str:
        raise TypeError(
            f"{self.where}: a module with a boundary cannot be pickled, because its mesh holds "
            "process groups; save state_dict(), or remove() the style first and apply it again "
            "after loading"
        )


@dataclass
class _Open:
    """An open call: the entry, the frame it runs in, the exception being handled at entry.

    ``tracing`` is what torch.compile goes on with afterwards: it traces no frame inside.
    """

    entry: Entry
    frame: FrameType
    handled: BaseException | None
    tracing: object = None


class _OpenCalls(threading.local):
    def __init__(self) -> None:
        self.calls: list[_Open] = []


_open_calls = _OpenCalls()


def call_frame() -> FrameType:
    """Return the frame of the ``Module._call_impl`` that runs the hook which calls this."""
    frame = sys._getframe(2)
    found: FrameType | None = frame
    while found is not None:
        if found.f_code is nn.Module._call_impl.__code__:
            return found
        found = found.f_back
    return frame


def _close(entry: Entry) -> None:
    """End the call of ``entry``, and those within it that a KeyboardInterrupt left behind."""
    close_view(entry.view)
    _open_calls.calls = [call for call in _open_calls.calls if call.entry.view.is_live()]


@unseen_by_checkpoints
def _enter(
    boundary: Boundary[E], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> E:
    return boundary.enter(module, args, kwargs)


class _PreHook:
    def __init__(self, boundary: Boundary[Any]) -> None:
        self.boundary = boundary

    @never_traced
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        entry = self._open(module, args, kwargs)
        # a traced frame of the module would run on DTensors that the view should see first
        _open_calls.calls[-1].tracing = hold_tracing()
        return entry.args, entry.kwargs

    @outside_compiled_code
    def _open(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        frame = call_frame()
        handled = sys.exc_info()[1]
        entry = _enter(self.boundary, module, args, kwargs)
        # calls that a KeyboardInterrupt left behind: their views are swept by open_view
        _open_calls.calls = [call for call in _open_calls.calls if call.entry.view.is_live()]
        open_view(entry.view, frame)
        _open_calls.calls.append(_Open(entry, frame, handled))
        try:
            self.boundary.run_ahead(module, entry)
        except BaseException:  # KeyboardInterrupt too, for which torch skips the post-hook
            self.boundary.abandon(entry)
            _close(entry)
            raise
        return cast(Entry, entry)


class _PostHook:
    def __init__(self, boundary: Boundary[Any]) -> None:
        self.boundary = boundary

    @never_traced
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        frame = call_frame()
        call = next((c for c in reversed(_open_calls.calls) if c.frame is frame), None)
        if call is None:  # the pre-hook itself failed: there is nothing to close
            return output
        try:
            return self._leave(module, call, output)
        finally:
            resume_tracing(call.tracing)

    @outside_compiled_code
    def _leave(self, module: nn.Module, call: _Open, output: Any) -> Any:
        try:
            if sys.exc_info()[1] is not call.handled:  # called because the module raised
                self.boundary.abandon(call.entry)
                return output
            result = self.boundary.leave(module, call.entry, output)
            count_writes_later(call.entry.view, result)
            return result
        finally:
            _close(call.entry)


class BoundaryStyle(ParallelStyle, ABC):
    """A ParallelStyle that works at the boundary of a module through two forward hooks."""

    accepts_2d_mesh = False
    """Whether `hp_mesh.parallelize_module` may hand this style a 2-D mesh."""

    @abstractmethod
    def make_boundary(self, module: nn.Module, device_mesh: DeviceMesh) -> Boundary[Any]:
        """Return the boundary for ``module`` on ``device_mesh``; checks what it can know now."""

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Put the boundary around ``module`` and return the same module.

        Args:
            module: The module whose ``forward`` receives the tensors.
            device_mesh: The CP mesh.

        Raises:
            ValueError: If a context-parallel style was applied to ``module`` before, or an axis of
                the mesh has the name of another kind of parallelism.
            TypeError: If one of the two is something else.
        """
        where = type(self).__name__
        require_type(where, "module", module, nn.Module, "a torch.nn.Module")
        require_type(where, "device_mesh", device_mesh, DeviceMesh, "a DeviceMesh")
        require_cp_axes(where, device_mesh)
        present = boundary_of(module)
        if present is not None:
            raise fail(
                where,
                f"{type(module).__name__} already has {present.where} applied; a second boundary "
                "would exchange the data twice",
                "call remove() first, or apply the style to another module",
            )
        wait_for_gloo_at_exit()  # the mesh may be torch's own
        boundary = self.make_boundary(module, device_mesh)
        module.register_forward_pre_hook(_PreHook(boundary), with_kwargs=True)
        module.register_forward_hook(_PostHook(boundary), with_kwargs=True, always_call=True)
        return module

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.apply(module, device_mesh)

    def remove(self, module: nn.Module) -> nn.Module:
        """Take the boundary off ``module`` and return the module as it was.

        Raises:
            ValueError: If no context-parallel style is applied to ``module``.
        """
        if boundary_of(module) is None:
            raise fail(
                type(self).__name__,
                f"{type(module).__name__} has no context-parallel style to remove",
                "pass the module that apply() was called with",
            )
        remove_boundary(module)
        return module


def boundary_of(module: nn.Module) -> Boundary[Any] | None:
    """Return the boundary around ``module``, or None."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, _PreHook):
            return hook.boundary
    return None


def inner_hooks(module: nn.Module) -> list[str]:
    """Return the names of hooks of others that run between the two hooks of a boundary.

    They see one call of the module; a boundary that runs ``module.forward`` again leaves them out.
    Full backward hooks are among them: torch reads what they need between a module's hooks.
    """

    def name(hook: Any) -> str:
        return getattr(hook, "__qualname__", type(hook).__name__)

    before = list(module._forward_pre_hooks.values())
    after = list(module._forward_hooks.values())
    first = next((i for i, hook in enumerate(before) if isinstance(hook, _PreHook)), len(before))
    last = next((i for i, hook in enumerate(after) if isinstance(hook, _PostHook)), 0)
    backward = list(module._backward_hooks.values())
    inner = (*before[first + 1 :], *global_forward_hooks(), *after[:last], *backward)
    return [name(hook) for hook in inner]


def remove_boundary(module: nn.Module) -> None:
    """Unregister the two hooks of a boundary, if ``module`` has one."""
    # by type and not by handle: a deep copy has the hooks, but no handle of its own
    for hooks, flags, kind in (
        (module._forward_pre_hooks, [module._forward_pre_hooks_with_kwargs], _PreHook),
        (
            module._forward_hooks,
            [module._forward_hooks_with_kwargs, module._forward_hooks_always_called],
            _PostHook,
        ),
    ):
        registered: dict[int, Any] = hooks
        for key in [k for k, hook in registered.items() if isinstance(hook, kind)]:
            del registered[key]
            for flag in flags:
                flag.pop(key, None)
