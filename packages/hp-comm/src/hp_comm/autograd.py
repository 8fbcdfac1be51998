"""Moves with gradients: one node for a synchronous move, two for one that overlaps.

An asynchronous move is a *launch* node behind the producer and a *wait* node before the consumer,
joined by a token, an empty tensor on which autograd travels::

    forward    producer -> launch ~~~~token~~~~> wait -> consumer
    backward   producer <- launch <~~~token~~~~~ wait <- consumer
                             |                     |
                             waits for the         launches the mirrored move
                             mirrored move

Autograd runs the newest ready node first. Of q, k and v that were launched one after the other and
waited for later, backward so launches all three mirrored moves before it waits for the first, and
the producers' gradients overlap with the transfers still under way. The token that runs backward
is the token of the mirrored launch: the same two nodes, so second derivatives work as well.
Gradients of several consumers are added by autograd in front of the wait node, those of several
users of the input behind the launch node; no hook replaces any.

Moves are linear: nothing is saved for backward, so a graph can be walked again and recomputed. A
move that computes on its way says what it keeps (`Move.kept`), and is differentiated once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from hp_comm.handle import Handle
from hp_comm.moves import Move, Pending
from hp_mesh.overrides import unseen_by_checkpoints
from hp_mesh.transforms import refuse_transforms

__all__ = ["as_given", "launch", "move_tensors", "run"]

T = TypeVar("T")


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    return cast(Any, function).apply(*args)


def _needs_graph(xs: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in xs)


def _needed(flags: Sequence[bool]) -> tuple[int, ...]:
    return tuple(place for place, flag in enumerate(flags) if flag)


def _remember(ctx: Any, outs: Sequence[Tensor], needed: Sequence[int]) -> None:
    """Keep results without gradients out of backward, and know what an absent gradient is."""
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(out for t, out in enumerate(outs) if t not in needed))
    ctx.blanks = [(outs[t].shape, outs[t].dtype, outs[t].device) for t in needed]


def _no_views(outs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return parts of a buffer as autograd may hand them out: it refuses writes to views."""
    return tuple(out.detach() for out in outs)


def _wanted(ctx: Any, grads: Sequence[Tensor | None], needed: Sequence[int]) -> list[Tensor]:
    """Return the gradients to send; one that nobody had is zero: the peers take part in it."""
    refuse_transforms("backward of an exchange", (grad for grad in grads if grad is not None))
    return [
        torch.zeros((), dtype=dtype, device=device).expand(shape) if grad is None else grad
        for grad, (shape, dtype, device) in zip((grads[t] for t in needed), ctx.blanks, strict=True)
    ]


def _spread(grads: Sequence[Tensor], needed: Sequence[int], count: int) -> list[Tensor | None]:
    full: list[Tensor | None] = [None] * count
    for place, grad in zip(needed, grads, strict=True):
        full[place] = grad
    return full


class _Run(torch.autograd.Function):
    """A synchronous move; its backward is the mirrored one, of the tensors that need gradients."""

    @staticmethod
    def forward(ctx: Any, move: Move, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.move, ctx.count = move, len(xs)
        ctx.needed = _needed(ctx.needs_input_grad[1:])
        ctx.results = move.results(ctx.needed)
        ctx.save_for_backward(*move.kept(xs))
        outs = _no_views(move.start(xs, overlap=False).finish())
        _remember(ctx, outs, ctx.results)
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        back = run(ctx.move.mirror(ctx.results), _wanted(ctx, grads, ctx.results))
        back = ctx.move.gradients(back, ctx.saved_tensors, ctx.needed)
        return None, *_spread(back, ctx.needed, ctx.count)


class _Link:
    """What a launch node and its wait node know of each other."""

    __slots__ = ("back", "move", "needed", "pending", "results")

    def __init__(self, move: Move) -> None:
        self.move = move
        self.needed: tuple[int, ...] = ()  # inputs that want gradients
        self.results: Sequence[int] = ()  # results that have them
        self.pending: Pending | None = None
        self.back: _Link | None = None  # the mirrored move, between the two nodes' backward

    def take(self) -> Pending:
        pending, self.pending = self.pending, None
        assert pending is not None, f"{self.move.where}: a wait node ran without its launch"
        return pending


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: _Link, *xs: Tensor) -> Tensor:
        ctx.link, ctx.count = link, len(xs)
        link.needed = _needed(ctx.needs_input_grad[1:])
        link.results = link.move.results(link.needed)
        ctx.save_for_backward(*link.move.kept(xs))
        link.pending = link.move.start(xs, overlap=True)
        # no element: nothing to fill, to add, or to find a NaN in
        return torch.empty(0, dtype=torch.float32, device=xs[0].device)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[Any, ...]:
        link = ctx.link
        back, link.back = link.back, None
        grads = link.move.gradients(_apply(_Wait, back, token), ctx.saved_tensors, link.needed)
        return None, *_spread(grads, link.needed, ctx.count)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: _Link, token: Tensor) -> tuple[Tensor, ...]:
        ctx.link = link
        outs = _no_views(link.take().finish())
        _remember(ctx, outs, link.results)
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        link = ctx.link
        back = _Link(link.move.mirror(link.results))
        token = _apply(_Launch, back, *_wanted(ctx, grads, link.results))
        link.back = back
        return None, token


@unseen_by_checkpoints
def run(move: Move, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Do ``move`` and return its results; differentiable."""
    refuse_transforms(move.where, xs)
    if _needs_graph(xs):
        return cast(tuple[Tensor, ...], _apply(_Run, move, *xs))
    return move.start(xs, overlap=False).finish()


@unseen_by_checkpoints
def launch(move: Move, xs: Sequence[Tensor], form: Callable[[tuple[Tensor, ...]], T]) -> Handle[T]:
    """Start ``move``; the handle's ``wait`` returns ``form`` of its results, differentiable."""
    refuse_transforms(move.where, xs)
    if not _needs_graph(xs):
        pending = move.start(xs, overlap=True)
        return Handle(move.where, pending, lambda: form(pending.finish()))
    link = _Link(move)
    token = _apply(_Launch, link, *xs)
    return Handle(move.where, link.pending, lambda: form(_apply(_Wait, link, token)))


def as_given(results: Sequence[Tensor], *, single: bool) -> Any:
    """Return one tensor where the caller gave one, and a tuple where it gave several."""
    return results[0] if single else tuple(results)


def move_tensors(move: Move, xs: Sequence[Tensor], *, single: bool, async_op: bool) -> Any:
    """Do ``move`` and return its results, or start it and return the `Handle` of them."""
    if async_op:  # the handle must not hold xs: whoever made them may let go of them
        return launch(move, xs, lambda results: as_given(results, single=single))
    return as_given(run(move, xs), single=single)
