"""The parts of the page that show one search: what its time, bytes and memory are made of."""

from __future__ import annotations

from hp_tune.cost.memory import GIB
from hp_tune.explanation.explain import Explanation, layers_of, link_rate
from hp_tune.report import charts, html
from hp_tune.searching.ranking import Ranked

__all__ = [
    "flips",
    "label_of",
    "memory",
    "pareto",
    "rejections",
    "sent",
    "timeline",
    "waterfall",
]


def label_of(explanation: Explanation, ranked: Ranked) -> str:
    """Return the name of a configuration on the page."""
    return ranked.config.label(explanation.result.workload.cp_size)


def waterfall(explanation: Explanation) -> str:
    """Return the addends of the winner, phase by phase."""
    parts = []
    for phase in ("forward", "backward"):
        rows, total = [], 0.0
        for layers, term in layers_of(explanation.best.prediction):
            if term.phase != phase:
                continue
            total += term.exposed * 1e3
            rate, peak = link_rate(term), term.share_of_peak
            rows.append(
                (
                    term.name, layers, term.exposed * 1e3, html.number(total),
                    term.seconds * 1e3, html.number(term.bytes / 2**20) if term.bytes else "",
                    html.number(rate) if rate else "",
                    html.Cell(f"<!--n-->{peak:.0%}") if peak is not None else "",
                    html.badge(term.source), term.formula,
                )
            )  # fmt: skip
        headers = ("term", "layers", "adds ms", "sum ms", "takes ms", "MiB", "GB/s", "of peak",
                   "source", "formula")  # fmt: skip
        parts += [f"<h3>{phase}</h3>", html.table(headers, rows)]
    return html.section(
        "waterfall",
        "Where the time goes",
        html.paragraph(
            "Each addend of the winner over all layers: what the step waits for, and what it takes "
            "on its own stream. Bytes are those that leave a rank (collectives) or pass through "
            "memory (copies); the formula is that of one layer, the source the weakest behind it."
        ),
        *parts,
    )


def timeline(explanation: Explanation) -> str:
    """Return both streams of each kind of layer."""
    return html.section(
        "timeline",
        "Timeline",
        *(
            html.figure(
                charts.lanes(line, f"{line.phase} of {line.layer.describe()}"),
                f"{line.phase} of one layer, {line.count} x {line.layer.describe()}: "
                f"{max((s.end for s in line.slots), default=0.0) * 1e3:.4g} ms. Widths are roots "
                "of lengths, so that short pieces can be seen; pale is what a kernel hides.",
            )
            for line in explanation.best.prediction.timelines
        ),
    )


def sent(explanation: Explanation) -> str:
    """Return what every valid configuration sends."""
    kinds = sorted({k for r in explanation.result.ranking for k in r.prediction.bytes_sent})
    rows = [
        (
            label_of(explanation, ranked),
            {kind: ranked.prediction.bytes_sent.get(kind, 0) / GIB for kind in kinds},
        )
        for ranked in explanation.result.ranking
    ]
    calls = [
        (name, html.number(ranked.prediction.num_collectives),
         *(html.number(values[kind], 3) for kind in kinds))
        for (name, values), ranked in zip(rows, explanation.result.ranking, strict=True)
    ]  # fmt: skip
    return html.section(
        "bytes",
        "Bytes",
        html.figure(
            charts.stacked_bars(rows, "GiB", "Bytes sent by every valid configuration"),
            "What leaves one rank per micro-batch, forward and backward over all layers, by kind "
            "of collective.",
        ),
        html.table(("configuration", "calls", *(f"{kind} GiB" for kind in kinds)), calls, best=0),
    )


def memory(explanation: Explanation) -> str:
    """Return what every valid configuration holds."""
    rows = [
        (label_of(explanation, ranked), {name: size / GIB for name, size in ranked.memory.terms})
        for ranked in explanation.result.ranking
    ]
    capacity = explanation.best.memory.capacity / GIB
    return html.section(
        "memory",
        "Memory",
        html.figure(
            charts.stacked_bars(rows, "GiB", "Memory of every valid configuration",
                                ("the device has", capacity)),
            "What one rank holds at the end of the forward pass. Logits are not counted; "
            "parameters and optimizer are if --world was given.",
        ),
    )  # fmt: skip


def pareto(explanation: Explanation) -> str:
    """Return time against memory."""
    points = [
        (label_of(explanation, r), r.memory.total / GIB, r.prediction.seconds * 1e3)
        for r in explanation.result.ranking
    ]
    best = charts.front(points)
    named = f"The front: {', '.join(best)}." if len(best) > 1 else f"{best[0]} is best in both."
    return html.section(
        "pareto",
        "Time and memory",
        html.figure(
            charts.pareto(points, ("memory, GiB", "time, ms"), "Time against memory"),
            "Every valid configuration; the line joins those that no other beats in both. " + named,
        ),
    )


def flips(explanation: Explanation) -> str:
    """Return the numbers that decide, and the features that are missing."""
    cp = explanation.result.workload.cp_size
    flips = [
        (f.number, html.number(f.value), html.number(f.at), f"x{f.factor:g}", f.winner.label(cp))
        for f in explanation.flips
    ]
    missing = []
    for o in explanation.opportunities:
        css, verb = ("good", "saves") if o.gain > 0 else ("bad", "loses")
        gain = html.Cell(f'<span class="{css}">{verb} {abs(o.gain):.1%}</span>')
        missing.append((o.feature, o.label, o.ms, gain, "yes" if o.is_new_best else "",
                        f"{o.missing_in}: {o.how}"))  # fmt: skip
    told = (
        html.table(("assumed number", "is", "flips at", "factor", "then first"), flips)
        if flips
        else html.paragraph("No assumed number changes the winner between x0.3 and x3.")
    )
    headers = ("feature", "configuration", "ms", "against the winner", "new best", "missing in")
    offers = (
        html.table(headers, missing)
        if missing
        else html.paragraph("Nothing that is known and missing applies here.")
    )
    return html.section(
        "flips",
        "What would change it",
        "<h3>Assumed numbers</h3>", told, "<h3>Features that are missing</h3>", offers,
    )  # fmt: skip


def rejections(explanation: Explanation) -> str:
    """Return every configuration that is not valid, and spellings of the same."""
    cp = explanation.result.workload.cp_size
    rows = [
        (rejection.rule, config.label(cp), rejection.message, rejection.hint)
        for config, rejection in sorted(
            explanation.result.rejected, key=lambda found: found[1].rule
        )
    ]
    same = [
        (d.config.label(cp), d.same_as.label(cp), d.reason) for d in explanation.result.duplicates
    ]
    parts = [html.table(("rule", "configuration", "why it is not valid", "way out"), rows)]
    if not rows:
        parts = [html.paragraph("Every configuration is valid.")]
    if same:
        parts += ["<h3>Spellings of the same</h3>",
                  html.table(("configuration", "runs as", "why"), same)]  # fmt: skip
    return html.section("rejections", "Rejections", *parts)
