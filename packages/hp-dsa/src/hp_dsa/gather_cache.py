"""DSAGatherCache: the module within which a key is gathered once, whoever asks for it.

The cache is not an object that boundaries hand around: it opens when the module is called and is
gone when the call ends, however it ends (a return, an exception, the early stop of activation
checkpointing; a ``KeyboardInterrupt``, which skips torch's hooks, leaves it dead, because it lives
in the frame of the call). Boundaries inside look for the innermost one that is open.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from hp_dsa.gather import Gathered
from hp_mesh.boundary import call_frame
from hp_mesh.checks import fail
from hp_mesh.overrides import outside_compiled_code

__all__ = ["DSAGatherCache", "open_gathers"]


@dataclass(eq=False)
class _Scope:
    frame: FrameType
    gathered: Gathered


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.open: list[_Scope] = []


_scopes = _Scopes()


def _sweep() -> list[_Scope]:
    """Drop the scopes whose call has ended and return the others, outermost first."""
    frames = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.add(id(frame))
        frame = frame.f_back
    for scope in [scope for scope in _scopes.open if id(scope.frame) not in frames]:
        _scopes.open.remove(scope)
        scope.gathered.clear()
    return _scopes.open


def open_gathers() -> Gathered | None:
    """Return what has been gathered within the innermost open cache of this thread, or None.

    Not in inference mode, where changes in place are not counted.
    """
    if not _scopes.open or torch.is_inference_mode_enabled():
        return None
    scopes = _sweep()
    return scopes[-1].gathered if scopes else None


class _Open:
    @outside_compiled_code
    def __call__(self, module: nn.Module, args: Any) -> None:
        _sweep()
        _scopes.open.append(_Scope(call_frame(), Gathered()))


class _Close:
    @outside_compiled_code
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        frame = call_frame()
        for scope in [scope for scope in _scopes.open if scope.frame is frame]:
            _scopes.open.remove(scope)
            scope.gathered.clear()


class DSAGatherCache(ParallelStyle):
    """Let the DSA boundaries inside a module share what they gather.

    Apply it to the module of one layer that calls indexer, attention and loss: the latent, its
    rotary part and the index key then travel once, 1408 bytes of a token in bf16 at DeepSeek-V3.2's
    sizes and not 3840. What a boundary passes is known by its data (storage, place and version of
    the tensor), so a detached latent in the loss is the latent of attention, and a changed one is
    not. Gathered keys live until the module returns.

    Example::

        DSAGatherCache().apply(layer.attention)
        DSASparseAttentionContextParallel().apply(layer.attention.core, mesh)
        DSAIndexerLossContextParallel().apply(layer.attention.indexer_loss, mesh)
    """

    def apply(self, module: nn.Module, device_mesh: DeviceMesh | None = None) -> nn.Module:
        """Open a cache around each call of ``module`` and return the same module.

        Args:
            module: The module within which gathers are shared.
            device_mesh: Not needed: boundaries share only what one group gathers.
        """
        if any(isinstance(hook, _Open) for hook in module._forward_pre_hooks.values()):
            raise fail(
                type(self).__name__,
                f"{type(module).__name__} already has a gather cache",
                "apply it once to each layer",
            )
        module.register_forward_pre_hook(_Open())
        module.register_forward_hook(_Close(), always_call=True)
        return module

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.apply(module, device_mesh)

    def remove(self, module: nn.Module) -> nn.Module:
        """Take the cache off ``module`` and return the module as it was."""
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            registered: dict[int, Any] = hooks
            for key in [k for k, hook in registered.items() if isinstance(hook, (_Open, _Close))]:
                del registered[key]
                module._forward_hooks_always_called.pop(key, None)
        return module
