"""``hp-tune doctor``: versions, devices, folders, locks, tools."""

from __future__ import annotations

from pathlib import Path

import click

from hp_tune.commands.options import json_option
from hp_tune.errors import MissingToolsError

__all__ = ["doctor"]


@click.command()
@click.option("--folder", default=".hp-tune", show_default=True, help="Where studies would go.",
              type=click.Path(path_type=Path, file_okay=False))  # fmt: skip
@json_option()
def doctor(folder: Path, as_json: bool) -> None:
    """Look at versions, backends, devices, folders, locks and tools; exit 5 if something is wrong.

    What is absent is no error: an analytic search needs neither torch nor a device.
    """
    from hp_tune.doctor import examine
    from hp_tune.printing.tables import new_console, new_table, print_json

    checks = examine(folder)
    wrong = [check for check in checks if check.health == "wrong"]
    if as_json:
        rows = [{"name": c.name, "health": c.health, "found": c.found, "hint": c.hint}
                for c in checks]  # fmt: skip
        print_json({"healthy": not wrong, "checks": rows})
    else:
        table = new_table("what", "", "found", "hint")
        for check in checks:
            table.add_row(check.name, check.health, check.found, check.hint)
        new_console().print(table)
    if wrong:
        raise MissingToolsError(
            f"{', '.join(check.name for check in wrong)}: not as needed", wrong[0].hint
        )
