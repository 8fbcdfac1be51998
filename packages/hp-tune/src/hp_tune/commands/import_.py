"""``hp-tune import``: logs of nccl-tests and hccl_test become a cluster file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hp_tune.commands.options import count_option, json_option

if TYPE_CHECKING:
    from hp_tune.clusters.collective_times import Kind

__all__ = ["import_"]


@click.command("import")
@click.argument("logs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--cluster", "base", required=True, metavar="NAME|FILE",
              help="What the logs are of; everything that they do not say stays.")  # fmt: skip
@click.option("--name", default=None, help="Of the description.  [default: CLUSTER-imported]")
@click.option("--kind", default=None,
              type=click.Choice(["all_to_all", "all_gather", "reduce_scatter", "p2p"]),
              help="Of logs that do not name their program.")  # fmt: skip
@count_option("--ranks", "Of logs that do not say it (hccl_test).")
@count_option("--nodes", "Of logs that do not say it.  [default: 1]")
@click.option("--in-place", is_flag=True, help="Take nccl-tests' in-place columns.")
@click.option("--out", default=None, type=click.Path(path_type=Path, dir_okay=False),
              help="Where the description is written.  [default: NAME.yaml]")  # fmt: skip
@json_option("Print the description as one JSON object.")
def import_(
    logs: tuple[Path, ...],
    base: str,
    name: str | None,
    kind: Kind | None,
    ranks: int | None,
    nodes: int | None,
    in_place: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Read what nccl-tests or hccl_test printed, and write a cluster file that extends another.

    LOGS are the outputs of alltoall_perf, all_gather_perf, reduce_scatter_perf and sendrecv_perf,
    or of hccl_test's alltoall_test, all_gather_test and reduce_scatter_test: one file per run.
    """
    from hp_tune.clusters.cluster_files import read_cluster
    from hp_tune.importing.overlay import describe_logs, read_log
    from hp_tune.profile.show import show
    from hp_tune.profile.writing import as_said_in, write_cluster

    known = read_cluster(base)
    name = name or f"{known.name}-imported"
    path = out or Path(f"{name}.yaml")
    read = [
        read_log(log, kind=kind, num_ranks=ranks, num_nodes=nodes, in_place=in_place)
        for log in logs
    ]
    content = describe_logs(read, name=name, base=as_said_in(path, base), known=known)
    heading = f"Written by hp-tune import from {', '.join(log.path.name for log in read)}."
    cluster = write_cluster(content, path, heading=heading)
    found = {
        "logs": [
            {
                "path": str(log.path),
                "tool": log.tool,
                "kind": log.kind,
                "ranks": log.num_ranks,
                "nodes": log.num_nodes,
                "rows": len(log.rows),
            }
            for log in read
        ]
    }
    show(cluster, found, path, as_json=as_json)
