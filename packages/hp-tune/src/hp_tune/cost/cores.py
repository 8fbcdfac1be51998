"""Ranks that share processor cores: when all of them are done.

Four ranks on two cores, with 1, 3, 5 and 7 units of work; each runs on one core at most::

    running   4     3     2     2
    speed    1/2   2/3    1     1
    done      1     3     5     7       units of work
    time      2     5     7     9       whole work / cores would be 8, the largest work alone 7
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hp_tune.clusters.cluster import Cluster
    from hp_tune.workload import Workload

__all__ = ["finish", "stretch", "waits_for"]


def finish(work: Sequence[float], cores: int) -> float:
    """Return when the last rank is done, if all start together and the cores are shared evenly."""
    time = done = 0.0
    for index, units in enumerate(sorted(work)):
        time += (units - done) * max(1.0, (len(work) - index) / cores)
        done = units
    return time


def _sharing(cluster: Cluster, num_ranks: int) -> int:
    """Return how many ranks of a job share the cores."""
    return min(num_ranks, cluster.shared_by or num_ranks)


def stretch(cluster: Cluster, num_ranks: int) -> float:
    """Return how much longer equal work takes on all ranks than on one alone; 1 if none share."""
    if cluster.shared_cores is None:
        return 1.0
    return max(1.0, _sharing(cluster, num_ranks) / cluster.shared_cores)


def waits_for(cluster: Cluster, work: Sequence[float], workload: Workload) -> float:
    """Return the work, alone on a core, that takes as long as the slowest rank needs.

    Args:
        work: Of the ranks of one CP group, in their order, or of blocks of neighbours among them
            that have as much each; other groups of the job have the same.
        workload: Whose ranks share the cores.
    """
    if cluster.shared_cores is None:
        return max(work)
    num_ranks, group = workload.num_ranks, workload.cp_size * workload.tp_size
    sharing = _sharing(cluster, num_ranks)
    ranks = [share for share in work for _ in range(group // len(work))] * (num_ranks // group)
    hosts = [ranks[first : first + sharing] for first in range(0, len(ranks), sharing)]
    return max(finish(host, cluster.shared_cores) for host in hosts)
