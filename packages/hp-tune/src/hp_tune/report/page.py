"""The page: what won and why, with every number that it rests on.

Nothing is loaded from anywhere and there is no script: the file can be mailed, archived and opened
offline, and the same search gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files

from hp_tune.cost.memory import GIB
from hp_tune.cost.term import Term
from hp_tune.explanation.explain import Explanation
from hp_tune.printing.tables import milliseconds
from hp_tune.report import charts, html, sections
from hp_tune.report.lengths import AtLength
from hp_tune.report.numbers import numbers_table, provenance_table
from hp_tune.report.sections import label_of

__all__ = ["report_html"]

CONTENTS = (
    ("ranking", "Ranking"),
    ("lengths", "Sequence lengths"),
    ("waterfall", "Where the time goes"),
    ("timeline", "Timeline"),
    ("bytes", "Bytes"),
    ("memory", "Memory"),
    ("pareto", "Time and memory"),
    ("flips", "What would change it"),
    ("rejections", "Rejections"),
    ("numbers", "Numbers and sources"),
    ("provenance", "Provenance"),
)


def report_html(explanation: Explanation, lengths: Sequence[AtLength]) -> str:
    """Return the page as one string of HTML.

    Args:
        explanation: From `hp_tune.explain`.
        lengths: The same search at several lengths, ascending; its own among them.
    """
    result = explanation.result
    title = f"{explanation.label}: {result.model.name} on {result.cluster.name}"
    style = (files("hp_tune.report") / "page.css").read_text(encoding="utf-8")
    links = "".join(f'<a href="#{anchor}">{escape(name)}</a>' for anchor, name in CONTENTS)
    parts = [
        _head(explanation),
        f"<nav>{links}</nav>",
        _ranking(explanation),
        _lengths(explanation, lengths),
        sections.waterfall(explanation),
        sections.timeline(explanation),
        sections.sent(explanation),
        sections.memory(explanation),
        sections.pareto(explanation),
        sections.flips(explanation),
        sections.rejections(explanation),
        html.section("numbers", "Numbers and sources", numbers_table(explanation)),
        html.section("provenance", "Provenance", provenance_table(explanation)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>hp-tune: {escape(title)}</title><style>{style}</style></head>\n"
        f"<body>{chr(10).join(parts)}</body></html>\n"
    )


def _head(explanation: Explanation) -> str:
    result, best = explanation.result, explanation.best
    workload, margin = result.workload, result.margin
    ahead = "the only valid one" if margin is None else f"{margin:.1%}"
    return (
        f"<h1>{escape(explanation.label)}</h1>"
        + html.paragraph(
            f"is the fastest of {len(result.ranking)} valid configurations of context parallelism "
            f"for {result.model.name} on {result.cluster.name}, as predicted.",
            "lead",
        )
        + html.paragraph(
            f"{len(result.model.layers)} layers, {result.cluster.description}; cp "
            f"{workload.cp_size}, tp {workload.tp_size}, sequence {workload.seq_len}, batch "
            f"{workload.batch}, {workload.dtype}, {workload.layout}, "
            f"{'causal' if workload.causal else 'not causal'}"
            f"{', activations recomputed' if workload.recompute else ''}",
            "soft",
        )
        + html.cards(
            [
                (f"{milliseconds(best.prediction.forward * 1e3)} ms", "forward"),
                (f"{milliseconds(best.prediction.backward * 1e3)} ms", "backward"),
                (f"{milliseconds(best.prediction.exposed_comm * 1e3)} ms", "exposed communication"),
                (f"{best.memory.total / GIB:.1f} GiB",
                 f"memory of {best.memory.capacity / GIB:.1f}"),
                (ahead, "margin"),
            ]
        )
        + "".join(html.paragraph(f"Note: {note}", "soft") for note in result.notes)
    )  # fmt: skip


def _ranking(explanation: Explanation) -> str:
    result = explanation.result
    best = explanation.best.prediction.seconds
    rows = [
        (
            html.number(rank), label_of(explanation, ranked), ranked.prediction.forward * 1e3,
            ranked.prediction.backward * 1e3, html.number(ranked.prediction.seconds / best, 3),
            ranked.prediction.exposed_comm * 1e3, html.number(ranked.prediction.imbalance, 3),
            html.number(ranked.memory.total / GIB, 1),
        )
        for rank, ranked in enumerate(result.ranking, start=1)
    ]  # fmt: skip
    bars = [(label_of(explanation, r), _by_kind(r.prediction.terms)) for r in result.ranking]
    headers = ("rank", "configuration", "forward ms", "backward ms", "vs best", "exposed ms",
               "imbalance", "memory GiB")  # fmt: skip
    return html.section(
        "ranking",
        "Ranking",
        html.figure(
            charts.stacked_bars(bars, "ms", "Time of every valid configuration"),
            "What a step waits for, forward and backward over all layers, per micro-batch on the "
            "slowest rank. Dense layers, optimizer and FSDP are the same for all and left out.",
        ),
        html.table(headers, rows, best=0),
        _measured(explanation),
        *(
            html.paragraph(
                f"{rival.label} loses by {milliseconds(rival.ms - best * 1e3)} ms: "
                + ", ".join(
                    f"{d.phase} {d.name} {d.ms:+.4g}" for d in rival.differences[:3] if d.ms > 0
                )
                + ".",
                "soft",
            )
            for rival in explanation.rivals[:5]
        ),
    )


def _measured(explanation: Explanation) -> str:
    """Return how configurations ran beside what was predicted; nothing where none ran."""
    ran = [ranked for ranked in explanation.result.ranking if ranked.measured is not None]
    rows = []
    for ranked in sorted(ran, key=lambda one: one.ms):
        assert ranked.measured is not None, "only what ran is here"
        low, high = ranked.measured.interval_ms
        predicted = ranked.prediction.seconds * 1e3
        rows.append(
            (label_of(explanation, ranked), ranked.ms, low, high, predicted,
             html.number(ranked.ms / predicted, 3), "yes" if ranked.in_finals else "")
        )  # fmt: skip
    headers = ("configuration", "measured ms", "from ms", "to ms", "predicted ms", "of predicted",
               "in finals")  # fmt: skip
    return f"<h3>Measured</h3>{html.table(headers, rows, best=0)}" if rows else ""


def _by_kind(terms: Sequence[Term]) -> dict[str, float]:
    """Return exposed milliseconds by what is done; every kind is there, so that colours agree."""
    found = dict.fromkeys(("attention", "communication", "projections", "copies"), 0.0)
    for term in terms:
        kind = "attention"
        if term.resource == "network":
            kind = "communication"
        elif "projection" in term.name:
            kind = "projections"
        elif term.name.startswith("copies"):
            kind = "copies"
        found[kind] += term.exposed * 1e3
    return found


def _drawn(times: Mapping[int, Mapping[str, float]]) -> list[str]:
    """Return the configurations that come nearest to the fastest at any length, the nearest first.

    As many as there are colours: more lines could not be told apart.
    """
    nearest: dict[str, float] = {}
    for row in times.values():
        least = min(row.values(), default=1.0)
        for name, ms in row.items():
            nearest[name] = min(nearest.get(name, ms / least), ms / least)
    return sorted(nearest, key=nearest.__getitem__)[: charts.MOST_LINES]


def _lengths(explanation: Explanation, lengths: Sequence[AtLength]) -> str:
    cp = explanation.result.workload.cp_size
    times = {
        at.seq_len: {
            ranked.config.label(cp): ranked.prediction.seconds * 1e3 for ranked in at.result.ranking
        }
        for at in lengths
    }
    every = {name for row in times.values() for name in row}
    names = _drawn(times)
    left_out = len(every) - len(names)
    told = ""
    if left_out:
        told = (
            f"Drawn are the {len(names)} that come nearest to the fastest at some length; "
            f"{left_out} slower ones are left out."
        )
    series = {name: [times[length].get(name) for length in times] for name in names}
    fastest = [min(row.values(), default=1.0) for row in times.values()]
    ratios = {
        name: [ms and ms / least for ms, least in zip(row, fastest, strict=True)]
        for name, row in series.items()
    }
    rows = []
    for at in lengths:
        found = at.result.ranking
        if not found:
            rule = at.result.rejected[0][1]
            reason = f"nothing is valid: {rule.message}"
            rows.append((charts.short_length(at.seq_len), reason, "", "", ""))
            continue
        margin = at.result.margin
        rows.append(
            (
                charts.short_length(at.seq_len),
                found[0].config.label(cp),
                html.number(found[0].prediction.seconds * 1e3),
                "" if margin is None else f"{margin:.1%} to {found[1].config.label(cp)}",
                "yes" if at.result.workload.recompute else "",
            )
        )
    return html.section(
        "lengths",
        "Sequence lengths",
        html.figure(
            charts.length_lines(list(times), series, "ms", "Time against sequence length"),
            "Predicted time at other lengths, everything else as it is; both axes logarithmic. "
            "A gap is a length at which a configuration is not valid or does not fit. " + told,
        ),
        html.figure(
            charts.length_lines(list(times), ratios, "x the fastest", "Time over the fastest"),
            "The same over the fastest at each length: where another one takes over.",
        ),
        html.table(("sequence", "fastest", "ms", "margin", "recomputed"), rows),
    )
