"""Configurations and launches of the pack and unpack kernels together, on an Ascend.

Nobody measures here: a launch is priced by `hp_tune.kernels.bandwidth`, whose time takes the place
of the copies around each exchange of heads. A point is a configuration, a launch of pack and one of
unpack; their times add up, so a whole space is three tables and a sum over them. Spaces of more
than `MOST_PRICED` points are sampled: TPE, and a pruner that drops what is slower than the best
before its last part is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hp_comm.kernels import catalog
from hp_tune.cost.halo import layer_config
from hp_tune.errors import UsageError
from hp_tune.files import sha256
from hp_tune.kernels.bandwidth import ASSUMED, estimate
from hp_tune.kernels.devices import Asked, vector_cores
from hp_tune.kernels.sampling import proposals
from hp_tune.kernels.shapes import ELEMENT_SIZE, Shape
from hp_tune.kernels.space import Space, refusal, space_of, start
from hp_tune.searching.ranking import Ranked
from hp_tune.steps import Step, no_step

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from optuna.trial import FrozenTrial

    from hp_tune.searching.result import Result

__all__ = ["MOST_PRICED", "MOST_SAMPLED", "Joint", "JointPoint", "search_joint"]

MOST_PRICED, MOST_SAMPLED = 20_000, 300


@dataclass(frozen=True, slots=True)
class JointPoint:
    """A configuration with launches; none where it exchanges no heads."""

    ranked: Ranked
    launches: Mapping[str, Mapping[str, int]]
    ms: float


@dataclass(frozen=True, slots=True)
class Joint:
    """What a joint search found.

    Attributes:
        size: Points of the space.
        recorded: Points that were priced and recorded.
        ranking: The fastest point of each configuration, the best first.
        note: What its numbers rest on.
    """

    size: int
    recorded: int
    ranking: tuple[JointPoint, ...]
    note: str = ASSUMED


@dataclass(frozen=True, slots=True)
class _Part:
    """One configuration: its time without copies, and those of each launch, ms."""

    ranked: Ranked
    base: float
    pack: NDArray[np.float64]
    unpack: NDArray[np.float64]


def search_joint(
    result: Result,
    device: str,
    *,
    study: Path | None = None,
    seed: int = 0,
    tell: Callable[[str], None] = lambda _: None,
    step: Step = no_step,
) -> Joint:
    """Price the configurations of ``result`` with every launch of the kernels on ``device``.

    Args:
        result: An analytic search.
        device: An Ascend, such as ``ascend910b3``.
        study: Journal file that keeps every priced point; None keeps nothing.
        seed: Of the sampler.
        tell: Receives one sentence when there is something to wait for or to repair.
        step: Receives what is priced or recorded, how many are done, and of how many.
    """
    try:
        asked = Asked.parse(device)
    except UsageError as error:
        raise UsageError(error.message.replace("--device", "--kernels"), error.hint) from None
    if asked.family != "ascend" or not asked.name:
        raise UsageError(
            f"--kernels ({device}) must be an Ascend, whose launches there is a model of",
            "such as ascend910b3; on other devices tune by measuring, with hp-tune kernels",
        )
    cores = vector_cores(asked.name)
    launches = list(space_of("ascend", cores))
    parts = []
    for done, ranked in enumerate(result.ranking):
        step(ranked.config.label(result.workload.cp_size), done, len(result.ranking))
        parts.append(_part(result, ranked, launches, cores))
    size = sum(len(part.pack) * len(part.unpack) for part in parts)
    whole = size <= MOST_PRICED
    points = list(_every(parts)) if whole else _sampled(parts, launches, cores, seed, step)
    best_of: dict[int, _Point] = {}
    for point in sorted(points, key=lambda point: (point[3], point[:3])):
        best_of.setdefault(point[0], point)
    found = []
    for place, pack, unpack, ms in best_of.values():
        part = parts[place]
        chosen = {"pack": launches[pack], "unpack": launches[unpack]} if len(part.pack) > 1 else {}
        found.append(JointPoint(part.ranked, chosen, ms))
    if study is not None:
        inputs = {
            "device": asked.name,
            "space": sha256(launches)[:16],
            "configs": sha256([part.ranked.config.model_dump() for part in parts])[:16],
            "base": sha256([part.base for part in parts])[:16],
            "seed": seed,
        }
        _record(study, inputs, parts, launches, points, tell, step)
    return Joint(size, len(points), tuple(found))


def _part(
    result: Result, ranked: Ranked, launches: Sequence[Mapping[str, int]], cores: int
) -> _Part:
    import numpy as np

    workload, config = result.workload, ranked.config
    copies = "copies for all_to_all"
    hidden = sum(t.exposed for t in ranked.prediction.terms if t.name.startswith(copies))
    base = (ranked.prediction.seconds - hidden) * 1e3
    pack, unpack = np.zeros(len(launches)), np.zeros(len(launches))
    degrees = {config.ulysses_degree, config.of_layers(slide=True).ulysses_degree}
    if degrees == {1} or workload.dtype not in ELEMENT_SIZE:
        return _Part(ranked, ranked.prediction.seconds * 1e3, np.zeros(1), np.zeros(1))
    for layer, count in result.model.layer_groups:
        if not layer.exchanges or layer.is_sparse:
            continue
        degree = layer_config(layer, config).ulysses_degree
        if degree == 1:
            continue
        heads = tuple(
            max(1, number // workload.tp_size)
            for number in (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        )
        shape = Shape(
            workload.seq_len // workload.cp_size, heads, layer.head_size, degree,
            workload.batch, workload.layout, workload.dtype,
        )  # fmt: skip
        times = count * (3 if workload.recompute else 2)  # each direction packs and unpacks once
        pack += times * np.array([_ms("pack", shape, launch, cores) for launch in launches])
        unpack += times * np.array([_ms("unpack", shape, launch, cores) for launch in launches])
    return _Part(ranked, base, pack, unpack)


def _ms(kernel: str, shape: Shape, launch: Mapping[str, int], cores: int) -> float:
    """Return what a launch takes; infinity if it does not fit on the chip."""
    if refusal(kernel, shape, launch, "ascend") is not None:
        return float("inf")
    return estimate(
        kernel,
        catalog.launches(kernel, shape.case(kernel), launch),
        num_bytes=shape.bytes(kernel),
        element_size=shape.element_size,
        cores=cores,
        double_buffered=bool(launch["multibuffer"]),
        by_element=False,
    ).ms


_Point = tuple[int, int, int, float]


def _every(parts: Sequence[_Part]) -> Iterator[_Point]:
    """Yield every point with its time, from one sum per configuration."""
    for place, part in enumerate(parts):
        total = (part.base + part.pack[:, None] + part.unpack[None, :]).tolist()
        for pack, row in enumerate(total):
            for unpack, ms in enumerate(row):
                yield place, pack, unpack, ms


def _sampled(
    parts: Sequence[_Part],
    launches: Sequence[Mapping[str, int]],
    cores: int,
    seed: int,
    step: Step,
) -> list[_Point]:
    """Return what TPE asks for, pruned points with a time of infinity."""
    everywhere = tuple(range(len(launches)))
    space = Space({"config": tuple(range(len(parts))), "pack": everywhere, "unpack": everywhere})
    untuned = start(space_of("ascend", cores), "ascend")
    first = launches.index(untuned) if untuned in launches else 0
    source = proposals(space, seed, {"config": 0, "pack": first, "unpack": first})
    asked = next(source)
    points: list[_Point] = []
    best = float("inf")
    while True:
        part = parts[asked["config"]]
        pack, unpack = (asked[key] % len(getattr(part, key)) for key in ("pack", "unpack"))
        ms = float("inf")
        if part.base + part.pack[pack] < best:  # else: slower than the best without its unpack
            ms = float(part.base + part.pack[pack] + part.unpack[unpack])
        best = min(best, ms)
        points.append((asked["config"], pack, unpack, ms))
        step("launches asked of TPE", len(points), MOST_SAMPLED)
        if len(points) >= MOST_SAMPLED:
            points.sort(key=lambda point: point[3])
            return list({point[:3]: point for point in reversed(points)}.values())
        asked = source.send(ms if ms < float("inf") else None)


def _record(
    path: Path,
    inputs: Mapping[str, Any],
    parts: Sequence[_Part],
    launches: Sequence[Mapping[str, int]],
    points: Sequence[_Point],
    tell: Callable[[str], None],
    step: Step,
) -> None:
    """Add the points that the study does not have, in one write."""
    from hp_tune.study.journal import in_one_write
    from hp_tune.study.place import JournalPlace
    from hp_tune.study.studies import study_in

    place = JournalPlace(path, tell)
    with place.exclusive() as storage:
        study = study_in(storage, str(path), "configurations and launches", inputs)
        known = {trial.user_attrs["point"] for trial in study.get_trials(deepcopy=False)}
        with in_one_write(storage):
            missing = [point for point in points if ":".join(map(str, point[:3])) not in known]
            study.add_trials(_trials(missing, parts, launches, step))


def _trials(
    points: Sequence[_Point],
    parts: Sequence[_Part],
    launches: Sequence[Mapping[str, int]],
    step: Step,
) -> Iterator[FrozenTrial]:
    for done, point in enumerate(points):
        if done % 100 == 0:
            step("points recorded", done, len(points))
        yield _trial(point, parts, launches)


def _trial(
    point: _Point, parts: Sequence[_Part], launches: Sequence[Mapping[str, int]]
) -> FrozenTrial:
    from optuna.distributions import IntDistribution
    from optuna.trial import TrialState, create_trial

    place, pack, unpack, ms = point
    part, last = parts[place], max(1, len(launches) - 1)
    fits = ms < float("inf")
    return create_trial(
        state=TrialState.COMPLETE if fits else TrialState.PRUNED,
        value=ms if fits else None,
        params={"config": place, "pack": pack, "unpack": unpack},
        distributions={
            "config": IntDistribution(0, max(1, len(parts) - 1)),
            "pack": IntDistribution(0, last),
            "unpack": IntDistribution(0, last),
        },
        user_attrs={
            "point": f"{place}:{pack}:{unpack}",
            "config": part.ranked.config.model_dump(),
            "launches": {"pack": launches[pack], "unpack": launches[unpack]},
            "source": "analytic",
        },
    )
