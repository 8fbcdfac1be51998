"""How long ranks take to fetch rows from the ranks before them: the halo of a sliding window.

Each rank of a group has its messages from its nearest predecessors, at the same time::

    8-card nodes     .. 5 -> 6 -> 7 | -> 8 -> 9 ..     inside a node all but one, which has all of
                                                       its messages from another node
"""

from __future__ import annotations

from collections.abc import Sequence

from hp_tune.clusters.cluster import Cluster, Tier
from hp_tune.clusters.network import Group, Stage, Transfer, bandwidth, measured_transfer, sources

__all__ = ["fetch"]

KIND = "p2p"


def fetch(cluster: Cluster, group: Group, messages: Sequence[float]) -> Transfer:
    """Return the time until the slowest rank of ``group`` has its messages.

    Some rank meets each tier that the group reaches with all of them; the slowest tier counts. What
    was measured as a swap on groups of this shape comes before that.

    Args:
        cluster: The network.
        group: Ranks that share one sequence.
        messages: Bytes of each message of the rank that has most, the nearest peer's first.
    """
    stages: list[Stage] = []
    inside, latency = 1, 0.0
    for tier in cluster.tiers:
        members = group.within(tier)
        if members == inside:
            continue
        inside, latency = members, tier.latency_us.value * 1e-6
        part = _part(tier, messages)
        stages.append(Stage(tier, part, *bandwidth(tier, KIND, 1.0, part, group)))
    if not (stages and messages):
        return Transfer(0.0, "none", 0.0, 0.0, 0.0, ())
    times = cluster.measured(KIND, group.size, group.stride, group.world_size)
    if times is not None:
        return measured_transfer(times, stages[-1], sum(messages))
    slowest = max(stages, key=lambda stage: stage.seconds)
    return Transfer(
        seconds=latency + slowest.seconds,
        tier=slowest.tier.name,
        tier_bytes=slowest.part,
        GBps=slowest.rate,
        share_of_peak=slowest.rate / slowest.peak,
        sources=tuple(f"tiers.{name}" for name in sources(slowest.tier, KIND)),
        formula=f"latency + {slowest}",
    )


def _part(tier: Tier, messages: Sequence[float]) -> float:
    """Return the bytes that pass the link which is busy longest."""
    if not messages:
        return 0.0
    if tier.kind == "full_mesh":  # a link per peer
        return max(messages)
    if tier.kind == "ring":  # on its way a message takes the link of every rank that it passes
        return sum(size * distance for distance, size in enumerate(messages, start=1))
    return sum(messages)
