"""torch.compile, as it is asked about each frame that begins: held off, and let go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["hold_tracing", "never_traced", "resume_tracing"]

F = TypeVar("F", bound=Callable[..., Any])


def never_traced(function: F) -> F:
    """Decorate what may change how torch.compile goes on: its own frame runs as it is written.

    Unlike ``torch.compiler.disable``, which undoes at the end what was changed meanwhile.
    """
    from torch._C._dynamo.eval_frame import (
        _FrameAction,
        _FrameExecStrategy,
        set_code_exec_strategy,
    )

    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
    set_code_exec_strategy(function.__code__, skip)
    return function


def hold_tracing() -> Any:
    """Keep torch.compile from tracing frames of this thread; return what `resume_tracing` takes."""
    from torch._C._dynamo.eval_frame import set_eval_frame

    return set_eval_frame(None)


def resume_tracing(held: Any) -> None:
    """Go on as before `hold_tracing`."""
    from torch._C._dynamo.eval_frame import set_eval_frame

    set_eval_frame(held)
