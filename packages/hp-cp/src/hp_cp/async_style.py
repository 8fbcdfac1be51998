"""AsyncContextParallel: the exchange starts where q, k and v are produced.

========  ==================================================  ====================================
mode      started after the projections                       waited for before attention
========  ==================================================  ====================================
Ulysses   all-to-all of q, of k, of v                         all three
Colossal  all-gather of k, of v                               both; q never moves
Hybrid    all-to-all of q, of k, of v                         k and v; then their all-gather starts,
                                                              q is waited for, then the gather
========  ==================================================  ====================================

Backward mirrors it without a hook: autograd runs the waits' backward (which launch) before the
launches' backward (which wait), so the exchange of dk overlaps with whatever stands between.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hp_comm import Handle, gather_seq, preflight, seq_to_head
from hp_cp.core_boundary import CPBoundary
from hp_cp.handoff import Launched, ViewRecipe, learn_view, split_output
from hp_cp.inputs import LABELS, Inputs
from hp_cp.plan import HeadTable, Plan
from hp_cp.style import ContextParallel
from hp_mesh._torch import local_shard
from hp_mesh.boundary import boundary_of, outside_compiled_code
from hp_mesh.checks import require

__all__ = ["AsyncContextParallel"]


class AsyncContextParallel(ContextParallel):
    """`ContextParallel` whose exchanges overlap with the projections, forward and backward.

    Takes the arguments of `ContextParallel`. The first call of a module is synchronous: it learns
    how the projections' outputs reach the module. From the second call on each output is sent as
    soon as it exists. What reaches the module must be that output or a view of it; if something
    changes it in between (rotary, norm, in place), it is sent synchronously, one warning says so,
    and this handoff is not tried again.

    Keyword Args:
        qkv_split: Sizes of q, k and v in the last dim of one fused projection that is passed as
            ``q_proj``, ``k_proj`` and ``v_proj``. Default: three separate projections.

    .. note::
        A fallback to the synchronous path warns once, with its reason.
    """

    def __init__(self, *args: Any, qkv_split: Sequence[int] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        where = type(self).__name__
        require(
            qkv_split is None
            or (len(qkv_split) == 3 and all(isinstance(n, int) and n > 0 for n in qkv_split)),
            where,
            f"qkv_split ({qkv_split!r}) must be the three sizes of q, k and v in the last dim",
        )
        self.qkv_split = None if qkv_split is None else tuple(qkv_split)

    def apply(
        self,
        module: nn.Module,
        device_mesh: DeviceMesh,
        q_proj: nn.Module | None = None,
        k_proj: nn.Module | None = None,
        v_proj: nn.Module | None = None,
    ) -> nn.Module:
        """Put the boundary around ``module`` and start its exchanges behind the projections.

        Args:
            module: The module whose ``forward`` receives q, k and v.
            device_mesh: The CP mesh.
            q_proj: The last module that q comes from; what it returns must reach ``module`` as it
                is or as a view. One missing of the three: all is synchronous.
            k_proj: Likewise for k.
            v_proj: Likewise for v.

        Raises:
            ValueError: If one projection stands for several of the three without ``qkv_split``.
        """
        where = type(self).__name__
        projections = dict(zip(LABELS, (q_proj, k_proj, v_proj), strict=True))
        missing = [f"{name}_proj" for name, proj in projections.items() if proj is None]
        given = [proj for proj in projections.values() if proj is not None]
        distinct = len({id(proj) for proj in given})
        if distinct < len(given):
            require(
                distinct == 1 and not missing and self.qkv_split is not None,
                where,
                f"q_proj, k_proj and v_proj must be {len(given)} modules, not {distinct}",
                "for one fused projection pass it three times and give the sizes of its parts with "
                "qkv_split=(q, k, v)",
            )
        else:
            require(
                self.qkv_split is None or bool(missing),
                where,
                f"qkv_split ({self.qkv_split}) must come with one fused projection, not three",
                "leave it out",
            )
        super().apply(module, device_mesh)
        reason = None
        if missing:
            reason = f"{', '.join(missing)} not given"
        elif self.load_balance:
            reason = "load_balance=True swaps q at the boundary"
        if reason is not None:
            _warn(f"{where}: {reason}; {type(module).__name__} exchanges synchronously")
            return module
        boundary = boundary_of(module)
        assert isinstance(boundary, AsyncBoundary), "just applied"
        for index, (name, projection) in enumerate(projections.items()):
            assert projection is not None, "none is missing"
            if name == "q" and boundary.plan.mode == "colossal":
                continue  # q stays where it is
            boundary.handoffs[name] = _Handoff(name, index, type(projection).__name__)
            projection.register_forward_hook(_HandoffHook(boundary, name))
            boundary.projections.append(projection)
        return module

    def remove(self, module: nn.Module) -> nn.Module:
        """Take the boundary and its handoffs off; the modules are as they were."""
        boundary = boundary_of(module)
        super().remove(module)
        if isinstance(boundary, AsyncBoundary):
            boundary.flush()
            for projection in boundary.projections:
                hooks = projection._forward_hooks
                for key in [
                    k
                    for k, hook in hooks.items()
                    if isinstance(hook, _HandoffHook) and hook.boundary is boundary
                ]:
                    del hooks[key]
        return module

    def _boundary(self, plan: Plan, device_mesh: DeviceMesh) -> CPBoundary:
        return AsyncBoundary(self, plan, device_mesh)


_warned: set[str] = set()


def _warn(message: str) -> None:
    """Warn once in the life of the process; forty layers say it once."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=4)


@dataclass
class _Learned:
    """What the first call taught about one handoff.

    Attributes:
        recipe: How the argument is a view of the output.
        dims: ``(seq_dim, head_dim)`` of the argument.
        table: Heads of each Ulysses rank.
    """

    recipe: ViewRecipe
    dims: tuple[int, int]
    table: HeadTable


@dataclass
class _Handoff:
    """One of q, k, v between its projection and the boundary.

    Attributes:
        name: ``"q"``, ``"k"`` or ``"v"``.
        index: 0, 1 or 2.
        module: Type of the projection, for messages.
        learned: None until the first call has shown how the output reaches the module.
        disarmed: Whether it was given up, because what arrived was something else.
        unused: How often in a row launched work never reached the module.
        queue: Outputs that have not reached the module yet, oldest first; per thread.
    """

    name: str
    index: int
    module: str
    learned: _Learned | None = None
    disarmed: bool = False
    unused: int = 0
    _queue: Any = field(default_factory=threading.local)

    @property
    def queue(self) -> list[Launched]:
        """Return this thread's outputs under way."""
        if not hasattr(self._queue, "items"):
            self._queue.items = []
        items: list[Launched] = self._queue.items
        return items

    def prune(self) -> None:
        """Finish the work of outputs that nobody holds any more (an abandoned forward)."""
        dead = [item for item in self.queue if not item.is_alive()]
        for item in dead:
            self.queue.remove(item)
            if item.handle is not None:
                self.unused += 1
            item.drop()

    def disarm(self) -> None:
        """Give this handoff up and finish what it launched."""
        self.disarmed = True
        while self.queue:
            self.queue.pop().drop()


class _HandoffHook:
    """Forward hook of a projection: remembers its output, and launches once the view is known."""

    def __init__(self, boundary: AsyncBoundary, name: str) -> None:
        self.boundary = boundary
        self.name = name

    def __deepcopy__(self, memo: dict[int, Any]) -> _HandoffHook:
        return self

    @outside_compiled_code
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.boundary.hand_off(self.name, output)


class AsyncBoundary(CPBoundary):
    """`AsyncContextParallel` around one module.

    Attributes:
        handoffs: By name; empty if the style fell back to the synchronous path.
        projections: The modules that carry a handoff hook.
    """

    style: AsyncContextParallel

    def __init__(self, style: AsyncContextParallel, plan: Plan, device_mesh: DeviceMesh) -> None:
        super().__init__(style, plan, device_mesh)
        self.handoffs: dict[str, _Handoff] = {}
        self.projections: list[nn.Module] = []

    def hand_off(self, name: str, output: Any) -> None:
        """Remember ``output`` of a projection and start its exchange if its view is known."""
        handoff = self.handoffs[name]
        handoff.prune()
        if handoff.unused >= 2:
            self._give_up(handoff, "what was sent ahead did not reach the module twice in a row")
        if handoff.disarmed:
            return
        found = split_output(output, self.style.qkv_split, handoff.index)
        if found is None:
            self._give_up(handoff, f"its output is a {type(output).__name__}, not one tensor")
            return
        y, part = found
        learned, view, handle = handoff.learned, None, None
        local = part.to_local() if isinstance(part, DTensor) else part
        if learned is not None:
            view = learned.recipe.apply(local)
        if learned is not None and view is not None:
            preflight(
                self.group,
                f"{self.where}: {name} handed off by {handoff.module}",
                {"shape": list(view.shape), "dtype": view.dtype},
                call_index=1,
            )
            handle = self._launch(name, view, learned)
        handoff.queue.append(Launched.of(y, part, handle, view))

    def _launch(self, name: str, x: Tensor, learned: _Learned) -> Handle[Tensor]:
        seq_dim, head_dim = learned.dims
        if self.ulysses_group is None:
            assert self.colossal_group is not None, "one rank has no handoffs"
            return gather_seq(x, self.colossal_group, seq_dim=seq_dim, async_op=True)
        return seq_to_head(
            x,
            self.ulysses_group,
            seq_dim=seq_dim,
            head_dim=head_dim,
            heads=None if name == "q" else learned.table.kv_sent,
            async_op=True,
        )

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        inputs = super()._read(args, kwargs)
        for name, handoff in self.handoffs.items():
            if not handoff.disarmed:
                self._claim(name, handoff, inputs)
        return inputs

    def _claim(self, name: str, handoff: _Handoff, inputs: Inputs) -> None:
        """Find the launched work of an argument, or learn where the argument comes from."""
        x = inputs.tensors[handoff.index]
        source = next((item for item in handoff.queue if item.is_source_of(x)), None)
        if source is None:
            launched = any(item.handle is not None for item in handoff.queue)
            if launched or (handoff.learned is None and handoff.queue):
                self._give_up(handoff, "what reaches the module is another tensor")
            return
        handoff.queue.remove(source)
        if source.handle is None:
            self._learn(handoff, source, x, inputs)
        elif source.matches(x):
            handoff.unused = 0
            inputs.claimed[name] = source.handle
        else:
            source.drop()
            self._give_up(handoff, "what reaches the module is not a view of it, unchanged")

    def _learn(self, handoff: _Handoff, source: Launched, x: Tensor, inputs: Inputs) -> None:
        local = local_shard(x) if isinstance(x, DTensor) else x
        recipe = learn_view(source.part_like(x), local)
        if recipe is None or not source.leads_to(x):
            self._give_up(handoff, "what reaches the module is not a view of it, unchanged")
            return
        handoff.learned = _Learned(recipe, inputs.dims, inputs.table)

    def _give_up(self, handoff: _Handoff, reason: str) -> None:
        handoff.disarm()
        _warn(
            f"{self.where}: {handoff.name} handed off by {handoff.module}: {reason}; it is "
            "exchanged synchronously from now on. Hand off the last module before attention, or "
            "put hp_cp.Handoff() behind the rotary embedding or norm and pass that"
        )

    def _send(self, inputs: Inputs) -> tuple[Tensor, ...]:
        claimed = inputs.claimed
        if not claimed:
            return super()._send(inputs)
        seq_dim, head_dim = inputs.dims
        xs = dict(zip(LABELS, inputs.locals, strict=True))
        rest = [name for name in LABELS if name not in claimed]
        if self.ulysses_group is None:
            assert self.colossal_group is not None, "one rank has no handoffs"
            late = [name for name in ("k", "v") if name not in claimed]
            gathered = (
                gather_seq([xs[name] for name in late], self.colossal_group, seq_dim=seq_dim)
                if late
                else ()
            )
            xs.update(zip(late, gathered, strict=True))
            xs.update({name: handle.wait() for name, handle in claimed.items()})
            return xs["q"], xs["k"], xs["v"]
        if rest:
            tables = [None if name == "q" else inputs.table.kv_sent for name in rest]
            moved = seq_to_head(
                [xs[name] for name in rest],
                self.ulysses_group,
                seq_dim=seq_dim,
                head_dim=head_dim,
                heads=tables,
            )
            xs.update(zip(rest, moved, strict=True))
        for name in ("k", "v", "q"):
            if name == "q" and self.colossal_group is not None:
                # the gather runs while q is still on its way
                keys = gather_seq(
                    (xs["k"], xs["v"]), self.colossal_group, seq_dim=seq_dim, async_op=True
                )
            if name in claimed:
                xs[name] = claimed[name].wait()
        if self.colossal_group is not None:
            xs["k"], xs["v"] = keys.wait()
        return self._expand(xs["q"], xs["k"], xs["v"], inputs)

    def flush(self) -> None:
        """Finish all work that was launched and has not reached the module."""
        for handoff in self.handoffs.values():
            while handoff.queue:
                handoff.queue.pop().drop()
