"""``hp-tune export``: a plan in the form that something else reads."""

from __future__ import annotations

from pathlib import Path

import click

from hp_tune.commands.options import count_option, is_study, json_option
from hp_tune.errors import UsageError
from hp_tune.output import write_text

__all__ = ["export"]

FORMATS = ("python", "yaml", "json", "csv", "env")


@click.command()
@click.argument("plan", default="plan.json", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--format", "kind", default="python", show_default=True, type=click.Choice(FORMATS),
              help="A Python snippet, classes and arguments as YAML or JSON, a row per "
              "configuration as CSV, or variables for a shell.")  # fmt: skip
@count_option("--seq", "Only the entry that serves this length.")
@click.option("--out", default=None, type=click.Path(path_type=Path, dir_okay=False),
              help="Where it is written.  [default: stdout]")  # fmt: skip
@json_option("The same as --format json.")
def export(plan: Path, kind: str, seq: int | None, out: Path | None, as_json: bool) -> None:
    """Write PLAN (plan.json) as a Python snippet, YAML, JSON, CSV or shell variables.

    CSV is also written from a study (its Journal file), which has every configuration.
    """
    text = _of_study(plan, kind) if is_study(plan) else _of_plan(plan, kind, seq, as_json)
    if out is None:
        click.echo(text, nl=False)
    else:
        write_text(out, text)


def _of_plan(path: Path, kind: str, seq: int | None, as_json: bool) -> str:
    from hp_tune.explanation.source import entry_for
    from hp_tune.plans.export import export_plan
    from hp_tune.plans.plan_file import load

    found = load(path)
    entries = found.entries if seq is None else (entry_for(found, seq),)
    return export_plan(found, entries, "json" if as_json else kind, path)


def _of_study(path: Path, kind: str) -> str:
    from hp_tune.plans.export import study_csv
    from hp_tune.study.studies import read_study

    if kind != "csv":
        raise UsageError(f"--format {kind} must have a plan, and {path} is a study", "use csv")
    return study_csv(read_study(path)[2])
