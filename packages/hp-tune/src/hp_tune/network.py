"""How long a collective takes: which ranks of a group share which tier, and what that tier carries.

A group is ``size`` ranks, ``stride`` apart (mesh axes inside it lie between them)::

    8-card nodes, tp = 2, ulysses 4, colossal 2
    rank     0 . 2 . 4 . 6 . | 8 . 10 . 12 . 14 .
    ulysses  0   2   4   6     stride 2: one node
    colossal 0               8 stride 8: two nodes
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from hp_tune.cluster import Cluster, Curve, Tier

__all__ = ["Group", "Transfer", "transfer"]


@dataclass(frozen=True, slots=True)
class Group:
    """``size`` ranks, ``stride`` apart, in a job of ``world_size`` contiguous ranks."""

    size: int
    stride: int
    world_size: int

    def within(self, tier: Tier) -> int:
        """Return how many members share one domain of ``tier`` with a member."""
        if tier.size is None:
            return self.size
        return max(1, min(self.size, tier.size // self.stride))


@dataclass(frozen=True, slots=True)
class Transfer:
    """The predicted time of one collective.

    Attributes:
        seconds: From its start to its end, latency included.
        tier: The tier that takes longest.
        tier_bytes: Bytes per rank on that tier.
        GBps: Bandwidth per rank that was used for it.
        share_of_peak: That bandwidth as a fraction of what the tier can do without losses.
        sources: Names of the cluster's numbers behind it.
    """

    seconds: float
    tier: str
    tier_bytes: float
    GBps: float
    share_of_peak: float
    sources: tuple[str, ...]


def transfer(cluster: Cluster, kind: str, group: Group, bytes_sent: float) -> Transfer:
    """Return the time of one collective in which each rank sends ``bytes_sent`` in all.

    An all-to-all uses all tiers at once, so the slowest counts. Gathers and reduce-scatters go
    tier by tier (between nodes first, then inside), so the tiers add up. A swap between mirror
    ranks (``p2p``) uses one link of the outermost tier that the group reaches.
    """
    stages = []
    inside = 1
    latency = 0.0
    for tier in cluster.tiers:
        members = group.within(tier)
        if members == inside:
            continue
        latency = tier.latency_us.value * 1e-6
        if kind == "all_to_all":
            part = bytes_sent * (members - inside) / (group.size - 1)
        elif kind == "p2p":
            part = bytes_sent if members == group.size else 0.0
        else:  # the (members / inside) blocks of this tier pass on what the outer ones brought
            shard = bytes_sent / (group.size - 1)
            part = shard * (members / inside - 1) * (group.size / members)
        links = 1.0 if kind == "p2p" else members / inside - 1
        stages.append((tier, part, *_bandwidth(tier, kind, links, part, group)))
        inside = members
    if not stages:
        return Transfer(0.0, "none", 0.0, 0.0, 0.0, ())
    times = [part / (rate * 1e9) for _, part, rate, _ in stages]
    total = max(times) if kind == "all_to_all" else sum(times)
    slowest = max(range(len(stages)), key=times.__getitem__)
    tier, part, rate, peak = stages[slowest]
    return Transfer(
        seconds=max(latency, total) if _curve(tier, kind) else latency + total,
        tier=tier.name,
        tier_bytes=part,
        GBps=rate,
        share_of_peak=rate / peak,
        sources=tuple(f"tiers.{name}" for name in _sources(tier, kind)),
    )


def _bandwidth(
    tier: Tier, kind: str, links: float, part: float, group: Group
) -> tuple[float, float]:
    """Return (achieved, peak) GB/s per rank for ``part`` bytes on ``tier``."""
    peak = tier.bandwidth.value
    if tier.kind == "full_mesh":
        peak *= links
    elif tier.kind == "shared_bus":  # every rank of the job in this domain sends at the same time
        peak /= min(group.world_size, tier.size or group.world_size)
    peak /= tier.oversubscription * tier.ranks_per_nic
    curve = _curve(tier, kind)
    if curve is None:
        return peak * tier.efficiency.value, peak
    return max(1e-9, _interpolate(curve, part)) / tier.oversubscription, peak


def _curve(tier: Tier, kind: str) -> Curve | None:
    if kind == "p2p":
        return None
    return tier.all_to_all if kind == "all_to_all" else tier.all_gather


def _interpolate(curve: Curve, size_bytes: float) -> float:
    size = max(size_bytes / 2**20, 1e-6)
    points = curve.points
    if size <= points[0][0]:  # below the first point time, not bandwidth, stays
        return points[0][1] * size / points[0][0]
    for (x0, y0), (x1, y1) in pairwise(points):
        if size <= x1:
            part = math.log(size / x0) / math.log(x1 / x0)
            return y0 * math.exp(part * math.log(y1 / y0))
    return points[-1][1]


def _sources(tier: Tier, kind: str) -> tuple[str, ...]:
    if _curve(tier, kind):
        name = "all_to_all" if kind == "all_to_all" else "all_gather"
        return (f"{tier.name}.{name}", f"{tier.name}.latency_us")
    return (f"{tier.name}.bandwidth", f"{tier.name}.efficiency", f"{tier.name}.latency_us")
