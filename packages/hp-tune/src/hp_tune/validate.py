"""Whether a file is what it should be: a model, a cluster, a plan, a study, options, launches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_tune.errors import TuneError, UsageError

__all__ = ["Verdict", "check_file"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a file is, and what is wrong with it.

    Attributes:
        kind: ``model``, ``cluster``, ``plan``, ``study``, ``kernels``, ``acceptance``, ``config``
            (of ``search --config``) or ``unknown``.
        says: What it describes, one line; empty for a wrong file.
        notes: What was assumed or is worth a look.
        error: None for a right file.
    """

    path: Path
    kind: str
    says: str = ""
    notes: tuple[str, ...] = ()
    error: TuneError | None = None


def check_file(path: Path) -> Verdict:
    """Return what ``path`` is and whether it can be used; nothing is raised for a wrong file."""
    kind = "unknown"
    try:
        kind = _kind(path)
        says, notes = _READERS[kind](path)
    except TuneError as error:
        return Verdict(path, kind, error=error)
    return Verdict(path, kind, says, tuple(notes))


def _kind(path: Path) -> str:
    if path.is_dir():
        return "model"
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    if start.startswith(b'{"op_code"'):
        return "study"
    from hp_tune.commands.config import is_config
    from hp_tune.files import load_json, load_yaml

    if path.suffix.lower() == ".toml":
        return "config"
    if path.suffix.lower() in (".yaml", ".yml"):
        with suppress(UsageError):  # what is wrong with it, its reader says
            return "config" if is_config(load_yaml(path)[0]) else "cluster"
        return "cluster"
    data = load_json(path)
    schema = str(data.get("schema", ""))
    for kind in ("plan", "acceptance"):
        if schema.startswith(f"hp-tune/{kind}/"):
            return kind
    if "kernel" in data and "entries" in data:
        return "kernels"
    if is_config(data):
        return "config"
    if schema:
        raise UsageError(
            f"{path}: schema ({schema!r}) must be hp-tune/plan or hp-tune/acceptance",
            "files of other programs are not known",
        )
    return "model"


Said = tuple[str, list[str]]


def _model(path: Path) -> Said:
    from hp_tune.models.hf_config import read_model

    found = read_model(path)
    kinds = "; ".join(f"{count} x {layer.describe()}" for layer, count in found.layer_groups)
    return f"{found.name}: {found.model_type}, hidden {found.hidden_size}, {kinds}", list(
        found.notes
    )


def _cluster(path: Path) -> Said:
    from hp_tune.clusters.cluster import Curve, Number
    from hp_tune.clusters.cluster_files import read_cluster
    from hp_tune.files import load_yaml

    found = read_cluster(path)
    parts: list[Any] = [found.device, *found.tiers]
    sources = [v.source for part in parts for _, v in part if isinstance(v, Number | Curve)]
    sources += [peak.source for peak in found.device.peak_TFLOPS.values()]
    counts = {s: sources.count(s) for s in ("spec", "measured", "assumed") if s in sources}
    base = load_yaml(path)[0].get("extends")
    notes = [f"extends {base}"] if base else []
    if not counts.get("measured"):
        notes.append("nothing is measured: hp-tune profile writes what this cluster does")
    told = ", ".join(f"{count} {source}" for source, count in counts.items())
    tiers = ", ".join(f"{tier.name} ({tier.kind})" for tier in found.tiers)
    return f"{found.name}: {found.device.name}, {tiers}; {told}", notes


def _plan(path: Path) -> Said:
    from hp_tune.plans.plan_file import load
    from hp_tune.searching.engine import COST_MODEL

    found = load(path)
    entries = "; ".join(
        f"{entry.best.mode} for {entry.when.seq[0]} to {entry.when.seq[1]}"
        for entry in found.entries
    )
    notes = list(found.notes)
    if found.cost_model != COST_MODEL:
        notes.append(f"made with cost model {found.cost_model}, this one has {COST_MODEL}")
    name, cluster = found.model["name"], found.cluster["name"]
    return f"{name} on {cluster}: {entries}; digest {found.digest[:12]}", notes


def _study(path: Path) -> Said:
    from hp_tune.study.studies import read_study

    name, _, trials = read_study(path)
    states = [trial.state.name.lower() for trial in trials]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    notes = [] if trials else ["it has no trials yet"]
    return f"{name}: {len(trials)} trials ({counts})", notes


def _kernels(path: Path) -> Said:
    from hp_comm.kernels import config

    try:
        found = config.read(path)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return f"{found.kernel} on {found.device}: {len(found.entries)} entries", []


def _acceptance(path: Path) -> Said:
    from hp_tune.acceptance import read_acceptance

    found = read_acceptance(path)
    measured = sum(len(case.measured_ms) for case in found.cases)
    return f"{len(found.cases)} cases with {measured} measured times", []


def _config(path: Path) -> Said:
    from hp_tune.commands.search import config_says

    return config_says(path)


_READERS: dict[str, Callable[[Path], Said]] = {
    "model": _model,
    "cluster": _cluster,
    "plan": _plan,
    "study": _study,
    "kernels": _kernels,
    "acceptance": _acceptance,
    "config": _config,
}


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON values."""
    error = verdict.error
    return {
        "path": str(verdict.path),
        "kind": verdict.kind,
        "valid": error is None,
        "says": verdict.says,
        "notes": list(verdict.notes),
        "error": None
        if error is None
        else {"code": error.exit_code, "id": error.id, "message": error.message,
              "hint": error.hint},
    }  # fmt: skip
