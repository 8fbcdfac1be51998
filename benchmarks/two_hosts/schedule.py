"""The best schedule of a mode: what its data dependencies let hide, given measured times.

A step is a graph of tasks, each on one resource that does one thing at a time: the rank's compute,
the slow link, or the link inside a host. The ranks are alike, so one rank stands for all. A task
starts as early as it can; of those that can start together, the one with the longest way to the end
goes first. The schedule found can be carried out, so the bound is never too good.

What the mode *cannot* do is in its graph: sync is one chain; async sends each of q, k, v behind the
projections that follow, head groups send each group behind the attention of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

COMPUTE, SLOW, LOCAL = "compute", "slow link", "local link"


@dataclass(frozen=True)
class Task:
    """One piece of a step: what it needs, what it occupies, and for how many ms."""

    name: str
    resource: str
    ms: float
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """When each task runs.

    Attributes:
        spans: ``(start, end)`` in ms, by name.
        wall: End of the last task.
        compute: Sum of the compute tasks.
        transfers: Sum of the tasks on links.
    """

    spans: Mapping[str, tuple[float, float]]
    wall: float
    compute: float
    transfers: float

    @property
    def exposed(self) -> float:
        """Wall time beyond compute."""
        return self.wall - self.compute

    @property
    def hideable(self) -> float:
        """Transfer time that the schedule hides behind compute or behind other links."""
        return self.transfers - self.exposed


def simulate(tasks: Sequence[Task]) -> Schedule:
    """Run ``tasks``, given in an order in which each comes after what it needs."""
    tails = _tails(tasks)
    free = {task.resource: 0.0 for task in tasks}
    spans: dict[str, tuple[float, float]] = {}
    left = list(tasks)
    while left:
        ready = [task for task in left if all(name in spans for name in task.needs)]

        def start(task: Task) -> float:
            return max([free[task.resource], *(spans[name][1] for name in task.needs)])

        task = min(ready, key=lambda one: (start(one), -tails[one.name]))
        begin = start(task)
        spans[task.name] = (begin, begin + task.ms)
        free[task.resource] = begin + task.ms
        left.remove(task)
    compute = sum(task.ms for task in tasks if task.resource == COMPUTE)
    wall = max(end for _, end in spans.values())
    return Schedule(spans, wall, compute, sum(task.ms for task in tasks) - compute)


def _tails(tasks: Sequence[Task]) -> dict[str, float]:
    """Return the longest way from the start of each task to the end of the step."""
    tails = {task.name: task.ms for task in tasks}
    for task in reversed(tasks):
        for name in task.needs:
            own = next(one.ms for one in tasks if one.name == name)
            tails[name] = max(tails[name], own + tails[task.name])
    return tails


@dataclass
class _Graph:
    """Tasks in the making; times are looked up by the name of a piece."""

    pieces: Mapping[str, float]
    links: Mapping[str, str]
    tasks: list[Task] = field(default_factory=list)

    def add(self, name: str, piece: str, *needs: str) -> str:
        """Add a task that takes as long as ``piece`` and return its name."""
        resource = self.links.get(piece.split("/")[0], COMPUTE)
        self.tasks.append(Task(name, resource, self.pieces[piece], needs))
        return name

    def chain(self, pieces: Sequence[tuple[str, str]], *needs: str) -> str:
        """Add tasks one after the other."""
        last = needs
        for name, piece in pieces:
            last = (self.add(name, piece, *last),)
        return last[0]


LINKS: dict[str, dict[str, str]] = {
    "ulysses": {"swap 1": SLOW, "swap 3": SLOW},
    "hybrid": {"swap 1": LOCAL, "swap 3": LOCAL, "gather 2": SLOW, "reduce 2": SLOW},
    "colossal": {"gather 1": SLOW, "gather 2": SLOW, "reduce 1": SLOW, "reduce 2": SLOW},
}
"""The link that each exchange of a mode occupies; the number says how many tensors it moves."""

PROJECTIONS = [(f"{name} projection", "projection forward") for name in "qkv"]
PROJECTIONS_BACK = [(f"{name} projection back", "projection backward") for name in "vkq"]


def wires_of(family: str, kind: str, groups: int) -> list[str]:
    """Return the pieces of the links that a mode uses, each once; ``groups`` parts of each."""
    swap, gather = {
        ("ulysses", "async"): (["swap 1"], []),
        ("hybrid", "async"): (["swap 1"], ["gather 2", "reduce 2"]),
        ("colossal", "async"): ([], ["gather 1", "reduce 1"]),
        ("ulysses", "sync"): (["swap 3", "swap 1"], []),
        ("hybrid", "sync"): (["swap 3", "swap 1"], ["gather 2", "reduce 2"]),
        ("colossal", "sync"): ([], ["gather 2", "reduce 2"]),
    }[family, "sync" if kind == "groups" else kind]
    return [f"{piece}/{groups}" for piece in (*swap, *gather)]


def step(family: str, kind: str, groups: int, pieces: Mapping[str, float]) -> list[Task]:
    """Return the tasks of forward and backward of the block.

    Args:
        family: ``"ulysses"``, ``"hybrid"`` or ``"colossal"``.
        kind: ``"sync"``, ``"async"`` or ``"groups"``.
        groups: Number of head groups, 1 unless ``kind`` is ``"groups"``.
        pieces: ms of each piece: those of `wires_of`, the projections, the output projection and
            ``attention forward/<groups>``, ``attention backward/<groups>``.
    """
    graph = _Graph(pieces, LINKS[family])
    if kind == "sync":
        _sync(graph, family)
    elif kind == "async":
        _async(graph, family)
    else:
        _grouped(graph, family, groups)
    return graph.tasks


def _output(graph: _Graph, *needs: str) -> str:
    return graph.chain([("o", "output forward"), ("o back", "output backward")], *needs)


def _sync(graph: _Graph, family: str) -> None:
    swaps, gathers = family != "colossal", family != "ulysses"
    way = PROJECTIONS + [("qkv", "swap 3/1")] * swaps + [("kv", "gather 2/1")] * gathers
    way += [("attention", "attention forward/1")] + [("out", "swap 1/1")] * swaps
    last = _output(graph, graph.chain(way))
    back = [("d out", "swap 1/1")] * swaps + [("attention back", "attention backward/1")]
    back += [("d kv", "reduce 2/1")] * gathers + [("d qkv", "swap 3/1")] * swaps
    graph.chain(back + PROJECTIONS_BACK, last)


def _async(graph: _Graph, family: str) -> None:
    arrived = []
    previous: tuple[str, ...] = ()
    for name, piece in PROJECTIONS:
        previous = (graph.add(name, piece, *previous),)
        if family != "colossal":
            arrived.append(graph.add(name[0], "swap 1/1", *previous))
        elif name[0] != "q":
            arrived.append(graph.add(name[0], "gather 1/1", *previous))
    if family == "hybrid":  # the gather starts at the module, so behind all projections
        arrived.append(graph.add("kv", "gather 2/1", *arrived[1:], *previous))
    way = [("attention", "attention forward/1")] + [("out", "swap 1/1")] * (family != "colossal")
    last = _output(graph, graph.chain(way, *arrived, *previous))
    if family != "colossal":
        last = graph.add("d out", "swap 1/1", last)
    last = graph.add("attention back", "attention backward/1", last)
    summed = graph.add("d kv", "reduce 2/1", last) if family == "hybrid" else last
    for name, piece in PROJECTIONS_BACK:
        needs = last if name[0] == "q" else summed
        if family != "colossal":
            needs = graph.add(f"d {name[0]}", "swap 1/1", needs)
        elif name[0] != "q":
            needs = graph.add(f"d {name[0]}", "reduce 1/1", needs)
        graph.add(name, piece, needs)


def _grouped(graph: _Graph, family: str, groups: int) -> None:
    swaps, gathers = family != "colossal", family != "ulysses"
    produced = graph.chain(PROJECTIONS)
    outs = []
    for i in range(groups):
        way = [(f"qkv {i}", f"swap 3/{groups}")] * swaps
        way += [(f"kv {i}", f"gather 2/{groups}")] * gathers
        way += [(f"attention {i}", f"attention forward/{groups}")]
        way += [(f"out {i}", f"swap 1/{groups}")] * swaps
        outs.append(graph.chain(way, produced))
    last = _output(graph, *outs)
    computed, returned = [], []
    for i in reversed(range(groups)):
        way = [(f"d out {i}", f"swap 1/{groups}")] * swaps
        computed.append(
            graph.chain([*way, (f"attention back {i}", f"attention backward/{groups}")], last)
        )
        way = [(f"d kv {i}", f"reduce 2/{groups}")] * gathers
        way += [(f"d qkv {i}", f"swap 3/{groups}")] * swaps
        returned.append(graph.chain(way, computed[-1]))
    for name, piece in PROJECTIONS_BACK:
        # colossal: dq never moves
        graph.add(name, piece, *(computed if family == "colossal" and name[0] == "q" else returned))
