"""What no library can beat: Ulysses written out for one shape, with nothing that a library needs.

Buffers are made once, no argument is looked at, no layout but this one is known, one step is under
way at a time. What stands between it and the floor is the price of the copies and of waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from peers.cases import Case
from peers.contender import Attention, Contender
from peers.kernel import attention

__all__ = ["CONTENDERS"]


class ByHand:
    """Ulysses of ``[1, S/P, H, D]`` rows: two all-to-alls each way between buffers of its own."""

    def __init__(self, case: Case, group: ProcessGroup) -> None:
        assert case.batch == 1, "rows of one sequence follow one another in a buffer"
        self.causal, self.group, self.ranks = case.causal, group, case.ranks
        self.rows, self.size = case.local_seq, case.head_size
        heads = (case.heads, case.kv_heads, case.kv_heads)
        self.heads = [max(h // case.ranks, 1) for h in heads]
        self.sharers = [max(case.ranks // h, 1) for h in heads]
        wide, narrow = sum(self.heads), self.heads[0]
        self.send, self.back = (self._buffer(wide) for _ in range(2))
        self.send_one, self.joined = (self._buffer(narrow) for _ in range(2))

    def _buffer(self, heads: int) -> Tensor:
        return torch.empty(self.ranks, self.rows, heads, self.size)

    def _by_rank(self, x: Tensor, which: int) -> Tensor:
        """See rows ``[1, S/P, H, D]`` as what each rank wants, ``[H', sharers, S/P, h, D]``."""
        parts = x.view(self.rows, -1, self.heads[which], self.size).transpose(0, 1)
        return parts.unsqueeze(1).expand(-1, self.sharers[which], -1, -1, -1)

    def scatter_heads(self, xs: Sequence[Tensor], send: Tensor) -> Tensor:
        """Exchange rows of all heads for all rows of some heads, side by side; ``[1, S, h, D]``."""
        at = 0
        for which, x in enumerate(xs):
            wanted = self._by_rank(x, which)
            slot = send[:, :, at : at + self.heads[which]]
            slot.unflatten(0, wanted.shape[:2]).copy_(wanted)
            at += self.heads[which]
        received = torch.empty_like(send)
        dist.all_to_all_single(received, send, group=self.group)
        return received.view(1, self.ranks * self.rows, -1, self.size)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return this rank's rows of the output, ``[1, S/P, Hq, D]``."""
        return _Attend.apply(q, k, v, self)  # type: ignore[no-any-return,no-untyped-call]


class _Attend(torch.autograd.Function):
    """The whole step; what is between the exchanges has a graph of its own."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, by: ByHand) -> Tensor:
        received = by.scatter_heads((q, k, v), by.send)
        ctx.by, ctx.inputs = by, [x.requires_grad_() for x in received.split(by.heads, 2)]
        with torch.enable_grad():
            ctx.output = attention(*ctx.inputs, causal=by.causal)
        dist.all_to_all_single(by.joined, ctx.output.detach().view_as(by.joined), group=by.group)
        return by.joined.transpose(0, 1).reshape(q.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        by: ByHand = ctx.by
        received = by.scatter_heads((grad,), by.send_one)
        grads = torch.autograd.grad(ctx.output, ctx.inputs, received)
        torch.cat([x.view(*by.send.shape[:2], -1, by.size) for x in grads], 2, out=by.send)
        dist.all_to_all_single(by.back, by.send, group=by.group)
        found = []
        for part, sharers in zip(by.back.split(by.heads, 2), by.sharers, strict=True):
            summed = part.unflatten(0, (-1, sharers)).sum(1) if sharers > 1 else part
            found.append(summed.transpose(0, 1).reshape(1, by.rows, -1, by.size))
        return *found, None


def _build(case: Case, group: ProcessGroup) -> Attention:
    return ByHand(case, group).attend


CONTENDERS = (Contender("limit: Ulysses written out by hand", _build, limit=True),)
