"""Which numbers of the cluster the winner rests on, and what the page was made from."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version

from hp_tune.clusters.cluster import Curve, Number
from hp_tune.explanation.explain import Explanation
from hp_tune.report import html
from hp_tune.searching.engine import COST_MODEL

__all__ = ["numbers_table", "provenance_table"]


def numbers_table(explanation: Explanation) -> str:
    """Return every number of the cluster with its source, and how much of the time is behind it."""
    cluster, dtype = explanation.result.cluster, explanation.result.workload.dtype
    total = explanation.best.prediction.seconds
    behind: dict[str, float] = {}
    for term in explanation.best.prediction.terms:
        for name in term.sources:
            behind[name] = behind.get(name, 0.0) + term.exposed
    parts = [("device", cluster.device), *((f"tiers.{t.name}", t) for t in cluster.tiers)]
    rows = []
    for where, described in parts:
        for key, value in described:
            found = value.get(dtype) if key == "peak_TFLOPS" else value
            if not isinstance(found, Number | Curve):
                continue
            share = behind.get(f"{where}.{key}", 0.0) / total
            shown = html.number(found.value) if isinstance(found, Number) else "by size"
            part = html.Cell(f"<!--n-->{share:.0%}") if share else ""
            rows.append((f"{where}.{key}", shown, html.badge(found.source), part, found.ref))
    return html.paragraph(
        "Which numbers are the vendor's, which somebody measured, and which nobody did. Their "
        "share is the part of the winner's time whose terms use them."
    ) + html.table(("number", "value", "source", "share of time", "reference"), rows)


def provenance_table(explanation: Explanation) -> str:
    """Return versions, digests and the workload: all that it takes to make the page again."""
    result = explanation.result
    try:
        own = version("hp-tune")
    except PackageNotFoundError:  # run from a checkout that is not installed
        own = "not installed"
    rows = [
        ("hp-tune", f"{own}, cost model {COST_MODEL}"),
        ("model", f"{result.model.name}, sha256 {result.model.digest}"),
        ("model source", result.model.source or "a config.json that was given"),
        ("cluster", f"{result.cluster.name}, sha256 {result.cluster.digest}"),
        ("workload", json.dumps(result.workload.model_dump(mode="json"))),
        ("plan", "" if result.plan is None else f"sha256 {result.plan.digest}"),
    ]
    return html.table(
        ("what", "which"),
        [(name, html.Cell(f"<code>{html.escape(words)}</code>")) for name, words in rows],
    )
