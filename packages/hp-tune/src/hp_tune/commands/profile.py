"""``hp-tune profile``: measure this cluster, and write its description."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hp_tune.commands.options import count_option, json_option
from hp_tune.commands.progress import Bar
from hp_tune.errors import UsageError

if TYPE_CHECKING:
    from hp_tune.torchrun import Backend
    from hp_tune.workload import Dtype

__all__ = ["profile"]


@click.command()
@click.option("--cluster", "base", default=None, metavar="NAME|FILE",
              help="What it extends; its peaks stay.  [default: nothing]")  # fmt: skip
@click.option("--name", default=None, metavar="NAME", help="Name of the description written.")
@click.option("--backend", default="cpu-gloo", show_default=True,
              type=click.Choice(["cpu-gloo", "cuda-nccl", "npu-hccl"]))  # fmt: skip
@count_option("--nproc-per-node", "Ranks on each host.", default=2)
@click.option("--host", "hosts", multiple=True, metavar="PREFIX",
              help="What stands before a command to run it on a host, such as 'ssh node1'; once "
              "for each host.  [default: this machine]")  # fmt: skip
@click.option("--master-addr", default="", metavar="ADDRESS",
              help="Of the first host, as the others see it.  [default: asked for]")  # fmt: skip
@click.option("--dtype", default=None, type=click.Choice(["bf16", "fp16", "fp32", "fp64"]),
              help="Of products and attention.  [default: fp32 on CPUs, else bf16]")  # fmt: skip
@count_option("--rounds", "Timed rounds; the median counts.", default=9)
@count_option("--largest", "Largest message in bytes, such as 64M.  [default: by backend]")
@click.option("--quick", is_flag=True, help="Small sizes and few rounds: to see that it works.")
@click.option("--timeout", default=900.0, show_default=True, metavar="SECONDS",
              type=click.FloatRange(min=1))  # fmt: skip
@click.option("--out", default=None, type=click.Path(path_type=Path, dir_okay=False),
              help="Where the description is written.  [default: NAME.yaml]")  # fmt: skip
@json_option("Print the description and every sample as one JSON object.")
@click.option("--quiet", is_flag=True, help="Say nothing on stderr but what is wrong.")
def profile(
    base: str | None,
    name: str | None,
    backend: Backend,
    nproc_per_node: int,
    hosts: tuple[str, ...],
    master_addr: str,
    dtype: Dtype | None,
    rounds: int,
    largest: int | None,
    quick: bool,
    timeout: float,
    out: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Measure collectives, copies, matrix products and attention, and write a cluster file.

    ``hp-tune search --cluster FILE`` reads it. With ``--cluster`` it says only what was measured
    and extends a preset or a file; without, it is a whole description.
    """
    from hp_tune.profile.running import Effort, profile
    from hp_tune.profile.show import show
    from hp_tune.torchrun import Launcher

    if name is None and base is None:
        raise UsageError(
            "profile must have a name for what it writes",
            "use --name mylaptop, or --cluster BASE to extend a description",
        )
    name = name or f"{Path(str(base)).stem}-measured"
    effort = replace(Effort.of(backend), rounds=rounds)
    if quick:
        effort = Effort(
            rounds=2, smallest=2**12, largest=2**18, lengths=(64, 128), copied=2**20, gemm=128
        )
    if largest is not None:
        effort = replace(effort, largest=max(largest, effort.smallest))
    launcher = Launcher(
        backend,
        nproc_per_node,
        hosts,
        master_addr=master_addr,
        threads=1 if backend == "cpu-gloo" else None,
    )
    path = out or Path(f"{name}.yaml")
    with Bar("measuring", quiet=quiet) as bar:
        cluster, found = profile(
            launcher, path, name=name, base=base, dtype=dtype, effort=effort, timeout=timeout,
            tell=bar.tell, step=bar.step,
        )  # fmt: skip
    show(cluster, found, path, as_json=as_json)
    sys.stdout.flush()
