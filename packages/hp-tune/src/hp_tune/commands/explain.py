"""``hp-tune explain``: why this configuration, why not that one, and what would change it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hp_tune.commands.again import result_asked_for, search_options
from hp_tune.commands.options import json_option
from hp_tune.commands.progress import Bar

__all__ = ["explain"]


@search_options
@click.command()
@click.argument("plan", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--rival", metavar="LABEL", help="Compare the winner with this one, term by term.")
@click.option("--trace", type=click.Path(path_type=Path, dir_okay=False),
              help="Write the predicted timeline for https://ui.perfetto.dev.")  # fmt: skip
@json_option()
def explain(plan: Path | None, **options: Any) -> None:
    """Explain the choice of PLAN (plan.json or a study), or of a search with these options.

    Printed are what the winner's time is made of, its two streams, by which terms each rival loses,
    which assumed number would change the winner and at what factor, and what a feature that is
    missing would win. The search of a plan is made again from its model and cluster, which must be
    those that it was made with.
    """
    from hp_tune.explanation.explain import explain, find_rival
    from hp_tune.explanation.text import explanation_json, explanation_text
    from hp_tune.explanation.trace import write_trace
    from hp_tune.printing.tables import print_json

    result = result_asked_for(plan, options)
    with Bar("looking for flips") as bar:
        explanation = explain(result, bar.step)
    rival = find_rival(explanation, options["rival"]) if options["rival"] else None
    if options["trace"] is not None:
        title = f"{explanation.label}: {result.model.name} on {result.cluster.name}"
        write_trace(explanation.best.prediction, title, options["trace"])
    if options["as_json"]:
        print_json(explanation_json(explanation, rival))
    else:
        explanation_text(explanation, rival)
