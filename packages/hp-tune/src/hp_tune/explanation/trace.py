"""The predicted timeline as a trace for Perfetto or ``chrome://tracing``.

One process per kind of layer, with a track for each stream in each phase; backward begins where
forward ends, so that one layer reads from left to right. Times are those of one layer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hp_tune.cost.predict import Prediction, Timeline
from hp_tune.cost.schedule import Slot
from hp_tune.cost.term import Term
from hp_tune.output import write_text

__all__ = ["trace_object", "write_trace"]

TRACKS = {
    ("forward", "compute"): 1,
    ("forward", "network"): 2,
    ("backward", "compute"): 3,
    ("backward", "network"): 4,
}


def trace_object(prediction: Prediction, title: str) -> dict[str, Any]:
    """Return the JSON object of Chrome's trace event format; times are microseconds.

    Args:
        prediction: Its ``timelines`` are drawn; its ``terms`` say what each piece is made of.
        title: What was predicted; kept under ``otherData``.
    """
    events: list[dict[str, Any]] = []
    terms = _by_kind(prediction)
    for process, lines in enumerate(_by_layer(prediction), start=1):
        layer, count = lines[0].layer, lines[0].count
        events.append(_named("process_name", process, 0, f"{count} x {layer.describe()}"))
        begin = 0.0
        for line in lines:
            for resource in ("compute", "network"):
                track = TRACKS[line.phase, resource]
                events.append(_named("thread_name", process, track, f"{line.phase} {resource}"))
                events.append(
                    {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": track,
                     "args": {"sort_index": track}}
                )  # fmt: skip
            for slot in line.slots:
                term = terms.get((process, line.phase, slot.key.split(" #")[0]))
                events.append(_event(slot, line, process, begin, term))
            begin += max((slot.end for slot in line.slots), default=0.0)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"title": title, "predicted": "true", "writer": "hp-tune"},
    }


def write_trace(prediction: Prediction, title: str, path: Path) -> None:
    """Write the trace to ``path``; open it in https://ui.perfetto.dev."""
    text = json.dumps(trace_object(prediction, title), indent=1) + "\n"
    write_text(path, text, "--trace")


def _by_layer(prediction: Prediction) -> Iterator[list[Timeline]]:
    """Yield the phases of each kind of layer."""
    found: dict[int, list[Timeline]] = {}
    for line in prediction.timelines:
        found.setdefault(id(line.layer), []).append(line)
    yield from found.values()


def _by_kind(prediction: Prediction) -> dict[tuple[int, str, str], Term]:
    """Return the terms by number of the kind of layer, from 1, phase and name.

    Terms come kind by kind in the order of the timelines, forward before backward.
    """
    found: dict[tuple[int, str, str], Term] = {}
    kind, before = 1, "forward"
    for term in prediction.terms:
        kind += before == "backward" and term.phase == "forward"
        before = term.phase
        found[kind, term.phase, term.name] = term
    return found


def _named(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name}}


def _event(
    slot: Slot, line: Timeline, process: int, begin: float, term: Term | None
) -> dict[str, Any]:
    told: dict[str, Any] = {"exposed_us": round(slot.exposed * 1e6, 3)}
    if term is not None:
        told |= {
            "formula": term.formula,
            "source": term.source,
            "numbers": ", ".join(term.sources),
            **{key: float(f"{value:.6g}") for key, value in term.inputs},
        }
        if term.bytes:
            told["bytes"] = round(term.bytes / term.layers)
        if term.share_of_peak is not None:
            told["share_of_peak"] = round(term.share_of_peak, 4)
    return {
        "ph": "X",
        "name": slot.key,
        "cat": slot.resource,
        "pid": process,
        "tid": TRACKS[line.phase, slot.resource],
        "ts": round((begin + slot.start) * 1e6, 3),
        "dur": round((slot.end - slot.start) * 1e6, 3),
        "args": told,
    }
