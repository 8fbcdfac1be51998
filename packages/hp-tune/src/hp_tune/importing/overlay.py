"""Turn logs into the change of a cluster description."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hp_tune.clusters.cluster import Cluster, Tier
from hp_tune.clusters.collective_times import CollectiveTimes, Kind
from hp_tune.errors import UsageError
from hp_tune.importing.hccl import is_hccl, read_hccl
from hp_tune.importing.log import Log, wrong
from hp_tune.importing.nccl import is_nccl, read_nccl
from hp_tune.profile.smooth import ascending

__all__ = ["describe_logs", "read_log", "times_of_log"]

CURVES = ("all_to_all", "all_gather", "reduce_scatter")


def read_log(
    path: Path,
    *,
    kind: Kind | None = None,
    num_ranks: int | None = None,
    num_nodes: int | None = None,
    in_place: bool = False,
) -> Log:
    """Return a log with all that is needed of it.

    Args:
        path: Of the log.
        kind, num_ranks, num_nodes: Taken where the log does not say.
        in_place: Of nccl-tests, these columns.

    Raises:
        UsageError: It is no log, or broken; the message begins with ``file:line``.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    if is_nccl(lines):
        log = read_nccl(path, lines, in_place=in_place)
    elif is_hccl(lines):
        log = read_hccl(path, lines, num_ranks=num_ranks)
    else:
        raise wrong(
            path, max(1, len(lines)),
            "there is no table of nccl-tests or hccl_test up to here",
            "import what alltoall_perf, all_gather_perf, reduce_scatter_perf, sendrecv_perf or "
            "hccl_test's alltoall_test, all_gather_test, reduce_scatter_test printed",
        )  # fmt: skip
    return log.completed(kind, num_ranks, num_nodes)


def times_of_log(log: Log, stride: int) -> CollectiveTimes:
    """Return the times of a log's group, by the bytes that leave a rank."""
    assert log.kind is not None and log.num_ranks is not None, "completed"
    n = log.num_ranks
    leaves = 1.0 if log.kind == "p2p" else (n - 1) / n
    rows = {row.size: row for row in sorted(log.rows, key=lambda row: row.size)}
    times = ascending([row.us / 1e3 for row in rows.values()])
    return CollectiveTimes(
        kind=log.kind,
        size=n,
        stride=stride,
        world_size=n,
        points=tuple(
            (float(f"{size * leaves / 2**20:.6g}"), float(f"{ms:.4g}"))
            for size, ms in zip(rows, times, strict=True)
        ),
        ref=f"{log.tool}, {log.path.name}: {n} ranks on {log.num_nodes} nodes",
    )


def describe_logs(logs: Sequence[Log], *, name: str, base: str, known: Cluster) -> dict[str, Any]:
    """Return the content of a cluster file that extends ``base`` by what the logs say.

    Each log is the times of its shape of group; a log of one node, or of one rank per node, is also
    the curve of its tier, for groups of other sizes.
    """
    entries: dict[str, CollectiveTimes] = {}
    curves: dict[int, dict[str, dict[int, CollectiveTimes]]] = {}
    for log in logs:
        assert log.num_ranks is not None and log.num_nodes is not None, "completed"
        stride, tier = _place(log, known)
        times = times_of_log(log, stride)
        other = entries.get(times.name)
        if other is not None:
            raise UsageError(
                f"{log.path}: {times.kind} on {times.size} ranks was imported already, from "
                f"{other.ref}",
                "leave one of the logs out",
            )
        entries[times.name] = times
        if tier is not None:
            curves.setdefault(tier, {}).setdefault(times.kind, {})[times.size] = times
    made: dict[str, Any] = {
        "extends": base,
        "name": name,
        "description": f"{known.description}; collectives from {_tools(logs)}",
    }
    tiers = [_tier(known.tiers[at], found) for at, found in sorted(curves.items())]
    if tiers:
        made["tiers"] = tiers
    made["collectives"] = [
        entry.model_dump(mode="json", exclude_none=True) for entry in entries.values()
    ]
    return made


def _tools(logs: Sequence[Log]) -> str:
    return " and ".join(dict.fromkeys(log.tool for log in logs))


def _place(log: Log, known: Cluster) -> tuple[int, int | None]:
    """Return the stride of a log's group, and the index of its tier if it is within one."""
    assert log.num_ranks is not None and log.num_nodes is not None, "completed"
    n, nodes = log.num_ranks, log.num_nodes
    inner = known.tiers[0].size
    if nodes == 1:
        if inner is not None and n > inner:
            raise wrong(
                log.path, 1, f"{n} ranks on one node must be at most {inner}, the ranks of a node "
                f"of {known.name}", "give --nodes",
            )  # fmt: skip
        return 1, 0
    if n == nodes and inner is not None:  # one rank per node
        return inner, 1 if len(known.tiers) > 1 else None
    return 1, None


def _tier(known: Tier, found: Mapping[str, Mapping[int, CollectiveTimes]]) -> dict[str, Any]:
    made: dict[str, Any] = {"name": known.name}
    every = [times for by_ranks in found.values() for times in by_ranks.values()]
    first = min(every, key=lambda times: times.points[0][1])
    made["latency_us"] = {
        "value": max(0.01, float(f"{first.points[0][1] * 1e3:.4g}")),
        "source": "measured",
        "ref": f"{first.ref}, shortest call",
    }
    for kind in CURVES:
        rates = {
            size: [
                [mib, float(f"{mib * 2**20 / ms / 1e6 * known.sharing:.4g}")]
                for mib, ms in times.points
            ]
            for size, times in sorted(found.get(kind, {}).items())
            if len(times.points) > 1
        }
        if rates:
            made[kind] = {
                "by_ranks": rates,
                "source": "measured",
                "ref": ", ".join(found[kind][size].ref for size in rates),
            }
    return made
