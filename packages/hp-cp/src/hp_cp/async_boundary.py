"""The boundary of `AsyncContextParallel`: what was sent ahead is claimed here, or sent now."""

from __future__ import annotations

import copy
import threading
import warnings
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hp_comm import Handle, gather_seq, preflight, seq_to_head
from hp_cp.core_boundary import Call, CPBoundary
from hp_cp.inputs import LABELS, LENGTH, Inputs, advise
from hp_cp.plan import HeadTable, Plan
from hp_mesh._torch import in_backward, local_shard
from hp_mesh.boundary import outside_compiled_code
from hp_mesh.handoff import Lane, Launched, is_pure_view, split_output
from hp_mesh.views import ViewRecipe, learn_view

if TYPE_CHECKING:
    from hp_cp.async_style import AsyncContextParallel

__all__ = ["AsyncBoundary", "HandoffHook", "warn_once"]

_warned: set[str] = set()
_warning = threading.Lock()


def warn_once(message: str) -> None:
    """Warn once in the life of the process; forty layers say it once."""
    with _warning:
        is_new = message not in _warned
        _warned.add(message)
    if is_new:
        warnings.warn(message, RuntimeWarning, stacklevel=4)


@dataclass
class _Learned:
    """What a call taught about one handoff.

    Attributes:
        recipe: How the argument is a view of the output.
        dims: ``(seq_dim, head_dim)`` of the argument.
        table: Heads of each Ulysses rank.
    """

    recipe: ViewRecipe
    dims: tuple[int, int]
    table: HeadTable


@dataclass(eq=False)
class _Handoff:
    """One of q, k, v between its projection and the boundary.

    Attributes:
        name: ``"q"``, ``"k"`` or ``"v"``.
        index: 0, 1 or 2.
        module: Type of the projection, for messages.
        learned: None until a call has shown how the output reaches the module.
        disarmed: Whether it was given up, because what arrived was something else.
        missing: Calls of the module before the projection ever ran; -1 once it has.
        lanes: Outputs on their way, by thread and by whether backward recomputes them.
    """

    name: str
    index: int
    module: str
    learned: _Learned | None = None
    disarmed: bool = False
    missing: int = 0
    lanes: dict[tuple[int, bool], Lane] = field(default_factory=dict)

    @property
    def lane(self) -> Lane:
        """Return the lane of the caller."""
        return self.lanes.setdefault((threading.get_ident(), in_backward()), Lane())

    def state(self, claimed: bool) -> str:
        """Return, in a word, what the ranks must have in common."""
        if claimed:
            return "sent ahead"
        return "given up" if self.disarmed else "unknown" if self.learned is None else "learned"

    def drop_all(self) -> None:
        """Finish all that was launched."""
        for lane in list(self.lanes.values()):
            lane.drop_all()

    def disarm(self) -> None:
        """Give this handoff up and finish what it launched."""
        self.disarmed = True
        self.drop_all()


class HandoffHook:
    """Forward hook of a projection: remembers its output, and launches once the view is known."""

    def __init__(self, boundary: AsyncBoundary, name: str, module: nn.Module) -> None:
        self.boundary = boundary
        self.name = name
        self.module = weakref.ref(module)
        boundary.hooks.append(weakref.ref(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> HandoffHook:
        # reached through its module, whose copy is therefore known already
        module: nn.Module = memo[id(self.module())]
        return HandoffHook(copy.deepcopy(self.boundary, memo), self.name, module)

    @outside_compiled_code
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hand ``output`` off; the projection returns it as it is."""
        self.boundary.hand_off(self.name, output)

    def remove(self) -> None:
        """Take the hook off its projection."""
        module = self.module()
        hooks: dict[int, Any] = {} if module is None else module._forward_hooks
        for key in [key for key, hook in hooks.items() if hook is self]:
            del hooks[key]


class AsyncBoundary(CPBoundary):
    """`AsyncContextParallel` around one module.

    Attributes:
        handoffs: By name; empty if the style fell back to the synchronous path.
        hooks: The hooks on the projections, weak: a model that is thrown away is freed at once,
            what it has under way included.
    """

    style: AsyncContextParallel

    def __init__(self, style: AsyncContextParallel, plan: Plan, device_mesh: DeviceMesh) -> None:
        super().__init__(style, plan, device_mesh)
        self.handoffs: dict[str, _Handoff] = {}
        self.hooks: list[weakref.ref[HandoffHook]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> AsyncBoundary:
        """Return a boundary on the same mesh; a copied model has projections of its own."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._calls = threading.local()
        twin.hooks = []
        twin.handoffs = {
            name: _Handoff(name, one.index, one.module) for name, one in self.handoffs.items()
        }
        return twin

    def add(self, name: str, projection: nn.Module) -> None:
        """Hand off what ``projection`` returns as ``name``."""
        self.handoffs[name] = _Handoff(name, LABELS.index(name), type(projection).__name__)
        projection.register_forward_hook(HandoffHook(self, name, projection))

    def remove_hooks(self) -> None:
        """Take all hooks off the projections and finish what was launched."""
        self.flush()
        while self.hooks:
            hook = self.hooks.pop()()
            if hook is not None:
                hook.remove()

    def flush(self) -> None:
        """Finish all work that was launched and has not reached the module."""
        for handoff in self.handoffs.values():
            handoff.drop_all()

    def hand_off(self, name: str, output: Any) -> None:
        """Remember ``output`` of a projection and start its exchange if its view is known."""
        handoff = self.handoffs[name]
        handoff.missing = -1
        lane = handoff.lane
        lane.tidy()
        if lane.is_wasteful():
            lane.closed = True
            # a recomputed projection without the module: what it would send, nobody waits for
            if not in_backward():
                self._give_up(handoff, "what was sent ahead does not reach the module every time")
        if handoff.disarmed or lane.closed:
            return
        found = split_output(output, self.style.qkv_split, handoff.index)
        if found is None:
            self._give_up(handoff, self._unusable(output))
            return
        y, part = found
        local = part.to_local() if isinstance(part, DTensor) else part
        if local.is_inference():
            warn_once(
                f"{self.where}: {name} handed off by {handoff.module}: inference_mode does not "
                "count changes in place, so it is exchanged synchronously there; torch.no_grad() "
                "lets it overlap"
            )
            return
        learned = handoff.learned
        view = None if learned is None else learned.recipe.apply(local)
        if learned is None or view is None:
            lane.add(Launched.of(y, part))
            return
        self._compare(handoff, learned, view, y)
        lane.add(Launched.of(y, part, self._launch(name, view, learned), view))

    def _unusable(self, output: Any) -> str:
        split = self.style.qkv_split
        if isinstance(output, DTensor):
            return "its output is a DTensor, which qkv_split does not cut"
        if isinstance(output, Tensor):
            return f"the last dim of its output {list(output.shape)} is not the sum of {split}"
        return f"its output is a {type(output).__name__}, not one tensor"

    def _compare(self, handoff: _Handoff, learned: _Learned, view: Tensor, y: Tensor) -> None:
        """Let the ranks compare what they are about to send."""
        seq_dim, _ = learned.dims
        preflight(
            self.group,
            f"{self.where}: {handoff.name} handed off by {handoff.module}",
            {
                LENGTH: view.size(seq_dim),
                "shape without its sequence dim": [
                    n for dim, n in enumerate(view.shape) if dim != seq_dim
                ],
                "dtype": view.dtype,
                "requires_grad": view.requires_grad,
            },
            call_index=1,  # the boundary's first call has been compared
            way_out=lambda differing: advise(self.plan, differing),
        )

    def _launch(self, name: str, x: Tensor, learned: _Learned) -> Handle[Tensor]:
        seq_dim, head_dim = learned.dims
        if self.ulysses_group is None:
            assert self.colossal_group is not None, "one rank has no handoffs"
            return gather_seq(
                x, self.colossal_group, seq_dim=seq_dim, dense=self.wants_dense, async_op=True
            )
        return seq_to_head(
            x,
            self.ulysses_group,
            seq_dim=seq_dim,
            head_dim=head_dim,
            heads=None if name == "q" else learned.table.kv_sent,
            dense=self.exchanges_dense,
            async_op=True,
        )

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Do as the synchronous boundary does, but wait for what was sent ahead."""
        try:
            return super().enter(module, args, kwargs)
        except BaseException:
            self.flush()  # also what was claimed: nobody will ask for it again
            raise

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        inputs = super()._read(args, kwargs)
        for name, handoff in self.handoffs.items():
            if not handoff.disarmed:
                self._claim(name, handoff, inputs)
            inputs.handoffs[name] = handoff.state(name in inputs.claimed)
        return inputs

    def _claim(self, name: str, handoff: _Handoff, inputs: Inputs) -> None:
        """Find the launched work of an argument, or learn where the argument comes from."""
        x = inputs.tensors[handoff.index]
        lane, learned = handoff.lane, handoff.learned
        source = lane.find(x)
        if source is None:
            # recomputed without its projection: what is under way belongs to another call
            if not in_backward() and (lane.expects() or (learned is None and lane.items)):
                self._give_up(handoff, "what reaches the module is another tensor")
            elif handoff.missing >= 0:
                self._miss(handoff)
            return
        known = learned is not None and (learned.dims, learned.table) == (inputs.dims, inputs.table)
        if known and source.handle is not None and source.matches(x):
            source.reached = True
            inputs.claimed[name] = source.handle
        else:
            self._learn(handoff, lane, source, inputs)

    def _learn(self, handoff: _Handoff, lane: Lane, source: Launched, inputs: Inputs) -> None:
        """Learn how the argument is a view of the output; if it is none, give up."""
        x = inputs.tensors[handoff.index]
        local = local_shard(x) if isinstance(x, DTensor) else x
        recipe = learn_view(source.part_like(x), local)
        pure = source.is_unchanged(x) and is_pure_view(x, source)
        lane.items.remove(source)
        source.drop()
        if recipe is None or not pure:
            self._give_up(handoff, "what reaches the module is not a view of it, unchanged")
        else:
            handoff.learned = _Learned(recipe, inputs.dims, inputs.table)

    def _miss(self, handoff: _Handoff) -> None:
        """Say that a projection does not seem to belong to the module (one call may come first)."""
        handoff.missing += 1
        if handoff.missing == 2:
            warn_once(
                f"{self.where}: {handoff.name} handed off by {handoff.module}: that module has not "
                f"run before the second call, so {handoff.name} is exchanged synchronously; pass "
                f"the module that {handoff.name} comes from"
            )

    def _give_up(self, handoff: _Handoff, reason: str) -> None:
        handoff.disarm()
        warn_once(
            f"{self.where}: {handoff.name} handed off by {handoff.module}: {reason}; it is "
            "exchanged synchronously from now on. Hand off the last module before attention, or "
            "put hp_cp.Handoff() behind the rotary embedding or norm and pass that"
        )

    def _send(self, inputs: Inputs) -> tuple[Tensor, ...]:
        if not inputs.claimed:
            return super()._send(inputs)
        xs = dict(zip(LABELS, inputs.locals, strict=True))
        if self.ulysses_group is None:
            self._wait_for_rows(xs, inputs)
        else:
            self._wait_for_heads(xs, inputs)
        for name in inputs.claimed:
            handoff = self.handoffs[name]
            for item in [item for item in handoff.lane.items if item.reached]:
                handoff.lane.items.remove(item)
                item.drop()
        return self.expand(xs["q"], xs["k"], xs["v"], inputs)

    def _wait_for_rows(self, xs: dict[str, Tensor], inputs: Inputs) -> None:
        """Colossal: gather what was not sent ahead, then wait for what was."""
        assert self.colossal_group is not None, "one rank has no handoffs"
        self.keep_shards(inputs, xs["k"], xs["v"])
        late = [name for name in ("k", "v") if name not in inputs.claimed]
        if late:
            rows = gather_seq(
                [xs[name] for name in late],
                self.colossal_group,
                seq_dim=inputs.dims[0],
                dense=self.wants_dense,
            )
            xs.update(zip(late, rows, strict=True))
        for name, handle in inputs.claimed.items():
            xs[name] = handle.wait()

    def _wait_for_heads(self, xs: dict[str, Tensor], inputs: Inputs) -> None:
        """Ulysses and Hybrid; backward launches in the reverse order of these waits."""
        assert self.ulysses_group is not None, "the caller has looked"
        seq_dim, head_dim = inputs.dims
        late = [name for name in LABELS if name not in inputs.claimed]
        if late:
            heads = seq_to_head(
                [xs[name] for name in late],
                self.ulysses_group,
                seq_dim=seq_dim,
                head_dim=head_dim,
                heads=[None if name == "q" else inputs.table.kv_sent for name in late],
                dense=self.exchanges_dense,
            )
            xs.update(zip(late, heads, strict=True))
        if self.colossal_group is None:
            for name, handle in inputs.claimed.items():
                xs[name] = handle.wait()
            return
        for name in [name for name in ("k", "v") if name in inputs.claimed]:
            xs[name] = inputs.claimed[name].wait()
        self.keep_shards(inputs, xs["k"], xs["v"])
        # the gather runs while q is still on its way
        rows = gather_seq(
            (xs["k"], xs["v"]),
            self.colossal_group,
            seq_dim=seq_dim,
            dense=self.wants_dense,
            async_op=True,
        )
        if "q" in inputs.claimed:
            xs["q"] = inputs.claimed["q"].wait()
        xs["k"], xs["v"] = rows.wait()
