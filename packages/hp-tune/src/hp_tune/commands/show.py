"""``hp-tune show``: a plan or a study as a table, and questions to it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hp_tune.commands.options import is_study, json_option
from hp_tune.errors import UsageError

if TYPE_CHECKING:
    from hp_tune.plans.show import Row

__all__ = ["show"]


@click.command()
@click.argument("path", type=click.Path(path_type=Path), default="plan.json")
@click.option("--why-miss", metavar="CONFIG", help="Why this configuration is not the choice.")
@click.option("--pareto", is_flag=True, help="What no other beats in both time and memory.")
@click.option("--trial", type=int, metavar="N", help="All that a study holds of one trial.")
@json_option()
def show(path: Path, why_miss: str | None, pareto: bool, trial: int | None, as_json: bool) -> None:
    """Show a plan (plan.json) or a study (its Journal file)."""
    if not path.is_file():
        raise UsageError(f"there is no plan or study {path}", "write one with `hp-tune search`")
    asked = [why_miss is not None, pareto, trial is not None]
    if sum(asked) > 1:
        raise UsageError("--why-miss, --pareto and --trial must be asked one at a time")
    if trial is not None:
        _show_trial(path, trial, as_json)
    elif why_miss is not None or pareto:
        _answer(path, why_miss, as_json)
    else:
        _show_all(path, as_json)


def _show_all(path: Path, as_json: bool) -> None:
    from hp_tune.plans.plan_file import load
    from hp_tune.printing import render
    from hp_tune.study.studies import read_study

    if is_study(path):
        render.study(*read_study(path), as_json=as_json)
    else:
        render.plan(load(path), as_json)


def _show_trial(path: Path, number: int, as_json: bool) -> None:
    import json

    from hp_tune.plans.show import trial_attributes
    from hp_tune.printing.tables import print_json
    from hp_tune.study.studies import read_study

    if not is_study(path):
        raise UsageError(f"--trial must have a study, and {path} is a plan", "name its Journal")
    found = trial_attributes(read_study(path)[2], number)
    if as_json:
        print_json(found)
        return
    for key, value in found.items():
        if key == "terms":
            for term in value:
                took = f"{term['exposed_ms']:.4g} ms of {term['ms']:.4g}"
                name = f"{term['phase']} {term['name']}"
                click.echo(f"term       {name}: {took}, {term['formula']} [{term['source']}]")
        else:
            click.echo(f"{key:<10} {value if isinstance(value, str) else json.dumps(value)}")


def _answer(path: Path, label: str | None, as_json: bool) -> None:
    from hp_tune.plans.plan_file import load
    from hp_tune.plans.show import front_rows, rows_of_plan, rows_of_study, why_miss
    from hp_tune.printing.tables import milliseconds, new_console, new_table, print_json
    from hp_tune.study.studies import read_study

    rows = rows_of_study(read_study(path)[2]) if is_study(path) else rows_of_plan(load(path))
    if label is not None:
        lines = why_miss(rows, label)
        if as_json:
            print_json({"config": label, "why": lines})
        else:
            click.echo("\n".join(lines))
        return
    front = front_rows(rows)
    if not front:
        raise UsageError(f"{path} has no configuration with both time and memory")
    if as_json:
        print_json({"front": [_row_json(row) for row in front]})
        return
    table = new_table("config", "ms", "memory GiB", "source", "for")
    for row in front:
        assert row.ms is not None and row.memory_GiB is not None, "on the front are both"
        table.add_row(
            row.label, milliseconds(row.ms), f"{row.memory_GiB:.1f}", row.source, row.where
        )
    new_console().print(table)


def _row_json(row: Row) -> dict[str, object]:
    return {"config": row.label, "for": row.where, "ms": row.ms, "memory_GiB": row.memory_GiB,
            "source": row.source}  # fmt: skip
