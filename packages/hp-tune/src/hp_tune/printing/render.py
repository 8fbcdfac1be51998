"""Print results: tables for people with rich, one JSON object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hp_tune.clusters.cluster import Cluster, Curve, Number
from hp_tune.clusters.cluster_files import cluster_presets
from hp_tune.cost.memory import GIB
from hp_tune.models.model import Model
from hp_tune.plans.plan import PlanFile
from hp_tune.plans.show import reason_of
from hp_tune.printing.tables import Table, milliseconds, new_console, new_table, print_json
from hp_tune.searching.engine import Result
from hp_tune.searching.ranking import Ranked

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

__all__ = [
    "cluster",
    "model",
    "plan",
    "presets",
    "result_json",
    "result_object",
    "result_text",
    "study",
]


def result_text(result: Result, out: Path | None) -> None:
    """Print a search: what was asked, the ranking, every rejection, the margin."""
    workload, model = result.workload, result.model
    layer = next((layer for layer in model.layers if layer.exchanges), model.layers[0])
    line = partial(new_console().print, soft_wrap=True)
    line(
        f"model    {model.name}: {model.model_type}, {len(model.layers)} layers, "
        f"H={layer.num_heads} Hkv={layer.num_kv_heads} d={layer.head_size}"
    )
    numbers = list(_numbers(result.cluster))
    counts = {s: sum(n.source == s for _, n in numbers) for s in ("spec", "measured", "assumed")}
    sources = ", ".join(f"{count} {source}" for source, count in counts.items() if count)
    line(f"cluster  {result.cluster.name}: {result.cluster.description}")
    name = result.cluster.name if result.cluster.name in cluster_presets() else "FILE"
    line(f"numbers  {sources} (hp-tune presets {name})")
    line(
        f"workload sequence {workload.seq_len}, cp {workload.cp_size}, tp {workload.tp_size}, "
        f"batch {workload.batch}, {workload.dtype}, {workload.layout}, "
        f"{'causal' if workload.causal else 'not causal'}"
        f"{', recomputed' if workload.recompute else ''}"
    )
    total = len(result.ranking) + len(result.rejected)
    line(
        f"space    {total} points: {len(result.ranking)} valid, {len(result.rejected)} rejected; "
        f"{len(result.duplicates)} spellings of the same"
    )
    for note in result.notes:
        line(f"note     {note}")
    if result.ranking:
        line(_ranking_table(result))
    if result.rejected:
        line("rejected")
        told = ""
        for config, rejection in sorted(result.rejected, key=lambda r: (r[1].rule, r[1].hint)):
            if told and told != rejection.hint:
                line(f"       {told}")
            line(f"  {rejection.rule}  {config.label(workload.cp_size)}: {rejection.message}")
            told = rejection.hint
        line(f"       {told}")
    for duplicate in result.duplicates:
        same = duplicate.same_as.label(workload.cp_size)
        line(f"same     {duplicate.config.label(workload.cp_size)} = {same}: {duplicate.reason}")
    if result.ranking:
        line(f"margin   {_margin(result)}")
    if result.study is not None:
        recorded = result.study
        line(f"study    {recorded.path}: {recorded.added} added, {recorded.found} there before")
    if out is not None and result.plan is not None:
        line(f'plan     {out} digest {result.plan.digest[:12]}  (hp_tune.load("{out}"))')


def result_json(result: Result, out: Path | None) -> None:
    """Print a search as one JSON object."""
    print_json(result_object(result, out))


def result_object(result: Result, out: Path | None) -> dict[str, Any]:
    """Return a search as JSON values."""
    cp = result.workload.cp_size
    best = result.ranking[0].prediction.seconds if result.ranking else 0.0
    return {
        "model": {"name": result.model.name, "digest": result.model.digest},
        "cluster": {"name": result.cluster.name, "digest": result.cluster.digest},
        "workload": result.workload.model_dump(mode="json"),
        "ranking": [_ranked(ranked, best, cp) for ranked in result.ranking],
        "rejected": [
            {
                "config": config.model_dump(),
                "label": config.label(cp),
                "rule": rejection.rule,
                "message": rejection.message,
                "numbers": rejection.numbers,
                "hint": rejection.hint,
            }
            for config, rejection in result.rejected
        ],
        "duplicates": [
            {
                "config": duplicate.config.model_dump(),
                "same_as": duplicate.same_as.model_dump(),
                "reason": duplicate.reason,
            }
            for duplicate in result.duplicates
        ],
        "margin": result.margin,
        "flips": [
            {
                "number": flip.number,
                "value": flip.value,
                "other": flip.other,
                "winner": flip.winner.label(cp),
            }
            for flip in result.flips
        ],
        "notes": list(result.notes),
        "study": None if result.study is None else str(result.study.path),
        "plan": None if out is None else str(out),
        "digest": None if result.plan is None else result.plan.digest,
    }


def presets(models: Sequence[Model], clusters: Sequence[Cluster], as_json: bool) -> None:
    """Print the names of all presets with what they are."""
    if as_json:
        print_json({"models": [m.name for m in models], "clusters": [c.name for c in clusters]})
        return
    table = new_table("model", "layers", "heads", "KV heads", "head size", "longest")
    for found in models:
        layer = next((layer for layer in found.layers if layer.exchanges), found.layers[0])
        counts = (len(found.layers), layer.num_heads, layer.num_kv_heads, layer.head_size)
        table.add_row(found.name, *map(str, counts), str(found.max_length))
    other = new_table("cluster", "description")
    for described in clusters:
        other.add_row(described.name, described.description)
    new_console().print(table, other)


def model(found: Model, as_json: bool) -> None:
    """Print one model."""
    if as_json:
        print_json(found.model_dump(mode="json"))
        return
    console = new_console()
    console.print(f"{found.name}: {found.model_type}, hidden {found.hidden_size}")
    for layer, count in found.layer_groups:
        console.print(f"  {count} x {layer.describe()}")
    if found.source:
        console.print(f"  source: {found.source}")
    for note in found.notes:
        console.print(f"  note: {note}")


def cluster(found: Cluster, as_json: bool) -> None:
    """Print one cluster, number by number, with where each is from."""
    if as_json:
        print_json(found.model_dump(mode="json", exclude_none=True))
        return
    table = new_table("number", "value", "source", "reference")
    for name, number in _numbers(found):
        table.add_row(name, f"{number.value:g}", number.source, number.ref)
    for tier in found.tiers:
        for name in ("all_to_all", "all_gather", "reduce_scatter", "efficiency_by_size"):
            curve: Curve | None = getattr(tier, name)
            if curve is not None:
                points = " ".join(f"{s:g}:{rate:g}" for s, rate in curve.for_ranks(tier.size or 8))
                table.add_row(f"tiers.{tier.name}.{name}", points, curve.source, curve.ref)
    console = new_console()
    console.print(f"{found.name}: {found.description}", table)


def plan(found: PlanFile, as_json: bool) -> None:
    """Print a plan."""
    if as_json:
        print_json({**found.content(), "digest": found.digest})
        return
    console = new_console()
    console.print(f"plan {found.digest[:12]} for {found.model['name']} on {found.cluster['name']}")
    for entry in found.entries:
        when, table = entry.when, _ms_table()
        console.print(
            f"cp {when.cp_size}, tp {when.tp_size}, sequence {when.seq[0]} to {when.seq[1]}, "
            f"{entry.layout}"
        )
        for role, spec in entry.style_specs().items():
            console.print(f"  {role}: {spec.name} {dict(spec.arguments)}")
        for rank, priced in enumerate((entry.best, *entry.alternatives), start=1):
            table.add_row(
                str(rank), priced.mode,
                milliseconds(priced.forward_ms), milliseconds(priced.backward_ms),
                f"{priced.vs_best:.3f}", milliseconds(priced.exposed_comm_ms),
                f"{priced.imbalance:.3f}", f"{priced.memory_GiB:.1f}",
            )  # fmt: skip
        console.print(table)
        for rejected in entry.rejected:
            name = rejected.config.label(when.cp_size)
            console.print(f"  {rejected.rule}  {name}: {rejected.message}")


def study(
    name: str, attributes: dict[str, Any], trials: Sequence[FrozenTrial], *, as_json: bool
) -> None:
    """Print the trials of a study, best first."""
    ordered = sorted(trials, key=lambda t: (t.values is None, t.values or [], t.number))
    if as_json:
        rows = [
            {
                "number": t.number,
                "state": t.state.name,
                "ms": t.values and t.values[0],
                **t.user_attrs,
            }
            for t in ordered
        ]
        print_json({"name": name, "inputs": attributes.get("inputs"), "trials": rows})
        return
    table = new_table("trial", "config", "state", "ms", "why")
    for trial in ordered:
        found = trial.user_attrs
        why = reason_of(trial)
        value = milliseconds(trial.values[0]) if trial.values else ""
        table.add_row(str(trial.number), str(found.get("label")), trial.state.name, value, why)
    new_console().print(name, table)


def _ranking_table(result: Result) -> Table:
    table = _ms_table()
    best = result.ranking[0].prediction.seconds
    for rank, ranked in enumerate(result.ranking, start=1):
        found = ranked.prediction
        table.add_row(
            str(rank),
            ranked.config.label(result.workload.cp_size),
            milliseconds(found.forward * 1e3),
            milliseconds(found.backward * 1e3),
            f"{found.seconds / best:.3f}",
            milliseconds(found.exposed_comm * 1e3),
            f"{found.imbalance:.3f}",
            f"{ranked.memory.total / GIB:.1f}",
        )
    return table


def _ms_table() -> Table:
    return new_table(
        "rank", "config", "fwd ms", "bwd ms", "vs best", "exposed ms", "imbalance", "memory GiB"
    )


def _margin(result: Result) -> str:
    cp = result.workload.cp_size
    if result.margin is None:
        return "no other configuration is valid"
    if result.mode != "analytic":
        if result.margin < 0.01:  # the simpler of two that tie may be the slower by a little
            return "rank 1 and 2 tie; the simpler is taken"
        return f"rank 1 wins by {result.margin:.1%}, as measured"
    if not result.flips:
        sure = "no assumed number changes that between x0.3 and x3"
    else:
        sure = "flips to " + "; ".join(
            f"{flip.winner.label(cp)} at {flip.number} {flip.other:g} (assumed {flip.value:g})"
            for flip in result.flips
        )
    return f"rank 1 wins by {result.margin:.1%}; {sure}"


def _ranked(ranked: Ranked, best: float, cp_size: int) -> dict[str, Any]:
    found = ranked.prediction
    return {
        "config": ranked.config.model_dump(),
        "label": ranked.config.label(cp_size),
        "forward_ms": found.forward * 1e3,
        "backward_ms": found.backward * 1e3,
        "vs_best": found.seconds / best,
        "exposed_comm_ms": found.exposed_comm * 1e3,
        "imbalance": found.imbalance,
        "bytes_sent": found.bytes_sent,
        "memory_bytes": ranked.memory.total,
        "source": "analytic",
    }


def _numbers(found: Cluster) -> list[tuple[str, Number]]:
    rows = [(f"device.peak_TFLOPS.{dtype}", n) for dtype, n in found.device.peak_TFLOPS.items()]
    parts: list[tuple[str, Any]] = [("device", found.device)]
    parts += [(f"tiers.{tier.name}", tier) for tier in found.tiers]
    for where, described in parts:
        rows += [(f"{where}.{key}", v) for key, v in described if isinstance(v, Number)]
    return rows
