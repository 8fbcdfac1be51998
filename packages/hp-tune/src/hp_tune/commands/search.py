"""``hp-tune search``: rank every configuration, and write the best as a plan."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hp_tune.commands.config import config_option, strange_variables, told_by
from hp_tune.commands.options import (
    count_option,
    counts_option,
    duration_option,
    json_option,
    read_documents,
    read_only,
    read_require,
    read_workload,
)
from hp_tune.commands.progress import Bar
from hp_tune.measured.options import measuring_options

if TYPE_CHECKING:
    from hp_tune.clusters.cluster import Cluster
    from hp_tune.measured.result import Measurer
    from hp_tune.models.model import Model
    from hp_tune.searching.engine import Settings
    from hp_tune.workload import Workload

__all__ = ["search"]


def _no_nan(context: click.Context, option: click.Parameter, value: float) -> float:
    """Refuse what is neither below nor above the limit of a range."""
    if value != value:
        raise click.BadParameter("'nan' must be a number of at least 1", context, option)
    return value


@config_option
@click.command()
@click.option("--model", required=True, help="A config.json, a folder that has one, or a preset.")
@click.option("--cluster", required=True, help="A YAML file or a preset.")
@count_option("--cp", "Ranks that share one sequence.", required=True)
@counts_option("--seq", "Global sequence lengths, such as 128K or 32K,128K.")
@click.option("--seq-hist", default=None, type=click.Path(path_type=Path, dir_okay=False),
              help="A file of lengths and how often each occurs, instead of --seq.")  # fmt: skip
@click.option("--documents", default=None, type=click.Path(path_type=Path, dir_okay=False),
              help="A file of lengths of packed documents and how often each occurs.")  # fmt: skip
@count_option("--tp", "Ranks that share the heads.", default=1)
@count_option("--world", "All ranks; then parameters and optimizer count too.  [default: tp x cp]")
@count_option("--batch", "Sequences per CP group.", default=1)
@click.option("--dtype", default=None, type=click.Choice(["bf16", "fp16", "fp32", "fp64"]),
              help="Of q, k and v.  [default: the model's]")  # fmt: skip
@click.option(
    "--layout",
    default="BSHD",
    show_default=True,
    metavar="NAME",
    help="Dims of q, k and v at the attention boundary: BSHD, BNSD, SBHD or TND.",
)
@click.option("--causal/--no-causal", default=None, help="[default: the model's]")
@click.option("--dense-mask", is_flag=True, help="The attention kernel computes masked blocks too.")
@click.option("--handoffs", is_flag=True,
              help="The model marks where q, k, v are final with hp_cp.Handoff.")  # fmt: skip
@click.option("--recompute", default="auto", show_default=True,
              type=click.Choice(["auto", "on", "off"]),
              help="Activation checkpointing; auto only if nothing fits without.")  # fmt: skip
@click.option("--mode", default="analytic", show_default=True,
              type=click.Choice(["analytic", "measured", "hybrid"]),
              help="Rank by prediction, run everything, or run what is predicted near the best.",
              )  # fmt: skip
@click.option("--within", default=1.25, show_default=True, type=click.FloatRange(min=1),
              callback=_no_nan,
              help="hybrid: run what is predicted within this factor of the best, ...")  # fmt: skip
@click.option("--keep", default=3, show_default=True, type=click.IntRange(min=1),
              help="... and at least so many.")  # fmt: skip
@duration_option("--budget", "Begin no trial after this time, such as 20m; exit code 4.")
@count_option("--max-trials", "Begin at most so many trials in this run; exit code 4.")
@measuring_options
@click.option("--space", "restrict", multiple=True, metavar="KEY=VALUES",
              help="Search a part: u=1,2 lb=on,off overlap=... kv_chunks=... halo=0,1 ...",
              )  # fmt: skip
@click.option("--variants", is_flag=True,
              help="Also groups of heads, and K and V that are gathered again.")  # fmt: skip
@click.option("--require", default=None, metavar="TEXT",
              help="What must hold, such as 'memory_gib <= 52 and imbalance < 1.2'.")  # fmt: skip
@click.option("--objective", default="time", show_default=True,
              type=click.Choice(["time", "pareto"]),
              help="pareto: also the front of time and memory.")  # fmt: skip
@click.option("--kernels", default=None, metavar="DEVICE",
              help="Also launches of pack and unpack, such as on ascend910b3.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0),
              help="Of all that is random.")  # fmt: skip
@click.option("--storage", default=None, metavar="URL",
              help="A database for workers on several machines, instead of --study.")  # fmt: skip
@click.option("--study", default=None, type=click.Path(path_type=Path, dir_okay=False),
              help="Optuna Journal file.  [default: one per search in .hp-tune/]")  # fmt: skip
@click.option("--out", default="plan.json", show_default=True, help="Where the plan is written.",
              type=click.Path(path_type=Path, dir_okay=False))  # fmt: skip
@json_option("Print the result as one JSON object.")
@click.option("--quiet", is_flag=True, help="Say nothing on stderr but what is wrong.")
def search(**options: Any) -> None:
    """Rank every configuration for a model on a cluster, and write the best as a plan."""
    from hp_tune.clusters.cluster_files import read_cluster
    from hp_tune.models.hf_config import read_model
    from hp_tune.output import require_place
    from hp_tune.plans.plan_file import write
    from hp_tune.printing import render_search
    from hp_tune.searching.buckets import search_lengths
    from hp_tune.searching.budget import Budget

    model, cluster = read_model(options["model"]), read_cluster(options["cluster"])
    lengths = _lengths(options)
    workload = read_workload(model, options, lengths[0][0], read_documents(options))
    how = _settings(options)
    require_place(options["out"])
    budget = Budget(options["budget"], options["max_trials"])
    study = partial(_study_path, model, cluster, options, len(lengths) > 1)
    with Bar("searching", quiet=options["quiet"]) as bar:
        for sentence in strange_variables(search, os.environ):
            bar.tell(sentence)
        found = search_lengths(
            model, cluster, workload, lengths,
            study=study,
            storage=options["storage"],
            measurer=None if how.mode == "analytic" else _measurer(model, options, study, bar.tell),
            budget=budget,
            tell=bar.tell,
            step=bar.step,
            settings=how,
        )  # fmt: skip
    if found.plan is not None:
        write(found.plan, options["out"])
    out = None if found.plan is None else options["out"]
    try:
        if options["as_json"]:
            render_search.as_json(found, out, told_by(click.get_current_context()))
        else:
            render_search.as_text(found, out)
    finally:  # also where the reader of what is printed has gone
        if found.error is not None:
            raise found.error


def config_says(path: Path) -> tuple[str, list[str]]:
    """Return what a file for ``--config`` asks for, and what it leaves to the command line.

    Raises:
        UsageError: It, or a file or a preset that it names, cannot be used.
    """
    from hp_tune.clusters.cluster_files import read_cluster
    from hp_tune.commands.config import read_config
    from hp_tune.models.hf_config import read_model
    from hp_tune.searching.evaluate import check_inputs

    said = read_config(path, search)
    bare = click.Command("search", params=[copy.copy(one) for one in search.params])
    for one in bare.params:
        one.envvar = None  # the file is checked, not this shell
    # whatever is missing is None and no error
    context = bare.make_context("search", [], default_map=said, resilient_parsing=True)
    options = context.params
    model = None if options["model"] is None else read_model(options["model"])
    cluster = None if options["cluster"] is None else read_cluster(options["cluster"])
    missing = [name for name in ("model", "cluster", "cp") if options[name] is None]
    missing += ["seq"] * (options["seq"] is None and options["seq_hist"] is None)
    notes = [f"--{', --'.join(missing)} must be given beside it"] if missing else []
    words = [f"{options['mode']} search"]
    words += [f"of {model.name}"] if model else []
    words += [f"on {cluster.name}"] if cluster else []
    read_require(options)
    if options["cp"] is None:
        return " ".join(words), notes
    read_only(options)
    words += [f"with cp {options['cp']}"]
    if model is not None and (options["seq"] or options["seq_hist"]):
        lengths = _lengths(options)
        words += [f"at {', '.join(str(length) for length, _ in lengths)}"]
        workload = read_workload(model, options, lengths[0][0], read_documents(options))
        if cluster is not None:
            check_inputs(cluster, workload)
    return " ".join(words), notes


def _lengths(options: dict[str, Any]) -> list[tuple[int, float]]:
    from hp_tune.errors import UsageError

    listed, path = options["seq"], options["seq_hist"]
    if (listed is None) == (path is None):
        raise UsageError("one of --seq and --seq-hist must be given", "such as --seq 32K,128K")
    if path is None:
        return [(length, 1 / len(listed)) for length in listed]
    from hp_tune.searching.lengths import binned, read_histogram

    return binned(read_histogram(path), 2 * options["cp"])


def _settings(options: dict[str, Any]) -> Settings:
    from hp_tune.errors import UsageError
    from hp_tune.searching.engine import Settings

    if options["storage"] is not None and options["study"] is not None:
        raise UsageError("--study and --storage must not both be given", "name one place")
    return Settings(
        mode=options["mode"],
        objective=options["objective"],
        recompute=options["recompute"],
        variants=options["variants"],
        within=options["within"],
        keep=options["keep"],
        only=read_only(options),
        require=read_require(options),
        kernels=options["kernels"],
        seed=options["seed"],
    )


def _measurer(
    model: Model,
    options: dict[str, Any],
    study: Callable[[Workload], Path],
    tell: Callable[[str], None],
) -> Callable[[Workload], Measurer]:
    """Return what makes the runner of trials of a length; its logs are beside the study."""
    from hp_tune.measured.options import measurer_from

    def logs(workload: Workload) -> Path:
        asked = {"recompute": options["recompute"] == "on"}  # which a search may decide otherwise
        return study(workload.model_copy(update=asked)).with_suffix(".logs")

    return measurer_from(model, options, logs=logs, tell=tell)


def _study_path(
    model: Model, cluster: Cluster, options: dict[str, Any], several: bool, workload: Workload
) -> Path:
    """Return the Journal file of a length: the named one, or one whose name says the search."""
    from hp_tune.files import sha256
    from hp_tune.searching.engine import COST_MODEL

    named: Path | None = options["study"]
    if named is not None:
        return named.with_stem(f"{named.stem}-s{workload.seq_len}") if several else named
    mode, objective = options["mode"], options["objective"]
    asked = [
        COST_MODEL, model.model_dump(mode="json"), cluster.digest, options["recompute"],
        workload.model_dump(mode="json"), mode, objective, options["require"],
    ]  # fmt: skip
    if mode != "analytic":
        asked += [options[name] for name in ("backend", "nproc_per_node", "hosts", "rounds")]
    if mode == "hybrid":
        asked += [options["within"], options["keep"], options["restrict"], options["variants"]]
    key = sha256(asked)[:8]
    suffix = "" if mode == "analytic" else f"-{mode}"
    names = f"{model.name[:80]}-{cluster.name[:80]}"  # a file name has 255 bytes
    name = f"{names}-cp{workload.cp_size}-s{workload.seq_len}{suffix}-{key}"
    return Path(".hp-tune") / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', name)}.journal"
