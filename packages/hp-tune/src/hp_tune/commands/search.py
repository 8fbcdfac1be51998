"""``hp-tune search``: rank every configuration, and write the best as a plan."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hp_tune.commands.options import count_option, json_option, read_workload, tell

if TYPE_CHECKING:
    from hp_tune.cluster import Cluster
    from hp_tune.model import Model
    from hp_tune.workload import Workload

__all__ = ["search"]


@click.command()
@click.option("--model", required=True, help="A config.json, a folder that has one, or a preset.")
@click.option("--cluster", required=True, help="A YAML file or a preset.")
@count_option("--cp", "Ranks that share one sequence.", required=True)
@count_option("--seq", "Global sequence length, such as 128K.", required=True)
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
@click.option("--study", default=None, type=click.Path(path_type=Path, dir_okay=False),
              help="Optuna Journal file.  [default: one per search in .hp-tune/]")  # fmt: skip
@click.option("--out", default="plan.json", show_default=True, help="Where the plan is written.",
              type=click.Path(path_type=Path, dir_okay=False))  # fmt: skip
@json_option("Print the result as one JSON object.")
def search(**options: Any) -> None:
    """Rank every configuration for a model on a cluster, and write the best as a plan."""
    from hp_tune import render
    from hp_tune.cluster_files import read_cluster
    from hp_tune.engine import NothingValidError, search
    from hp_tune.hf_config import read_model
    from hp_tune.plan_file import write

    model, cluster = read_model(options["model"]), read_cluster(options["cluster"])
    workload = read_workload(model, options)
    show = render.result_json if options["as_json"] else render.result_text
    try:
        result = search(
            model,
            cluster,
            workload,
            recompute=options["recompute"],
            study=options["study"] or _study_path(model, cluster, workload, options["recompute"]),
            tell=tell,
        )
    except NothingValidError as error:
        show(error.result, None)
        raise
    assert result.plan is not None, "a search that returns has a plan"
    write(result.plan, options["out"])
    show(result, options["out"])


def _study_path(model: Model, cluster: Cluster, workload: Workload, recompute: str) -> Path:
    from hp_tune.engine import COST_MODEL
    from hp_tune.files import sha256

    asked = [COST_MODEL, model.model_dump(mode="json"), cluster.digest, recompute]
    key = sha256([*asked, workload.model_dump(mode="json")])[:8]
    name = f"{model.name}-{cluster.name}-cp{workload.cp_size}-s{workload.seq_len}-{key}"
    return Path(".hp-tune") / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', name)}.journal"
