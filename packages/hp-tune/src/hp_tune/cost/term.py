"""One addend of a prediction, and how pieces of work become addends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, NamedTuple

from hp_tune.clusters.cluster import Cluster, Number, Source
from hp_tune.cost.schedule import Slot, Task, schedule

__all__ = ["Phase", "Piece", "Resource", "Term", "chained", "run", "source_of"]

Phase = Literal["forward", "backward"]
Resource = Literal["compute", "network", "memory"]


@dataclass(frozen=True, slots=True)
class Term:
    """One addend of a prediction.

    Attributes:
        name: What runs, such as ``all_to_all q,k,v``.
        seconds: Time on its resource, over all layers that it stands for.
        exposed: Part of it that the step waits for; less than ``seconds`` where it is overlapped.
        bytes: Bytes that leave a rank (network) or move in memory (memory), over those layers.
        formula: How ``seconds`` of one layer follows from the numbers.
        inputs: The numbers of the formula by name, of one layer.
        share_of_peak: What of the link's or device's peak is reached; None where none applies.
        sources: Names of the cluster's numbers behind it.
        source: The weakest of theirs: ``assumed`` before ``measured`` before ``spec``.
    """

    name: str
    phase: Phase
    resource: Resource
    layers: int
    seconds: float
    exposed: float
    bytes: float
    formula: str
    sources: tuple[str, ...]
    inputs: tuple[tuple[str, float], ...] = ()
    share_of_peak: float | None = None
    source: Source = "assumed"


class Piece(NamedTuple):
    """Work of one layer before it is known when it runs; ``after`` names pieces that it needs.

    ``slows`` is how much longer kernels take while this collective runs, if that is its own.
    """

    name: str
    resource: Resource
    seconds: float
    formula: str
    sources: tuple[str, ...]
    inputs: Mapping[str, float] = MappingProxyType({})
    bytes: float = 0.0
    share_of_peak: float | None = None
    after: tuple[str, ...] = ()
    key: str = ""
    slows: float | None = None

    @property
    def id(self) -> str:
        """Key within a phase; pieces of several head groups share a name."""
        return self.key or self.name

    def waiting(self, after: tuple[str, ...]) -> Piece:
        """Return the same work, to be done after other pieces."""
        return self._replace(after=after)


def chained(pieces: Iterable[Piece], after: tuple[str, ...] = ()) -> list[Piece]:
    """Return the pieces one after another, the first of them after ``after``."""
    found: list[Piece] = []
    for piece in pieces:
        found.append(piece.waiting(after))
        after = (piece.id,)
    return found


def run(
    pieces: Sequence[Piece],
    phase: Phase,
    layers: int,
    slowdown: float,
    sources: Mapping[str, Source],
) -> tuple[list[Term], list[Slot]]:
    """Schedule the pieces of one layer; return their terms over ``layers``, and the timeline.

    Pieces that share a name (of several head groups) become one term.
    """
    timed = [piece for piece in pieces if piece.seconds > 0]
    kept = {piece.id for piece in timed}
    before = {piece.id: piece.after for piece in pieces if piece.id not in kept}

    def real(keys: tuple[str, ...]) -> tuple[str, ...]:
        """Replace what takes no time by what it waits for."""
        found: list[str] = []
        for key in keys:
            found += [key] if key in kept else real(before.get(key, ()))
        return tuple(dict.fromkeys(found))

    slots = schedule(
        [
            Task(
                piece.id,
                "network" if piece.resource == "network" else "compute",
                piece.seconds,
                real(piece.after),
                piece.slows,
            )
            for piece in timed
        ],
        slowdown,
    )
    terms: dict[str, Term] = {}
    for piece, slot in zip(timed, slots, strict=True):
        old = terms.get(piece.name)
        if old is not None:
            terms[piece.name] = replace(
                old,
                seconds=old.seconds + piece.seconds * layers,
                exposed=old.exposed + slot.exposed * layers,
                bytes=old.bytes + piece.bytes * layers,
            )
            continue
        terms[piece.name] = Term(
            name=piece.name,
            phase=phase,
            resource=piece.resource,
            layers=layers,
            seconds=piece.seconds * layers,
            exposed=slot.exposed * layers,
            bytes=piece.bytes * layers,
            formula=piece.formula,
            sources=piece.sources,
            inputs=tuple(piece.inputs.items()),
            share_of_peak=piece.share_of_peak,
            source=_weakest(sources, piece.sources),
        )
    return list(terms.values()), slots


def source_of(cluster: Cluster, dtype: str) -> dict[str, Source]:
    """Return the source of each number of a cluster, by the names that terms use."""
    found: dict[str, Source] = {}
    parts = [("device", cluster.device), *((f"tiers.{t.name}", t) for t in cluster.tiers)]
    for where, described in parts:
        for key, value in described:
            if isinstance(value, Number) or hasattr(value, "for_ranks"):
                found[f"{where}.{key}"] = value.source
    found |= {f"collectives.{times.name}": times.source for times in cluster.collectives}
    peak = cluster.device.peak_TFLOPS.get(dtype)  # type: ignore[call-overload]
    if peak is not None:
        found["device.peak_TFLOPS"] = peak.source
    return found


def _weakest(sources: Mapping[str, Source], names: Iterable[str]) -> Source:
    found = {sources.get(name, "assumed") for name in names}
    order: tuple[Source, ...] = ("assumed", "measured", "spec")
    return next((source for source in order if source in found), "assumed")
