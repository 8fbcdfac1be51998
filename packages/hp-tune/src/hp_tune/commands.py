"""The commands of ``hp-tune``: read options, ask the engine, print through `hp_tune.render`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hp_tune.errors import UsageError
from hp_tune.kernels.command import kernels

if TYPE_CHECKING:
    from hp_tune.cluster import Cluster
    from hp_tune.model import Model
    from hp_tune.workload import Layout, Workload

__all__ = ["cli"]

Decorated = TypeVar("Decorated", bound=Callable[..., Any] | click.Command)


def _count(value: str) -> int:
    """Read a positive whole number; ``128K`` is 131072."""
    match = re.fullmatch(r"([0-9]+)([kKmM]?)", str(value).replace("_", ""))
    if match is None or int(match[1]) == 0:
        raise click.BadParameter(
            f"{value!r} must be a whole number of at least 1, such as 131072 or 128K"
        )
    return int(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2].lower()]


def _count_option(
    name: str, text: str, *, required: bool = False, default: int | None = None
) -> Callable[[Decorated], Decorated]:
    shown = default is not None
    return click.option(
        name, type=_count, metavar="N", help=text, required=required, default=default,
        show_default=shown,
    )  # fmt: skip


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def cli() -> None:
    """Choose how to parallelise attention over the sequence, and say why."""


@cli.command()
@click.option("--model", required=True, help="A config.json, a folder that has one, or a preset.")
@click.option("--cluster", required=True, help="A YAML file or a preset.")
@_count_option("--cp", "Ranks that share one sequence.", required=True)
@_count_option("--seq", "Global sequence length, such as 128K.", required=True)
@_count_option("--tp", "Ranks that share the heads.", default=1)
@_count_option("--world", "All ranks; then parameters and optimizer count too.  [default: tp x cp]")
@_count_option("--batch", "Sequences per CP group.", default=1)
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
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def search(**options: Any) -> None:
    """Rank every configuration for a model on a cluster, and write the best as a plan."""
    from hp_tune import render
    from hp_tune.cluster_files import read_cluster
    from hp_tune.engine import NothingValidError, search
    from hp_tune.hf_config import read_model
    from hp_tune.plan_file import write

    model, cluster = read_model(options["model"]), read_cluster(options["cluster"])
    workload = _workload(model, options)
    show = render.result_json if options["as_json"] else render.result_text
    try:
        result = search(
            model,
            cluster,
            workload,
            recompute=options["recompute"],
            study=options["study"] or _study_path(model, cluster, workload, options["recompute"]),
            tell=_tell,
        )
    except NothingValidError as error:
        show(error.result, None)
        raise
    assert result.plan is not None, "a search that returns has a plan"
    write(result.plan, options["out"])
    show(result, options["out"])


cli.add_command(kernels)


@cli.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def presets(name: str | None, as_json: bool) -> None:
    """List models and clusters, or show one of them with the source of each number."""
    from hp_tune import render
    from hp_tune.cluster_files import cluster_presets, read_cluster
    from hp_tune.hf_config import model_presets, read_model

    if name is None:
        models = [read_model(known) for known in model_presets()]
        render.presets(models, [read_cluster(known) for known in cluster_presets()], as_json)
    elif name in cluster_presets():
        render.cluster(read_cluster(name), as_json)
    elif name.lower() in {known.lower() for known in model_presets()}:
        render.model(read_model(name), as_json)
    else:
        known = ", ".join([*model_presets(), *cluster_presets()])
        raise UsageError(f"there is no preset {name!r}", f"presets: {known}")


@cli.command()
@click.argument("path", type=click.Path(path_type=Path), default="plan.json")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
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


def _workload(model: Model, options: dict[str, Any]) -> Workload:
    from hp_tune.workload import Dtype, Workload

    causal = model.causal if options["causal"] is None else options["causal"]
    dtype: Dtype = options["dtype"] or model.dtype
    return Workload(
        seq_len=options["seq"],
        cp_size=options["cp"],
        tp_size=options["tp"],
        world_size=options["world"],
        batch=options["batch"],
        dtype=dtype,
        layout=_layout(options["layout"]),
        causal=causal,
        skips_masked=not options["dense_mask"],
        handoffs=options["handoffs"],
        recompute=options["recompute"] == "on",
    )


def _layout(name: str) -> Layout:
    from hp_mesh.layout import layout

    try:
        found = layout(name)
    except ValueError as error:
        raise UsageError(f"--layout: {error}") from None
    if found.head_dim is None:
        raise UsageError(f"--layout ({name}) must have a dim of heads", "use BSHD or SBHD")
    known: Layout = found.name  # type: ignore[assignment]
    return known


def _study_path(model: Model, cluster: Cluster, workload: Workload, recompute: str) -> Path:
    from hp_tune.engine import COST_MODEL
    from hp_tune.files import sha256

    asked = [COST_MODEL, model.model_dump(mode="json"), cluster.digest, recompute]
    key = sha256([*asked, workload.model_dump(mode="json")])[:8]
    name = f"{model.name}-{cluster.name}-cp{workload.cp_size}-s{workload.seq_len}-{key}"
    return Path(".hp-tune") / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', name)}.journal"


def _tell(sentence: str) -> None:
    click.echo(f"hp-tune: {sentence}", err=True)
