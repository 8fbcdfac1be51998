"""``hp-tune report``: the search as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hp_tune.commands.again import result_asked_for, search_options
from hp_tune.commands.options import json_option, read_lengths
from hp_tune.commands.progress import Bar
from hp_tune.output import write_text

__all__ = ["report"]


@search_options
@click.command()
@click.argument("plan", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--out", default="report.html", show_default=True, help="Where the page is written.",
              type=click.Path(path_type=Path, dir_okay=False))  # fmt: skip
@click.option("--lengths", metavar="N,N,...", default=None,
              help="Sequence lengths to compare, such as 16K,64K,256K.  "
              "[default: an eighth to four times the length]")  # fmt: skip
@json_option("Print where the page is and what is on it as JSON.")
def report(plan: Path | None, **options: Any) -> None:
    """Write one page that shows PLAN (plan.json or a study), or a search with these options.

    It has the ranking, time against sequence length, bytes, memory, the front of time and memory,
    both streams, every rejection and the source of every number. It needs no network and no script.
    """
    from hp_tune.explanation.explain import explain
    from hp_tune.printing.tables import print_json
    from hp_tune.report.lengths import default_lengths, search_lengths
    from hp_tune.report.page import report_html

    result = result_asked_for(plan, options)
    lengths = default_lengths(result)
    if options["lengths"]:
        lengths = tuple(sorted({*read_lengths(options["lengths"]), result.workload.seq_len}))
    with Bar("searching") as bar:
        found = search_lengths(result, lengths, bar.step)
    with Bar("looking for flips") as bar:
        explanation = explain(result, bar.step)
    out: Path = options["out"]
    write_text(out, report_html(explanation, found))
    if options["as_json"]:
        print_json({"report": str(out), "winner": explanation.label, "lengths": list(lengths)})
    else:
        click.echo(f"report   {out}: {explanation.label}, {len(found)} lengths")
