"""The global view: inside the boundary, attention sees the whole sequence.

Between the two hooks of a boundary, q, k and v are DTensors and a `View` is active on this thread.
It looks at every torch function that is called and does one of three things:

1. an op with a registered handler (SDPA, fused attention, contractions, dropout) runs on local
   tensors with this rank's `AttentionWindow`, and its result is wrapped again;
2. a plain tensor that meets a DTensor (mask, rotary table, bias, sink) is taken as replicated with
   *partial* gradients: what this rank's rows and heads contribute, never summed behind your back;
3. anything else is left to DTensor. If DTensor has no rule for it, the error names the op.

A view lives as long as the module call that opened it: it remembers the frame of that call, and a
view whose frame is no longer on the stack (a ``KeyboardInterrupt`` skips torch's hooks) is dead. A
dead view changes nothing, and the next entry sweeps it away.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.overrides import TorchFunctionMode

from hp_mesh._torch import (
    checkpoint_codes,
    count_write,
    function_body,
    tie_views,
    without_communication,
    without_innermost_mode,
)
from hp_mesh.checks import fail
from hp_mesh.handlers import Registration, registration_of
from hp_mesh.overrides import outside_compiled_code
from hp_mesh.plain import enter_view, written
from hp_mesh.streamed import Streamed
from hp_mesh.window import AttentionWindow, Range

if TYPE_CHECKING:
    from hp_mesh.lent import Lent

__all__ = ["View"]

_READS = frozenset(
    {
        *("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__"),
        *("__complex__", "is_nonzero", "equal", "allclose"),
    }
)
"""Functions whose result is Python's: a rank must not decide by its own part."""


@dataclass(eq=False)
class View(TorchFunctionMode):
    """What attention may know about its place in the sequence, and how ops run meanwhile.

    Attributes:
        mesh: Mesh of q inside the boundary: the tensor's own axes, then the CP axes.
        cp_axes: The CP axes of ``mesh``.
        window: Rows and keys of this rank.
        query_placements: Placements of q on ``mesh``.
        heads: Half-open range of query heads of this rank, of those that its TP rank has.
        num_heads: Number of query heads that its TP rank has.
        head_axis: The CP axis of ``mesh`` that the heads are cut over; None if there is none.
        head_group: Which of how many groups of heads this call computes, where the module is called
            group by group.
        is_local: Whether the module is handed plain local tensors (``use_local_input``).
        is_balanced: Whether q holds head-tail halves, in an order that is not contiguous.
        where: Name of the style, for messages.
        streamed: Which tensors stay sharded along the sequence though they are whole in the view.
        frame: Frame of the module call that owns the view.
        lent: Data of the caller that the module is handed as they are.
    """

    mesh: DeviceMesh
    cp_axes: tuple[int, ...]
    window: AttentionWindow
    query_placements: tuple[Placement, ...]
    heads: Range
    num_heads: int
    is_local: bool
    is_balanced: bool
    where: str
    head_axis: int | None = None
    head_group: tuple[int, int] = (0, 1)
    streamed: Streamed | None = None
    frame: FrameType | None = field(default=None, repr=False)
    lent: list[Lent] = field(default_factory=list, repr=False)
    _paused: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__init__()

    @property
    def row_axes(self) -> tuple[int, ...]:
        """The CP axes that cut the rows of q, and not its heads."""
        return tuple(axis for axis in self.cp_axes if axis != self.head_axis)

    def is_live(self) -> bool:
        """Whether the module call that opened this view is still running on this thread."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the ops of the boundary itself pass unseen: they are local, and not the module's."""
        with without_innermost_mode(self) as is_off:
            self._paused = not is_off
            try:
                yield
            finally:
                self._paused = False

    def take_rows(self, plain: Tensor, dim: int) -> Tensor:
        """Return the rows of q of a plain tensor that has a row for each of the sequence."""
        return plain.narrow(dim, self.window.query_start, self.window.query_length)

    def refuse_checkpoint(self) -> None:
        """Refuse activation checkpointing *inside* the module: it is recomputed without a view."""
        checkpoint, reentrant = checkpoint_codes()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self.frame:
            code, frame = frame.f_code, frame.f_back
            if code is reentrant or (code is checkpoint and torch.is_grad_enabled()):
                raise fail(
                    self.where,
                    "torch.utils.checkpoint is called inside the boundary, where backward would "
                    "recompute attention without this rank's place in the sequence",
                    "put the checkpoint around the module, or around the whole layer",
                )

    def partial_grads(self, placements: Sequence[Placement]) -> tuple[Placement, ...]:
        """Return ``placements`` with ``Partial()`` where a CP axis is replicated.

        The gradient of a tensor that every CP rank reads whole is the sum of what each rank's rows
        and heads contribute. The gradient of a sum that is still partial is whole on every rank.
        """
        return tuple(
            Replicate()
            if p.is_partial()
            else Partial()
            if axis in self.cp_axes and isinstance(p, Replicate)
            else p
            for axis, p in enumerate(placements)
        )

    def owns(self, tensor: object) -> bool:
        """Whether ``tensor`` is a DTensor on the mesh of this view."""
        return isinstance(tensor, DTensor) and tensor.device_mesh == self.mesh

    # torch.compile would trace what we do for each op, and stop some fifty times in one block
    @outside_compiled_code
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused or not self.is_live():
            return func(*args, **kwargs)
        registered = registration_of(func)
        owned = [t for t in _tensors(args, kwargs) if isinstance(t, DTensor) and self.owns(t)]
        if registered is None and not owned:
            return func(*args, **kwargs)
        self.refuse_checkpoint()
        streamed = self.streamed
        takes_streams = registered is not None and registered.streams
        if streamed is None or takes_streams or not any(map(streamed.holds, owned)):
            return self._run(func, args, kwargs, registered, owned)
        name = getattr(func, "__name__", repr(func))
        return streamed.run(name, lambda: self._run(func, args, kwargs, registered, owned))

    def _run(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        registered: Registration | None,
        owned: Sequence[DTensor],
    ) -> Any:
        if registered is not None:
            result = registered.handler(self, func, args, kwargs)
        elif (body := function_body(func)) is not None:
            with self:  # switched off during this call; the ops of the body are to be seen
                return body(*args, **kwargs)
        elif getattr(func, "__name__", "") in _READS:
            return func(*(self._whole(a, func) for a in args), **kwargs)
        else:
            args, kwargs = enter_view(self, func, args, kwargs)
            result = self.call_dtensor(func, args, kwargs)
            target = written(getattr(func, "__name__", ""), args, kwargs)
            if isinstance(target, DTensor):
                count_write(target)
        if self.is_balanced and not (registered is not None and registered.knows_rows):
            self._check_rows(func, owned, result)
        return result

    def _whole(self, value: Any, func: Callable[..., Any]) -> Any:
        """Return the whole tensor of a DTensor that Python is to read: a rank has a part only."""
        if not self.owns(value) or all(p.is_replicate() for p in value.placements):
            return value
        if self.streamed is not None and self.streamed.holds(value):
            raise self.streamed.refusal(getattr(func, "__name__", repr(func)))
        if self.is_balanced:
            raise self._order_error(func)
        return value.detach().redistribute(placements=[Replicate()] * self.mesh.ndim).to_local()

    def _check_rows(self, func: Callable[..., Any], owned: Sequence[DTensor], result: Any) -> None:
        """Refuse what mixes rows under load balance: q holds half of them, in another order."""
        mixed = {
            axis
            for tensor in _tensors([result], {})
            if isinstance(tensor, DTensor) and self.owns(tensor)
            for axis in self.row_axes
            if not isinstance(tensor.placements[axis], Shard)
        }
        name = getattr(func, "__name__", "")
        if name.startswith("new_") and result.numel() == 1:
            return  # a constant: takes dtype and device only
        if any(isinstance(t.placements[axis], Shard) for t in owned for axis in mixed):
            raise self._order_error(func)

    def _order_error(self, func: Callable[..., Any]) -> ValueError:
        return fail(
            self.where,
            f"{getattr(func, '__name__', repr(func))} inside the boundary mixes or moves rows of "
            "q; under load_balance q holds half of the sequence in head-tail order, so that the "
            "result would be another one than for the whole",
            "compute it from k, or outside the module, or set load_balance=False",
        )

    def call_dtensor(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Leave ``func`` to DTensor; if it has no rule, say which op, and the way out."""
        name = getattr(func, "__name__", repr(func))
        if name.startswith("conv") and any(
            isinstance(p, Shard) and p.dim >= 2 for t in args[:1] for p in t.placements
        ):  # DTensor (2.13) leaves out the neighbours' rows
            raise RuntimeError(
                f"{self.where}: {name} inside the boundary must not run over a dim that is cut "
                f"over ranks ({_describe(args[0])}); apply it outside the module, or use Ulysses"
            )
        try:
            with without_communication() if self.is_balanced else nullcontext():
                result = func(*args, **kwargs)
            tie_views(_tensors([result], {}), _tensors(args, kwargs))
            return result
        except (AssertionError, NotImplementedError, RuntimeError) as error:
            if "mplicit redistribution" in str(error):
                if not self.is_balanced:
                    raise
                raise self._order_error(func) from error
            if not _is_missing_rule(error):
                raise
            raise RuntimeError(
                f"{self.where}: {name} inside the boundary has no DTensor rule for "
                f"{[_describe(t) for t in _tensors(args, kwargs)]}; pass use_local_input=True, "
                "which hands the module plain local tensors, and read attention_window() for the "
                f"rank's rows. DTensor said: {str(error).splitlines()[0]}"
            ) from error


def _is_missing_rule(error: Exception) -> bool:
    text = str(error)
    return isinstance(error, NotImplementedError) or any(
        sign in text
        for sign in (
            "sharding strategy",
            "Sharding propagation failed",
            "mixed torch.Tensor and DTensor",
            "redistribute",
            "Redistribution from",
        )
    )


def _describe(tensor: Tensor) -> str:
    if isinstance(tensor, DTensor):
        return f"DTensor{tuple(tensor.shape)}{tuple(tensor.placements)}"
    return f"Tensor{tuple(tensor.shape)}"


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments, one level of lists and tuples included."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, Tensor))
