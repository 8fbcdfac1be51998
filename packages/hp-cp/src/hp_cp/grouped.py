"""Head groups: the exchange of one group of heads behind the attention of another.

The module runs ``h`` times, each time on a slice of the heads, unchanged::

    wire      in 0 | in 1        | in 2, out 0 | ...          | out h-1
    compute          attention 0 | attention 1 | ...

Groups are consecutive heads and keep query heads and their KV heads together. Backward runs the
mirror of this order by itself, since launches and waits are nodes of the autograd graph. A group is
free once it has run, as far as backward does not need it: q, k and v of two groups are in memory at
a time, the one at work and the one on the wire.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hp_comm import Handle, gather_seq, head_to_seq, seq_to_head
from hp_cp.call import Call, refuse_inner_hooks
from hp_cp.core_boundary import CPBoundary
from hp_cp.hand_over import describe_view, hand_over
from hp_cp.inputs import Inputs
from hp_cp.output import OutputDims
from hp_cp.prepared import done
from hp_mesh.checks import require
from hp_mesh.window import Range

if TYPE_CHECKING:
    from hp_cp.async_style import AsyncContextParallel

__all__ = ["GroupedBoundary"]

_Returning = list[tuple[Handle[Tensor], OutputDims]]


@dataclass
class _GroupedCall(Call):
    """A call whose heads are computed group by group.

    Attributes:
        groups: What each group sends, in order.
        sent: The outputs of the groups that have run, on their way back.
        returning: The exchanges of the outputs, in the order they were started.
    """

    groups: list[_Group] = field(default_factory=list)
    sent: list[_Returning] = field(default_factory=list)
    returning: list[Handle[Tensor]] = field(default_factory=list)


@dataclass
class _Group:
    """The exchanges of one group of heads on their way in."""

    boundary: GroupedBoundary
    inputs: Inputs
    exchange: Handle[tuple[Tensor, ...]] | None = None
    gather: Handle[tuple[Tensor, ...]] | None = None
    q: Tensor | None = None

    def start(self) -> None:
        """Start the first exchange: of q, k, v to heads, or of k, v alone."""
        seq_dim, head_dim = self.inputs.dims
        q, k, v = self.inputs.locals
        if self.boundary.ulysses_group is not None:
            kv_heads = self.inputs.table.kv_sent
            self.exchange = seq_to_head(
                (q, k, v),
                self.boundary.ulysses_group,
                seq_dim=seq_dim,
                head_dim=head_dim,
                heads=(None, kv_heads, kv_heads),
                dense=self.boundary.exchanges_dense,
                work=self.inputs.works,
                async_op=True,
            )
        else:
            works = self.inputs.works
            self.q, k, v = (done(x, work) for x, work in zip((q, k, v), works, strict=True))
            self._gather(k, v)

    def _gather(self, k: Tensor, v: Tensor) -> None:
        group = self.boundary.colossal_group
        if group is None:
            self.gather = Handle.ready("head groups", (k, v))
        else:
            self.boundary.keep_shards(self.inputs, k, v)
            self.gather = gather_seq(
                (k, v),
                group,
                seq_dim=self.inputs.dims[0],
                dense=self.boundary.wants_dense,
                async_op=True,
            )

    def advance(self) -> None:
        """Hybrid: once the heads have arrived, start the gather of k and v.

        In Ulysses nothing follows them: they are waited for where they are used, behind the
        attention that hides them, and so are their gradients.
        """
        if self.boundary.colossal_group is not None:
            self._take_heads()

    def _take_heads(self) -> None:
        if self.exchange is not None:
            self.q, k, v = self.exchange.wait()
            self.exchange = None
            self._gather(k, v)

    def finish(self) -> tuple[Tensor, ...]:
        """Return q, k and v as this group's attention is to see them."""
        self._take_heads()
        assert self.gather is not None and self.q is not None, "the group was started"
        k, v = self.gather.wait()
        q, self.q, self.gather = self.q, None, None
        return self.boundary.expand(q, k, v, self.inputs)

    def drop(self) -> None:
        """Finish what is in flight and forget it."""
        for handle in (self.exchange, self.gather):
            if handle is not None:
                handle.wait()
        self.exchange = self.gather = self.q = None


class GroupedBoundary(CPBoundary):
    """The boundary of a style with ``head_groups`` greater than 1."""

    style: AsyncContextParallel

    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _GroupedCall:
        """Start the exchanges of the first groups."""
        refuse_inner_hooks(module, "head_groups", self.where)
        inputs = self._agree(args, kwargs)
        groups = [_Group(self, part) for part in self._split(inputs)]
        for group in groups[: 1 + self._ahead]:
            group.start()
        return _GroupedCall(
            args, kwargs, describe_view(self, groups[0].inputs), inputs, groups=groups
        )

    @property
    def _ahead(self) -> int:
        # Hybrid has two exchanges in a row: the second of the next group needs its first done
        return 2 if self.plan.mode == "hybrid" else 1

    def run_ahead(self, module: nn.Module, entry: Call) -> None:
        """Run all groups but the last, which is left to the module's own call.

        torch holds what a module is called with until the call ends: of the last group, nothing
        else is left by then.
        """
        assert isinstance(entry, _GroupedCall), "made by enter"
        for index in range(len(entry.groups) - 1):
            self._run(module, entry, index)
        entry.args, entry.kwargs = self._receive(entry, len(entry.groups) - 1)

    def _run(self, module: nn.Module, entry: _GroupedCall, index: int) -> None:
        """Run one group; what it was called with is free when this returns."""
        args, kwargs = self._receive(entry, index)
        output = module.forward(*args, **kwargs)
        entry.sent.append(self._send_back(entry, output))

    def _receive(self, entry: _GroupedCall, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Start the exchange of a later group, and return the call of group ``index``."""
        groups, count = entry.groups, len(entry.groups)
        with entry.view.paused():
            if index > 0 and index + self._ahead < count:
                groups[index + self._ahead].start()
            tensors = groups[index].finish()
            if index + 1 < count:
                groups[index + 1].advance()
            entry.view.heads, entry.view.num_heads = self._place(entry.inputs, index, count)
            entry.view.head_group = (index, count)
            inputs = groups[index].inputs
            args, kwargs = hand_over(self, entry.args, entry.kwargs, inputs, entry.view, tensors)
            self._forget(entry, inputs, tensors[1:], args, kwargs)
        return args, kwargs

    def _leave(self, module: nn.Module, entry: Call, output: Any) -> Any:
        """Send the last group's output after the others, and join the heads."""
        assert isinstance(entry, _GroupedCall), "made by enter"
        sent = [*entry.sent, self._send_back(entry, output)]
        queue = iter(list(zip(*sent, strict=True)))

        def join(_: Tensor) -> Tensor:
            parts = next(queue)
            dims = parts[0][1]
            whole = torch.cat([handle.wait() for handle, _ in parts], dim=dims.head_dim)
            return self._restore(entry, whole, dims)

        with entry.view.paused():
            return self._map(entry, output, join, several="head_groups")

    def abandon(self, entry: Call) -> None:
        """Finish every exchange in flight, so that the ranks stay in step."""
        super().abandon(entry)
        assert isinstance(entry, _GroupedCall), "made by enter"
        for group in entry.groups:
            group.drop()
        for handle in entry.returning:
            handle.wait()

    def _send_back(self, entry: _GroupedCall, output: Any) -> _Returning:
        """Start the way back of each declared output of one group."""
        started: _Returning = []

        def start(x: Tensor) -> None:
            local, dims = self._take(entry, x)
            self._check_heads(entry, local, dims)
            if entry.recorder is not None:
                entry.recorder.launch_before_last(local)
            if self.ulysses_group is None or not dims.trades_heads:
                handle: Handle[Tensor] = Handle.ready("head groups", local)
            else:
                handle = head_to_seq(
                    local,
                    self.ulysses_group,
                    seq_dim=dims.seq_dim,
                    head_dim=dims.head_dim,
                    async_op=True,
                )
            entry.returning.append(handle)
            started.append((handle, dims))

        with entry.view.paused():
            self._map(entry, output, start, several="head_groups")
        return started

    def _check_heads(self, entry: _GroupedCall, local: Tensor, dims: OutputDims) -> None:
        """Refuse an output whose heads are not where they will be joined."""
        start, stop = entry.view.heads
        mine = stop - start
        size = local.size(dims.head_dim) if dims.head_dim < local.ndim else 0
        merged = local.ndim == max(entry.inputs.dims) + 1  # [B, S, H * D]
        require(
            dims.head_dim != dims.seq_dim
            and size > 0
            and (size % mine == 0 if merged else size == mine),
            self.where,
            f"the output {list(local.shape)} of a head group must have the group's heads on this "
            f"rank ({mine}) in dim {dims.head_dim}, along which the groups are joined",
            "say where they are with output_head_dim",
        )

    def _split(self, inputs: Inputs) -> list[Inputs]:
        """Cut q, k and v into groups of consecutive heads."""
        count, head_dim = self.style.head_groups, inputs.dims[1]
        self.plan.check_head_groups(count, inputs.num_heads, inputs.num_kv_heads, where=self.where)
        # one split node, so that backward joins the gradients of all groups once
        cuts = [torch.chunk(x, count, dim=head_dim) for x in inputs.locals]
        table = self.plan.heads(
            inputs.num_heads // count, inputs.num_kv_heads // count, where=self.where
        )
        return [
            replace(
                inputs,
                locals=list(parts),
                table=table,
                num_heads=inputs.num_heads // count,
                num_kv_heads=inputs.num_kv_heads // count,
            )
            for parts in zip(*cuts, strict=True)
        ]

    def _place(self, inputs: Inputs, index: int, count: int) -> tuple[Range, int]:
        """Return this rank's query heads of group ``index``, and the number of all heads."""
        size = inputs.num_heads // count
        local = size // self.plan.ulysses_degree
        start = index * size + (self.rank % self.plan.ulysses_degree) * local
        return (start, start + local), inputs.num_heads
