"""A boundary that takes handoffs: what is sent ahead of the call, and claimed by it, or dropped.

A handoff has a name (the argument) and a module whose output becomes that argument. The first call
learns how the output reaches the boundary (`hp_mesh.handoff`); from then on the work starts when
the output exists. What a handoff may be given up for is decided by the order of calls alone, which
is the same on all ranks.
"""

from __future__ import annotations

import copy
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hp_mesh._torch import in_backward, local_shard
from hp_mesh.geometry import ViewRecipe, learn_view
from hp_mesh.handoff import Handoff, Lane, Launched, Waitable, is_pure_view, split_output
from hp_mesh.overrides import outside_compiled_code, unseen_by_checkpoints

__all__ = ["HandoffState", "TakesHandoffs", "warn_once"]

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
        context: What else the work depends on, as the boundary said.
    """

    recipe: ViewRecipe
    context: Hashable


@dataclass(eq=False)
class HandoffState:
    """One argument between the module it comes from and the boundary.

    Attributes:
        name: Name of the argument.
        module: Type of the module, for messages.
        learned: None until a call has shown how the output reaches the module.
        disarmed: Whether it was given up, because what arrived was something else.
        missing: Calls of the boundary before that module ever ran; -1 once it has.
        lanes: Outputs on their way, by thread and by whether backward recomputes them.
    """

    name: str
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


class _Hook:
    """Forward hook of a module: remembers its output, and launches once the view is known."""

    def __init__(self, boundary: TakesHandoffs, name: str, module: nn.Module) -> None:
        self.boundary = boundary
        self.name = name
        self.module = weakref.ref(module)
        boundary.hooks.append(weakref.ref(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        # reached through its module, whose copy is therefore known already
        module: nn.Module = memo[id(self.module())]
        return _Hook(copy.deepcopy(self.boundary, memo), self.name, module)

    @outside_compiled_code
    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Hand ``output`` off; the module returns it as it is."""
        work = None
        if isinstance(module, Handoff):
            work = args[1] if len(args) > 1 else kwargs.get("work")
        self.boundary.hand_off(self.name, output, work)

    def remove(self) -> None:
        """Take the hook off its module."""
        module = self.module()
        if module is None:
            return
        hooks = module._forward_hooks
        for key in [key for key, hook in hooks.items() if hook is self]:
            del hooks[key]
            module._forward_hooks_with_kwargs.pop(key, None)


class TakesHandoffs(ABC):
    """What a boundary with handoffs has, beside `hp_mesh.boundary.Boundary`.

    Attributes:
        where: Name of the style.
        handoffs: By name; empty if everything is synchronous.
        hooks: The hooks on the modules, weak: a model that is thrown away is freed at once, what it
            has under way included.
        advice: The way out of an argument that is not its module's output.
    """

    where: str
    advice: str
    takes_detached = False
    """Whether an argument may be detached on its way; the boundary then detaches the result."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.handoffs: dict[str, HandoffState] = {}
        self.hooks: list[weakref.ref[_Hook]] = []

    @abstractmethod
    def launch_ahead(self, name: str, x: Tensor, context: Any, work: Any) -> Waitable:
        """Start the exchange of argument ``name``, which will be ``x``; ``work`` came with it."""

    @abstractmethod
    def compare_ahead(self, handoff: HandoffState, x: Tensor, context: Any, work: Any) -> None:
        """Let the ranks compare what they are about to send."""

    def split_handoff(self, name: str, output: Any) -> tuple[Tensor, Tensor] | None:
        """Return ``(y, part)``, what a module returned and what of it is handed off, or None."""
        return split_output(output, None, 0)

    def unusable(self, output: Any) -> str:
        """Say why ``output`` is no handoff."""
        return f"its output is a {type(output).__name__}, not one tensor"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a boundary on the same mesh; a copied model has modules of its own."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__, _calls=threading.local(), hooks=[])
        twin.handoffs = {n: HandoffState(n, one.module) for n, one in self.handoffs.items()}
        return twin

    def add(self, name: str, module: nn.Module) -> None:
        """Hand off what ``module`` returns as ``name``."""
        self.handoffs[name] = HandoffState(name, type(module).__name__)
        module.register_forward_hook(_Hook(self, name, module), with_kwargs=True)

    def remove_hooks(self) -> None:
        """Take all hooks off the modules and finish what was launched."""
        self.flush()
        while self.hooks:
            hook = self.hooks.pop()()
            if hook is not None:
                hook.remove()

    def flush(self) -> None:
        """Finish all work that was launched and has not reached the boundary."""
        for handoff in self.handoffs.values():
            handoff.drop_all()

    @unseen_by_checkpoints
    def hand_off(self, name: str, output: Any, work: object = None) -> None:
        """Remember ``output`` of a module and start its work if its view is known."""
        handoff = self.handoffs[name]
        handoff.missing = -1
        lane = handoff.lane
        lane.tidy()
        if lane.is_wasteful():
            lane.closed = True
            # a recomputed module without the boundary: what it would send, nobody waits for
            if not in_backward():
                self.give_up(handoff, "what was sent ahead does not reach the module every time")
        if handoff.disarmed or lane.closed:
            return
        found = self.split_handoff(name, output)
        if found is None:
            self.give_up(handoff, self.unusable(output))
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
        self.compare_ahead(handoff, view, learned.context, work)
        launched = self.launch_ahead(name, view, learned.context, work)
        item = Launched.of(y, part, launched, view)
        item.work = work
        lane.add(item)

    def claim(
        self, name: str, x: Tensor, context: Hashable, work: object = None
    ) -> Waitable | None:
        """Return what was started for argument ``x``, or learn where ``x`` comes from."""
        handoff = self.handoffs[name]
        if handoff.disarmed:
            return None
        lane, learned = handoff.lane, handoff.learned
        source = lane.find(x, detached=self.takes_detached)
        if source is None:
            # recomputed without its module: what is under way belongs to another call
            if not in_backward() and (lane.expects() or (learned is None and lane.items)):
                self.give_up(handoff, "what reaches the module is another tensor")
            elif handoff.missing >= 0:
                self._miss(handoff)
            return None
        known = learned is not None and learned.context == context
        matches = source.matches(x, detached=self.takes_detached)
        if known and source.handle is not None and matches:
            if source.work is not work:
                self.give_up(handoff, "the boundary is called with other work than it came with")
                return None
            source.reached = True
            return source.handle
        self._learn(handoff, lane, source, x, context)
        return None

    def release(self, names: Iterable[str]) -> None:
        """Forget what has been claimed and waited for."""
        for name in names:
            lane = self.handoffs[name].lane
            for item in [item for item in lane.items if item.reached]:
                lane.items.remove(item)
                item.drop()

    def give_up(self, handoff: HandoffState, reason: str) -> None:
        """Exchange this argument synchronously from now on, and say so once."""
        handoff.disarm()
        warn_once(
            f"{self.where}: {handoff.name} handed off by {handoff.module}: {reason}; it is "
            f"exchanged synchronously from now on. {self.advice}"
        )

    def _learn(
        self, handoff: HandoffState, lane: Lane, source: Launched, x: Tensor, context: Hashable
    ) -> None:
        """Learn how the argument is a view of the output; if it is none, give up."""
        local = local_shard(x) if isinstance(x, DTensor) else x
        recipe = learn_view(source.part_like(x), local)
        pure = is_pure_view(x, source, detached=self.takes_detached) and source.is_unchanged(x)
        lane.items.remove(source)
        source.drop()
        if recipe is None or not pure:
            self.give_up(handoff, "what reaches the module is not a view of it, unchanged")
        else:
            handoff.learned = _Learned(recipe, context)

    def _miss(self, handoff: HandoffState) -> None:
        """Say that a module does not seem to belong to the boundary (one call may come first)."""
        handoff.missing += 1
        if handoff.missing == 2:
            warn_once(
                f"{self.where}: {handoff.name} handed off by {handoff.module}: that module has not "
                f"run before the second call, so {handoff.name} is exchanged synchronously; pass "
                f"the module that {handoff.name} comes from"
            )
