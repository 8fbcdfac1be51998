"""The options of a command that measures, and the measurer that they describe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from hp_tune.measured.measurer import TorchrunMeasurer
    from hp_tune.models.model import Model
    from hp_tune.workload import Workload

__all__ = ["measurer_from", "measuring_options"]

Decorated = TypeVar("Decorated", bound=Callable[..., Any] | click.Command)


class _Hosts(click.types.StringParamType):
    """Prefixes of commands: they have spaces in them, so HP_TUNE_HOST is split at semicolons."""

    envvar_list_splitter = ";"


OPTIONS = (
    click.option("--backend", default="cpu-gloo", show_default=True,
                 type=click.Choice(["cpu-gloo", "cuda-nccl", "npu-hccl"]),
                 help="Device and collectives of measured trials."),
    click.option("--nproc-per-node", type=click.IntRange(min=1), default=None, metavar="N",
                 help="Ranks of a trial on each host.  [default: --cp over the hosts]"),
    click.option("--host", "hosts", multiple=True, metavar="PREFIX", type=_Hosts(),
                 help="What stands in front of a command to run it on a node, such as 'ssh node1' "
                 "or 'ip netns exec hp0'; once per node.  [default: this machine]"),
    click.option("--master-addr", default="", metavar="ADDRESS",
                 help="Address of the first host for the others.  [default: it is asked]"),
    click.option("--trial-timeout", type=click.FloatRange(min=1), default=300.0, show_default=True,
                 metavar="SECONDS", help="After which a trial is ended."),
    click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True, metavar="N",
                 help="Timed rounds of a trial at most, 3 N of the finals; fewer if they agree."),
    click.option("--warmup", type=click.IntRange(min=2), default=2, show_default=True, metavar="N",
                 help="Steps of a trial before the timed ones."),
)  # fmt: skip


def measuring_options(command: Decorated) -> Decorated:
    """Add the options of measured trials to a command; `measurer_from` reads them."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def measurer_from(
    model: Model,
    options: Mapping[str, Any],
    *,
    logs: Callable[[Workload], Path],
    tell: Callable[[str], None] = lambda _: None,
) -> Callable[[Workload], TorchrunMeasurer]:
    """Return what makes the measurer of a workload, as a command's options describe it.

    The hosts are asked for their devices here, once.

    Args:
        model: Of the search.
        options: Parameters of the command, among them those of `measuring_options` and ``cp``.
        logs: Returns the folder for the logs of the trials of a workload.
        tell: Receives one sentence when something needs to be known.

    Raises:
        UsageError: The ranks of the hosts are not those of the workload.
        MissingToolsError: The devices of the backend are not there.
    """
    from hp_tune.errors import UsageError
    from hp_tune.measured.measurer import TorchrunMeasurer
    from hp_tune.measured.request import Protocol
    from hp_tune.torchrun import Launcher

    hosts, nproc, cp = tuple(options["hosts"]), options["nproc_per_node"], options["cp"]
    nodes = max(1, len(hosts))
    if nproc is None and cp % nodes:
        raise UsageError(
            f"--cp ({cp}) must be divisible by the number of --host ({nodes})",
            "say how many ranks a host has with --nproc-per-node",
        )
    launcher = Launcher(
        options["backend"], nproc or cp // nodes, hosts, master_addr=options["master_addr"]
    )
    if launcher.backend == "cpu-gloo":
        tell("backend cpu-gloo: times are those of these machines' CPUs and not transferable")
    launcher.check()

    def make(workload: Workload) -> TorchrunMeasurer:
        return TorchrunMeasurer(
            model,
            workload,
            launcher,
            logs(workload),
            timeout=options["trial_timeout"],
            protocol=Protocol(warmup=options["warmup"], rounds=options["rounds"]),
        )

    return make
