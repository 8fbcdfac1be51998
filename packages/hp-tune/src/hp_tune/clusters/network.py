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

from hp_tune.clusters.cluster import Cluster, Points, Tier
from hp_tune.clusters.collective_times import CollectiveTimes

__all__ = ["Group", "Stage", "Transfer", "bandwidth", "measured_transfer", "sources", "transfer"]


CURVES = ("all_to_all", "all_gather", "reduce_scatter")


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
        formula: How ``seconds`` follows from them.
        cpu: Part of the cores that it keeps busy, where ranks share them and it was measured.
    """

    seconds: float
    tier: str
    tier_bytes: float
    GBps: float
    share_of_peak: float
    sources: tuple[str, ...]
    formula: str = ""
    cpu: float | None = None


def transfer(cluster: Cluster, kind: str, group: Group, bytes_sent: float) -> Transfer:
    """Return the time of one collective in which each rank sends ``bytes_sent`` in all.

    An all-to-all uses all tiers at once, so the slowest counts. Gathers and reduce-scatters go
    tier by tier (between nodes first, then inside), so the tiers add up. A swap between mirror
    ranks (``p2p``) uses one link of the outermost tier that the group reaches. ``ring`` is the
    exchange of ring attention: each step sends one shard to the next rank, so that the slowest link
    of the ring counts and every step pays its latency; `hp_tune` prices it to be compared with
    published tables, no style runs it.

    What was measured on groups of this shape comes before all that.
    """
    stages: list[Stage] = []
    times_of = cluster.measured(kind, group.size, group.stride, group.world_size)
    inside = 1
    latency = 0.0
    for tier in cluster.tiers:
        members = group.within(tier)
        if members == inside:
            continue
        latency = tier.latency_us.value * 1e-6
        if kind == "all_to_all":
            part = bytes_sent * (members - inside) / (group.size - 1)
        elif kind in ("p2p", "ring"):
            part = bytes_sent if members == group.size or kind == "ring" else 0.0
        else:  # the (members / inside) blocks of this tier pass on what the outer ones brought
            shard = bytes_sent / (group.size - 1)
            part = shard * (members / inside - 1) * (group.size / members)
        links = 1.0 if kind in ("p2p", "ring") else members / inside - 1
        size = part / (group.size - 1) if kind == "ring" else part
        rate, peak = bandwidth(tier, kind, links, size, group)
        stages.append(Stage(tier, part, rate, peak))
        inside = members
    if not stages:
        return Transfer(0.0, "none", 0.0, 0.0, 0.0, ())
    if times_of is not None and bytes_sent:
        return measured_transfer(times_of, stages[-1], bytes_sent)
    times = [stage.seconds for stage in stages]
    together = kind in ("all_to_all", "ring")
    total = max(times) if together else sum(times)
    slowest = stages[max(range(len(stages)), key=times.__getitem__)]
    steps = group.size - 1 if kind == "ring" else 1
    measured = slowest.tier.curve(kind) is not None
    behind = [slowest] if together else [stage for stage in stages if stage.part]
    names = [f"tiers.{name}" for stage in behind for name in sources(stage.tier, kind)]
    addends = [str(stage) for stage in behind]
    if measured:  # the curve has the start in it
        addends = addends if total >= latency else ["latency"]
    else:
        addends = ["latency" if steps == 1 else f"{steps} x latency", *addends]
    return Transfer(
        seconds=max(latency, total) if measured else steps * latency + total,
        tier=slowest.tier.name,
        tier_bytes=slowest.part,
        GBps=slowest.rate,
        share_of_peak=slowest.rate / slowest.peak,
        sources=tuple(dict.fromkeys(names)),
        formula=" + ".join(addends),
    )


def measured_transfer(times: CollectiveTimes, outermost: Stage, bytes_sent: float) -> Transfer:
    """Return the transfer that was measured on groups of this shape."""
    seconds = times.seconds(bytes_sent)
    rate = outermost.part / seconds / 1e9
    return Transfer(
        seconds=seconds,
        tier=outermost.tier.name,
        tier_bytes=outermost.part,
        GBps=rate,
        share_of_peak=min(1.0, rate / outermost.peak),
        sources=(f"collectives.{times.name}",),
        formula=str(Stage(outermost.tier, outermost.part, rate, max(rate, outermost.peak))),
        cpu=times.cpu,
    )


@dataclass(frozen=True, slots=True)
class Stage:
    """What passes over one tier, and the GB/s per rank it gets there, achieved and at most."""

    tier: Tier
    part: float
    rate: float
    peak: float

    @property
    def seconds(self) -> float:
        """Time without latency."""
        return self.part / (self.rate * 1e9)

    def __str__(self) -> str:
        share = f"{self.rate / self.peak:.0%} of its peak"
        return f"{self.part:.6g} B on {self.tier.name} / {self.rate:.4g} GB/s ({share})"


def bandwidth(
    tier: Tier, kind: str, links: float, part: float, group: Group
) -> tuple[float, float]:
    """Return (achieved, peak) GB/s per rank for ``part`` bytes on ``tier``."""
    peak = tier.bandwidth.value
    ranks = min(group.world_size, tier.size or group.world_size)
    if tier.kind == "full_mesh":
        peak *= links
    elif tier.kind == "ring":
        peak *= min(2, links) / (_hops(kind, links) * group.stride)
    elif tier.kind == "shared_bus":  # every rank of the job in this domain sends at the same time
        peak /= ranks
    peak /= tier.sharing
    curve = tier.curve(kind)
    if curve is not None:
        points = curve.for_ranks(ranks if tier.kind == "shared_bus" else group.within(tier))
        found = max(1e-9, _interpolate(points, part)) / tier.sharing
        return min(found, peak), peak
    by_size = tier.efficiency_by_size
    if by_size is not None:
        return peak * min(1.0, _interpolate(by_size.for_ranks(ranks), part)), peak
    return peak * tier.efficiency.value, peak


def _hops(kind: str, links: float) -> float:
    """Return over how many links of a ring a byte travels to one of ``links`` peers, on average.

    Gathers pass from neighbour to neighbour and count each hop as a send of its own.
    """
    if kind not in ("all_to_all", "p2p"):
        return 1.0
    size = int(links) + 1 if kind == "all_to_all" else 2
    return sum(min(k, size - k) for k in range(1, size)) / (size - 1)


def _interpolate(points: Points, size_bytes: float) -> float:
    size = max(size_bytes / 2**20, 1e-6)
    if size <= points[0][0]:  # below the first point time, not bandwidth, stays
        return points[0][1] * size / points[0][0]
    for (x0, y0), (x1, y1) in pairwise(points):
        if size <= x1:
            part = math.log(size / x0) / math.log(x1 / x0)
            return y0 * math.exp(part * math.log(y1 / y0))
    return points[-1][1]


def sources(tier: Tier, kind: str) -> tuple[str, ...]:
    """Return the names of a tier's numbers behind a collective."""
    curve = tier.curve(kind)
    if curve is not None:
        names = [key for key in CURVES if getattr(tier, key) is curve][:1]
    elif tier.efficiency_by_size is not None:
        names = [tier.bandwidth_key, "efficiency_by_size"]
    else:
        names = [tier.bandwidth_key, "efficiency"]
    names += [key for key in ("ranks_per_nic", "oversubscription") if getattr(tier, key)]
    return tuple(f"{tier.name}.{key}" for key in (*names, "latency_us"))
