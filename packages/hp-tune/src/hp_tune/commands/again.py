"""Commands that look at a search: that of a plan made again, or one asked for by its options."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from hp_tune.commands.config import take_config
from hp_tune.commands.options import (
    is_study,
    read_documents,
    read_only,
    read_require,
    read_workload,
    tell,
)
from hp_tune.errors import UsageError

if TYPE_CHECKING:
    from hp_tune.searching.engine import Result

__all__ = ["result_asked_for", "search_options"]

NOT_ASKED = (
    "budget", "keep", "kernels", "max_trials", "mode", "objective", "seed", "seq_hist", "storage",
    "within", "backend", "nproc_per_node", "hosts", "master_addr", "trial_timeout", "rounds",
    "warmup", "study", "out", "as_json", "quiet", "help",
)  # fmt: skip
"""Parameters of ``search`` that say how it is measured and what becomes of it, not which it is."""
IN_BOTH = ("model", "cluster", "seq")
"""Options that make sense beside a plan: where its descriptions are, and which of its entries."""


def search_options(command: click.Command) -> click.Command:
    """Add the options of ``search`` to a command, none of them required."""
    from hp_tune.commands.search import search

    for parameter in search.params:
        if parameter.name in NOT_ASKED or not isinstance(parameter, click.Option):
            continue
        own = copy.copy(parameter)
        own.required, own.envvar = False, None
        if own.name == "config":
            own.callback = partial(take_config, without=NOT_ASKED)
        command.params.append(own)
    return command


def result_asked_for(plan: Path | None, options: dict[str, Any]) -> Result:
    """Return the search that a command line speaks of; nothing is recorded or written.

    Args:
        plan: The argument PLAN; None with none of the options of ``search`` is ``plan.json``.
        options: Values of all options.
    """
    context = click.get_current_context()
    given = [
        name
        for name in options
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        and name in _search_names()
    ]
    if plan is not None or not [name for name in given if name not in IN_BOTH]:
        return _of_plan(plan or Path("plan.json"), options, given)
    missing = [name for name in ("model", "cluster", "cp", "seq") if not options[name]]
    if missing:
        raise UsageError(
            f"--{', --'.join(missing)} must be given to search without a plan",
            "or name a plan.json",
        )
    return _of_search(options)


def _length(options: dict[str, Any]) -> int | None:
    """Return the one length of ``--seq``, or None without it."""
    lengths = options["seq"]
    if lengths is not None and len(lengths) > 1:
        raise UsageError(f"--seq ({', '.join(map(str, lengths))}) must be one length here")
    return None if lengths is None else int(lengths[0])


def _search_names() -> set[str]:
    from hp_tune.commands.search import search

    return {str(parameter.name) for parameter in search.params} - set(NOT_ASKED)


def _of_plan(path: Path, options: dict[str, Any], given: list[str]) -> Result:
    if not path.is_file():
        raise UsageError(
            f"there is no plan {path}",
            "write one with `hp-tune search`, or give the options of a search",
        )
    kind = "study" if is_study(path) else "plan"
    both = IN_BOTH if kind == "plan" else IN_BOTH[:2]  # a study is of one length
    others = [name for name in given if name not in both]
    if others:
        raise UsageError(
            f"--{', --'.join(others)} must be left out beside a {kind}, which says it already",
            "without PLAN the options of a search are taken",
        )
    if kind == "study":
        from hp_tune.explanation.recorded import result_of_study

        return result_of_study(path, model=options["model"], cluster=options["cluster"])
    from hp_tune.explanation.source import result_of_plan
    from hp_tune.plans.plan_file import load

    return result_of_plan(
        load(path), model=options["model"], cluster=options["cluster"], seq_len=_length(options)
    )


def _of_search(options: dict[str, Any]) -> Result:
    from hp_tune.clusters.cluster_files import read_cluster
    from hp_tune.models.hf_config import read_model
    from hp_tune.printing import render
    from hp_tune.searching.engine import NothingValidError, search

    model = read_model(options["model"])
    workload = read_workload(model, options, _length(options), read_documents(options))
    try:
        return search(
            model,
            read_cluster(options["cluster"]),
            workload,
            recompute=options["recompute"],
            variants=options["variants"],
            only=read_only(options),
            require=read_require(options),
            tell=tell,
        )
    except NothingValidError as error:
        show = render.result_json if options["as_json"] else render.result_text
        show(error.result, None)
        raise
