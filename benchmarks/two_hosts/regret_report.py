"""The tables and verdicts of the regret benchmark."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regret_rules import RULES, interval, mean_interval, regret, regrets
from rich.console import Console
from rich.table import Table

from hp_tune.workload import Config

sys.path.append(str(Path(__file__).resolve().parents[1]))

from provenance import provenance

LIMITS = {"analytic": 0.05, "hybrid": 0.02}
CP = 4


def record(cell: dict[str, Any], path: Path) -> None:
    """Append a cell to a file of JSON lines."""
    with path.open("a") as file:
        file.write(json.dumps({"bench": "regret", **as_json(cell), **provenance()}) + "\n")


def report(cells: Sequence[dict[str, Any]]) -> int:
    """Print what was measured and what each pick costs; return the exit code."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(times(cells))
    console.print(costs(cells))
    means = {name: mean(cells, name) for name in cells[0]["picks"]}
    failed = False
    for name, limit in LIMITS.items():
        if name in means:
            good = means[name] <= limit
            failed |= not good
            print(verdict(name, means[name], good, f"at most {limit:.0%}"))
    for name in RULES:
        good = means[name] > means["analytic"]
        failed |= not good
        print(verdict(name, means[name], good, "must be above that of the analytic pick"))
    return 1 if failed else 0


def verdict(name: str, mean_regret: float, good: bool, limit: str) -> str:
    """Return a line for a picker."""
    return f"{'pass' if good else 'MISS'} {name}: mean regret {mean_regret:.1%}, {limit}"


def mean(cells: Sequence[dict[str, Any]], name: str) -> float:
    """Return the mean regret over all cells."""
    return statistics.fmean(regret(cell["samples"], cell["picks"][name]) for cell in cells)


def times(cells: Sequence[dict[str, Any]]) -> Table:
    """Return measured and predicted ms of every configuration."""
    table = Table(title="ms forward and backward, measured (predicted)")
    for head in ("mbit", "tokens", *(label(config) for config in cells[0]["samples"])):
        table.add_column(head, justify="right")
    columns = list(cells[0]["samples"])
    for cell in cells:
        best = min(cell["samples"], key=lambda config: statistics.median(cell["samples"][config]))
        texts = []
        for config in columns:
            ms = statistics.median(cell["samples"][config])
            text = f"{ms:.0f} ({cell['predicted'][config]:.0f})"
            texts.append(f"[bold]{text}[/bold]" if config == best else text)
        table.add_row(str(cell["rate"]), str(cell["seq_len"]), *texts)
    return table


def costs(cells: Sequence[dict[str, Any]]) -> Table:
    """Return the regrets with their intervals, and the means."""
    names = list(cells[0]["picks"])
    table = Table(title="regret, with the 95 % interval over rounds")
    for head in ("mbit", "tokens", "fastest", *names):
        table.add_column(head, justify="left" if head == "fastest" else "right")
    draws: dict[str, list[list[float]]] = {name: [] for name in names}
    for cell in cells:
        best = min(cell["samples"], key=lambda config: statistics.median(cell["samples"][config]))
        texts = []
        for name in names:
            pick = cell["picks"][name]
            drawn = regrets(cell["samples"], pick)
            draws[name].append(drawn)
            low, high = interval(drawn)
            own = f"{label(pick)} " if name in LIMITS else ""
            texts.append(f"{own}{regret(cell['samples'], pick):.1%} [{low:.0%}, {high:.0%}]")
        table.add_row(str(cell["rate"]), str(cell["seq_len"]), label(best), *texts)
    table.add_section()
    ends = []
    for name in names:
        low, high = mean_interval(draws[name])
        ends.append(f"{mean(cells, name):.1%} [{low:.0%}, {high:.0%}]".replace("[", "\\["))
    table.add_row("mean", "", "", *ends)
    return table


def label(config: Config) -> str:
    """Return a short name of a configuration."""
    words = f"u{config.ulysses_degree}"
    words += " balance" * config.load_balance + " async" * config.overlap
    return words + (f" {config.head_groups} groups" if config.head_groups > 1 else "")


def as_json(cell: dict[str, Any]) -> dict[str, Any]:
    """Return a cell with names for configurations."""
    return {
        "rate": cell["rate"],
        "seq_len": cell["seq_len"],
        "samples_ms": {label(config): list(found) for config, found in cell["samples"].items()},
        "predicted_ms": {label(config): ms for config, ms in cell["predicted"].items()},
        "picks": {name: label(config) for name, config in cell["picks"].items()},
        "regret": {name: regret(cell["samples"], pick) for name, pick in cell["picks"].items()},
    }
