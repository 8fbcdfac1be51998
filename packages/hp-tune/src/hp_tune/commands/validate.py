"""``hp-tune validate``: files checked before they are used, and predictions against records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hp_tune.commands.options import json_option
from hp_tune.errors import AcceptanceError, InvalidFilesError, TuneError, UsageError
from hp_tune.printing.tables import new_console, new_table, print_json

__all__ = ["validate"]


@click.command()
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--against",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Recorded measurements: exit 7 if the mean regret is above the file's limit.",
)
@json_option()
def validate(files: tuple[Path, ...], against: Path | None, as_json: bool) -> None:
    """Check FILES: schema, units and plausibility.

    Known are models (config.json or its folder), clusters and their overlays (YAML), plans,
    studies, launch parameters of kernels, recorded measurements, and the files of
    ``search --config`` (YAML, JSON, TOML).
    """
    if not files and against is None:
        raise UsageError("there must be a file to check", "hp-tune validate FILE...")
    found: dict[str, Any] = {}
    wrong: TuneError | None = _check(files, found, as_json) if files else None
    if wrong is None and against is not None:
        wrong = _score(against, found, as_json)
    if as_json:
        print_json(found)
    if wrong is not None:
        raise wrong


def _check(
    files: tuple[Path, ...], found: dict[str, Any], as_json: bool
) -> InvalidFilesError | None:
    """Add what the files are to ``found``, or print it; return the error that they amount to."""
    from hp_tune.validate import check_file, verdict_json

    verdicts = [check_file(path) for path in files]
    wrong = [verdict.error for verdict in verdicts if verdict.error is not None]
    found |= {"valid": not wrong, "files": [verdict_json(verdict) for verdict in verdicts]}
    if not as_json:
        table = new_table("file", "kind", "", "what")
        for verdict in verdicts:
            error = verdict.error
            words = verdict.says if error is None else str(error)
            table.add_row(str(verdict.path), verdict.kind, "wrong" if error else "right", words)
            for note in verdict.notes:
                table.add_row("", "", "note", note)
        new_console().print(table)
    if not wrong:
        return None
    return InvalidFilesError(
        f"{len(wrong)} of {len(files)} files cannot be used: {wrong[0].message}",
        wrong[0].hint,
        wrong[0].exit_code,
    )


def _score(path: Path, found: dict[str, Any], as_json: bool) -> AcceptanceError | None:
    """Add how the recorded times are predicted to ``found``, or print it; return an error."""
    from hp_tune.acceptance import mean_regret, read_acceptance, score
    from hp_tune.commands.progress import Bar

    accepted = read_acceptance(path)
    scores = []
    with Bar("scoring") as bar:
        for done, case in enumerate(accepted.cases):
            bar.step(case.name, done, len(accepted.cases))
            scores.append(score(case))
    mean, limit = mean_regret(scores), accepted.max_mean_regret
    rows = [{"case": s.case, "pick": s.pick, "best": s.best, "regret": s.regret,
             "order": s.order, "unknown": list(s.unknown)} for s in scores]  # fmt: skip
    found |= {"mean_regret": mean, "max_mean_regret": limit, "cases": rows}
    if not as_json:
        table = new_table("case", "pick", "best measured", "regret", "pairs in order", "unknown")
        for s in scores:
            table.add_row(s.case, s.pick, s.best, f"{s.regret:.1%}", f"{s.order:.0%}",
                          ", ".join(s.unknown))  # fmt: skip
        new_console().print(table, f"mean regret {mean:.1%}, at most {limit:.1%}")
    if mean <= limit:
        return None
    return AcceptanceError(
        f"mean regret ({mean:.1%}) must be at most {limit:.1%}",
        "measure the cluster with `hp-tune profile`",
    )
