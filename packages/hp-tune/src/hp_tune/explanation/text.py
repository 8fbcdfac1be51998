"""Print an explanation: for people with rich, for programs as one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_tune.cost.memory import GIB
from hp_tune.cost.term import Term
from hp_tune.explanation.explain import Explanation, Rival, layers_of, link_rate
from hp_tune.explanation.timeline import timeline_lines
from hp_tune.printing.tables import Table, milliseconds, new_console, new_table
from hp_tune.searching.ranking import Ranked

__all__ = ["explanation_json", "explanation_text"]

TOP = 3
"""Terms that are named for each rival; all of them with ``--rival``."""
PHASES = ("forward", "backward")


def explanation_text(explanation: Explanation, rival: Rival | None = None) -> None:
    """Print why the winner won; with ``rival``, every term in which that one differs."""
    result, best, out = explanation.result, explanation.best, new_console()
    workload, found = result.workload, explanation.best.prediction

    def line(text: str = "") -> None:
        out.print(text, soft_wrap=True)

    line(
        f"{explanation.label} is first of {len(result.ranking)} for {result.model.name} on "
        f"{result.cluster.name}: cp {workload.cp_size}, tp {workload.tp_size}, "
        f"sequence {workload.seq_len}, {workload.dtype}"
    )
    line(
        f"forward {milliseconds(found.forward * 1e3)} ms, backward "
        f"{milliseconds(found.backward * 1e3)} ms, of it exposed communication "
        f"{milliseconds(found.exposed_comm * 1e3)} ms; memory {best.memory.total / GIB:.1f} of "
        f"{best.memory.capacity / GIB:.1f} GiB ({best.memory.top()})"
    )
    for note in result.notes:
        line(f"note: {note}")
    ran = [ranked for ranked in result.ranking if ranked.measured is not None]
    if ran:
        line()
        out.print(_measured(ran, workload.cp_size))
    for phase in PHASES:
        line()
        line(f"{phase}, all layers: what the step waits for, and what each part of it takes")
        out.print(_waterfall([row for row in layers_of(found) if row[1].phase == phase]))
    for timeline in found.timelines:
        line()
        for row in timeline_lines(timeline):
            line(row)
    line()
    if rival is not None:
        _print_rival(out, explanation, rival)
    else:
        _print_rivals(line, explanation)
    line()
    line(f"margin   {_margin(explanation)}")
    for text in _flips(explanation):
        line(text)
    for text in _opportunities(explanation):
        line(text)


def explanation_json(explanation: Explanation, rival: Rival | None = None) -> dict[str, Any]:
    """Return everything as one JSON object; with ``rival`` only that one under ``rivals``."""
    result, best = explanation.result, explanation.best
    cp = result.workload.cp_size
    return {
        "model": {"name": result.model.name, "digest": result.model.digest},
        "cluster": {"name": result.cluster.name, "digest": result.cluster.digest},
        "workload": result.workload.model_dump(mode="json"),
        "winner": {
            "label": explanation.label,
            "config": best.config.model_dump(),
            "measured_ms": None if best.measured is None else best.ms,
            "forward_ms": best.prediction.forward * 1e3,
            "backward_ms": best.prediction.backward * 1e3,
            "exposed_comm_ms": best.prediction.exposed_comm * 1e3,
            "imbalance": best.prediction.imbalance,
            "memory_bytes": best.memory.total,
            "memory": dict(best.memory.terms),
        },
        "waterfall": [
            {**term_json(term), "layers": layers} for layers, term in layers_of(best.prediction)
        ],
        "timelines": [
            {
                "layer": line.layer.describe(),
                "count": line.count,
                "phase": line.phase,
                "slots": [
                    {
                        "name": slot.key,
                        "resource": slot.resource,
                        "start_ms": slot.start * 1e3,
                        "end_ms": slot.end * 1e3,
                        "exposed_ms": slot.exposed * 1e3,
                    }
                    for slot in line.slots
                ],
            }
            for line in best.prediction.timelines
        ],
        "rivals": [
            {
                "label": one.label,
                "rank": one.rank,
                "measured_ms": None if one.ranked.measured is None else one.ranked.ms,
                "ms": one.ms,
                "vs_best": one.vs_best,
                "differences": [
                    {"phase": d.phase, "name": d.name, "best_ms": d.best_ms, "rival_ms": d.rival_ms,
                     "ms": d.ms}
                    for d in one.differences
                ],
            }
            for one in (explanation.rivals if rival is None else (rival,))
        ],
        "margin": result.margin,
        "flips": [
            {"number": f.number, "value": f.value, "factor": f.factor, "at": f.at,
             "winner": f.winner.label(cp)}
            for f in explanation.flips
        ],
        "opportunities": [
            {"feature": o.feature, "label": o.label, "missing_in": o.missing_in, "ms": o.ms,
             "gain": o.gain, "new_best": o.is_new_best, "how": o.how}
            for o in explanation.opportunities
        ],
        "rejected": [
            {"label": config.label(cp), "rule": rejection.rule, "message": rejection.message,
             "hint": rejection.hint}
            for config, rejection in result.rejected
        ],
        "notes": list(result.notes),
    }  # fmt: skip


def term_json(term: Term) -> dict[str, Any]:
    """Return one addend with all that is known of it."""
    return {
        "phase": term.phase,
        "name": term.name,
        "resource": term.resource,
        "ms": term.seconds * 1e3,
        "exposed_ms": term.exposed * 1e3,
        "formula": term.formula,
        "inputs": dict(term.inputs),
        "bytes": term.bytes,
        "GBps": link_rate(term),
        "share_of_peak": term.share_of_peak,
        "source": term.source,
        "sources": list(term.sources),
    }


def _measured(ran: Sequence[Ranked], cp_size: int) -> Table:
    """Return how configurations ran beside what was predicted, the fastest first."""
    found = new_table("config", "measured ms", "from ms", "to ms", "predicted ms", "of predicted")
    for ranked in sorted(ran, key=lambda one: one.ms):
        assert ranked.measured is not None, "only what ran is here"
        low, high = ranked.measured.interval_ms
        predicted = ranked.prediction.seconds * 1e3
        found.add_row(
            ranked.config.label(cp_size), milliseconds(ranked.ms), milliseconds(low),
            milliseconds(high), milliseconds(predicted), f"x{ranked.ms / predicted:.3f}",
        )  # fmt: skip
    return found


def _waterfall(terms: Sequence[tuple[str, Term]]) -> Table:
    """Return the addends in the order in which they run, each with where the sum stands after it.

    The formula is that of one layer.
    """
    found = new_table(
        "term", "layers", "adds ms", "sum ms", "takes ms", "MiB", "GB/s", "of peak", "source",
        "formula",
    )  # fmt: skip
    total = 0.0
    for layers, term in terms:
        total += term.exposed * 1e3
        rate, peak = link_rate(term), term.share_of_peak
        found.add_row(
            term.name,
            layers,
            milliseconds(term.exposed * 1e3),
            milliseconds(total),
            milliseconds(term.seconds * 1e3),
            f"{term.bytes / 2**20:.4g}" if term.bytes else "",
            "" if rate is None else f"{rate:.4g}",
            "" if peak is None else f"{peak:.0%}",
            term.source,
            term.formula,
        )
    return found


def _print_rivals(line: Any, explanation: Explanation) -> None:
    line("why the others lost: the terms that cost each of them most, in ms against the winner")
    for rival in explanation.rivals:
        losses = [d for d in rival.differences if d.ms > 0]
        wins = sum(d.ms for d in rival.differences if d.ms < 0)
        told = ", ".join(f"{d.phase} {d.name} +{milliseconds(d.ms)}" for d in losses[:TOP])
        rest = sum(d.ms for d in losses[TOP:])
        told += f", {len(losses) - TOP} more +{milliseconds(rest)}" if losses[TOP:] else ""
        told += f"; shorter elsewhere by {milliseconds(-wins)}" if wins < 0 else ""
        line(f"  {rival.rank}  {rival.label}  x{rival.vs_best:.3f}: {told or 'equal in time'}")
    if not explanation.rivals:
        line("  no other configuration is valid")
    cp = explanation.result.workload.cp_size
    for config, rejection in explanation.result.rejected:
        line(f"  {rejection.rule}  {config.label(cp)}: {rejection.message}")


def _print_rival(out: Any, explanation: Explanation, rival: Rival) -> None:
    out.print(
        f"{rival.label}: {milliseconds(rival.ms)} ms, x{rival.vs_best:.3f} of {explanation.label}",
        soft_wrap=True,
    )
    found = new_table("phase", "term", "winner ms", "rival ms", "difference ms")
    for d in rival.differences:
        found.add_row(
            d.phase, d.name, milliseconds(d.best_ms), milliseconds(d.rival_ms), f"{d.ms:+.4g}"
        )
    out.print(found)


def _margin(explanation: Explanation) -> str:
    margin = explanation.result.margin
    if margin is None:
        return "no other configuration is valid"
    return f"{margin:.1%} to {explanation.rivals[0].label}"


def _flips(explanation: Explanation) -> list[str]:
    cp = explanation.result.workload.cp_size
    if explanation.result.margin is not None and not explanation.flips:
        return ["flip     no assumed number changes the winner between x0.3 and x3"]
    return [
        f"flip     {f.number} x{f.factor:g} ({f.value:g} -> {f.at:g}, assumed): then "
        f"{f.winner.label(cp)} is first"
        for f in explanation.flips
    ]


def _opportunities(explanation: Explanation) -> list[str]:
    found = []
    for o in explanation.opportunities:
        gain = f"saves {o.gain:.1%}" if o.gain > 0 else f"loses {-o.gain:.1%}"
        best = ", would be the new best" if o.is_new_best else ""
        found.append(
            f"if       {o.feature} ({o.label}): {milliseconds(o.ms)} ms, {gain}{best}. "
            f"Missing in the {o.missing_in}: {o.how}"
        )
    return found
