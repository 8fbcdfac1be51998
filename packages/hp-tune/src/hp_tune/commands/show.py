"""``hp-tune show``: a plan or a study as a table."""

from __future__ import annotations

from pathlib import Path

import click

from hp_tune.commands.options import json_option
from hp_tune.errors import UsageError

__all__ = ["show"]


@click.command()
@click.argument("path", type=click.Path(path_type=Path), default="plan.json")
@json_option()
def show(path: Path, as_json: bool) -> None:
    """Show a plan (plan.json) or a study (its Journal file)."""
    from hp_tune import render
    from hp_tune.plan_file import load
    from hp_tune.study import read_study

    if not path.is_file():
        raise UsageError(f"there is no plan or study {path}", "write one with `hp-tune search`")
    if _is_study(path):
        render.study(*read_study(path), as_json=as_json)
    else:
        render.plan(load(path), as_json)


def _is_study(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64).startswith(b'{"op_code"')
