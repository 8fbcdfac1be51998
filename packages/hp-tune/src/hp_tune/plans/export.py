"""A plan in other forms: a Python snippet, YAML, JSON, CSV, shell variables."""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hp_tune.errors import UsageError
from hp_tune.files import dump_yaml
from hp_tune.plans.plan import Entry, PlanFile, PricedConfig
from hp_tune.plans.plan_file import VARIABLE

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

__all__ = ["FORMATS", "export_plan", "study_csv"]

FORMATS = ("python", "yaml", "json", "csv", "env")
COLUMNS = (
    "seq_len", "cp_size", "tp_size", "rank", "config", "ulysses_degree", "load_balance", "overlap",
    "head_groups", "keep_kv", "kv_chunks", "balance_hybrid", "halo", "forward_ms", "backward_ms",
    "vs_best", "exposed_comm_ms", "imbalance", "memory_GiB", "measured_ms", "source", "rule",
    "message",
)  # fmt: skip
STUDY_COLUMNS = (
    "label", "ulysses_degree", "load_balance", "overlap", "head_groups", "keep_kv", "kv_chunks",
    "balance_hybrid", "halo", "predicted_ms", "forward_ms", "backward_ms", "exposed_comm_ms",
    "imbalance", "num_collectives", "memory_bytes", "source", "rule", "message", "hint",
)  # fmt: skip


def export_plan(plan: PlanFile, entries: Sequence[Entry], kind: str, path: Path) -> str:
    """Return ``entries`` of ``plan`` as text of one of `FORMATS`.

    Args:
        plan: From `hp_tune.load`.
        entries: Those of the plan that are wanted; a snippet takes one.
        kind: ``python``: styles to import. ``yaml``, ``json``: classes and arguments. ``csv``: a
            row per configuration, rejected ones included. ``env``: what a shell exports.
        path: Where the plan lies; ``env`` names it.
    """
    if kind == "python":
        if len(entries) > 1:
            ranges = ", ".join(f"{e.when.seq[0]} to {e.when.seq[1]}" for e in entries)
            raise UsageError(
                f"--format python must have one length, and the plan has {len(entries)} ({ranges})",
                "choose with --seq",
            )
        return python_snippet(plan, entries[0])
    if kind == "csv":
        return _csv(entries)
    if kind == "env":
        values = {VARIABLE: str(path.resolve()), "HP_TUNE_PLAN_DIGEST": plan.digest}
        return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())
    content = {
        "plan": plan.digest,
        "model": plan.model["name"],
        "cluster": plan.cluster["name"],
        "entries": [_entry(entry) for entry in entries],
    }
    if kind == "json":
        return json.dumps(content, indent=1) + "\n"
    return dump_yaml(content)


def python_snippet(plan: PlanFile, entry: Entry) -> str:
    """Return a module that builds the styles and applies them; it needs no hp-tune."""
    specs, when = entry.style_specs(), entry.when
    package = next(iter(specs.values())).package
    names = sorted({spec.name for spec in specs.values()})
    lines = [
        f'"""Context parallelism for {_words(plan.model["name"])} on',
        f"{_words(plan.cluster['name'])}:",
        f"{entry.best.mode}.",
        "",
        f"Written by hp-tune from plan {plan.digest[:12]}, for sequences of {when.seq[0]} to",
        f"{when.seq[1]} tokens on {when.cp_size} CP ranks.",
        '"""',
        "",
        f"from {package} import {', '.join(names)}",
        "",
        f"CP_SIZE = {when.cp_size}",
        "",
        "STYLES = {",
    ]
    for role, spec in specs.items():
        lines.append(f'    "{role}": {spec.name}(')
        lines += [f"        {key}={value!r}," for key, value in spec.arguments.items()]
        lines.append("    ),")
    lines += [
        "}",
        "",
        "",
        "def apply_styles(boundaries, cp_mesh, **handoffs):",
        f'    """Put each style on its module: {{{_roles(specs)}}}, on a mesh of CP_SIZE ranks.',
        "",
        "    Handoffs, if any, by boundary: a dict of what the style's apply takes.",
        '    """',
        "    for role, module in boundaries.items():",
        "        STYLES[role].apply(module, cp_mesh, **handoffs.get(role, {}))",
        "",
    ]
    return "\n".join(lines)


def _words(name: str) -> str:
    """Return a name as it may stand in a string of code: names are those of folders and files."""
    kept = (letter if letter.isprintable() and letter not in '\\"' else " " for letter in name)
    return " ".join("".join(kept).split())


def _roles(specs: Sequence[str] | Any) -> str:
    return ", ".join(f'"{role}": module' for role in specs)


def _entry(entry: Entry) -> dict[str, Any]:
    return {
        "seq": list(entry.when.seq),
        "cp_size": entry.when.cp_size,
        "tp_size": entry.when.tp_size,
        "world_size": entry.when.world_size,
        "recompute": entry.recompute,
        "styles": {
            role: {"package": spec.package, "class": spec.name, "arguments": dict(spec.arguments)}
            for role, spec in entry.style_specs().items()
        },
    }


def _csv(entries: Sequence[Entry]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for entry in entries:
        shared = {
            "seq_len": entry.when.seq_len,
            "cp_size": entry.when.cp_size,
            "tp_size": entry.when.tp_size,
        }
        for rank, priced in enumerate((entry.best, *entry.alternatives), start=1):
            writer.writerow({**shared, "rank": rank, **_priced(priced)})
        for rejected in entry.rejected:
            config = rejected.config
            writer.writerow(
                {**shared, "config": config.label(entry.when.cp_size), **_choices(config),
                 "rule": rejected.rule, "message": rejected.message}
            )  # fmt: skip
    return out.getvalue()


def study_csv(trials: Sequence[FrozenTrial]) -> str:
    """Return a row for every trial of a study: the whole ranking, and what was rejected."""
    out = io.StringIO()
    writer = csv.DictWriter(out, ("trial", "state", *STUDY_COLUMNS), lineterminator="\n")
    writer.writeheader()
    for trial in sorted(trials, key=lambda t: (t.values is None, t.values or [], t.number)):
        found = {**trial.params, **trial.user_attrs}
        row = {key: found.get(key, "") for key in STUDY_COLUMNS}
        writer.writerow({"trial": trial.number, "state": trial.state.name, **row})
    return out.getvalue()


def _choices(config: Any) -> dict[str, Any]:
    return {key: value for key, value in config.model_dump().items() if key in COLUMNS}


def _priced(priced: PricedConfig) -> dict[str, Any]:
    return {
        "config": priced.mode,
        **_choices(priced.config),
        "forward_ms": priced.forward_ms,
        "backward_ms": priced.backward_ms,
        "vs_best": priced.vs_best,
        "exposed_comm_ms": priced.exposed_comm_ms,
        "imbalance": priced.imbalance,
        "memory_GiB": priced.memory_GiB,
        "measured_ms": "" if priced.measured is None else priced.measured.median_ms,
        "source": priced.source,
    }
