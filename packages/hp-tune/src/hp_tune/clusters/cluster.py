"""What the tuner knows of a cluster: one device, and the tiers of links from inner to outer.

Every number says where it is from: ``spec`` (the vendor), ``measured`` (someone ran it, see its
``ref``) or ``assumed`` (nobody did; the report shows these, and which of them decide).
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hp_tune.clusters.collective_times import CollectiveTimes
from hp_tune.clusters.number import (
    Bandwidth,
    Curve,
    Described,
    Fraction,
    Latency,
    Number,
    Points,
    Rate,
    Source,
    between,
)
from hp_tune.clusters.plausible import check_device, check_tier
from hp_tune.files import sha256

__all__ = ["Cluster", "Curve", "Device", "Number", "Points", "Source", "Tier"]


class Tier(Described):
    """One level of the network. Bandwidths are those of one direction.

    Attributes:
        size: Ranks in one domain of this tier, inner tiers included; None for as many as there are.
        kind: ``switch``: each rank has its bandwidth whatever the group's size. ``full_mesh``: a
            link per pair, so a group of g ranks uses g - 1 links and a small group has little.
            ``ring``: a link to each of two neighbours, and what goes further takes several.
            ``shared_bus``: all ranks of the domain share one bandwidth.
        GBps_per_rank: For ``switch``.
        GBps_per_link: For ``full_mesh`` and ``ring``.
        GBps_of_bus: For ``shared_bus``.
        efficiency: Achieved part of that bandwidth for large messages.
        efficiency_by_size: Instead, by size: ``(MiB, fraction)``.
        latency_us: Start of one collective on this tier, software included.
        all_to_all: Measured bandwidth per rank by size; replaces bandwidth and efficiency.
        all_gather: The same for gathers, and for reduce-scatters that have none of their own.
        reduce_scatter: The same for reduce-scatters.
        ranks_per_nic: Ranks that share one link out of the domain below.
        oversubscription: Factor by which the uplinks are too few when all ranks send.
    """

    name: str
    size: int | None = Field(default=None, ge=2)
    kind: Literal["switch", "full_mesh", "ring", "shared_bus"]
    GBps_per_rank: Bandwidth | None = None
    GBps_per_link: Bandwidth | None = None
    GBps_of_bus: Bandwidth | None = None
    efficiency: Fraction
    efficiency_by_size: Curve | None = None
    latency_us: Latency
    all_to_all: Curve | None = None
    all_gather: Curve | None = None
    reduce_scatter: Curve | None = None
    ranks_per_nic: Annotated[Number, between(1, 64, "ranks")] | None = None
    oversubscription: Annotated[Number, between(1, 64, "(a factor)")] | None = None

    @property
    def bandwidth_key(self) -> str:
        """Name of the bandwidth that belongs to the kind."""
        return _BANDWIDTH[self.kind]

    @property
    def bandwidth(self) -> Number:
        """The one of the three bandwidths that belongs to the kind."""
        found: Number | None = getattr(self, self.bandwidth_key)
        assert found is not None, "checked when the tier was read"
        return found

    @property
    def sharing(self) -> float:
        """By how much less each rank has because it shares its uplink with others."""
        shared = (self.ranks_per_nic, self.oversubscription)
        return prod(number.value for number in shared if number is not None)

    def curve(self, kind: str) -> Curve | None:
        """Return the measured curve for a kind of collective, if there is one."""
        if kind == "all_to_all":
            return self.all_to_all
        if kind == "reduce_scatter" and self.reduce_scatter is not None:
            return self.reduce_scatter
        return self.all_gather if kind in ("all_gather", "reduce_scatter") else None

    @model_validator(mode="after")
    def _one_bandwidth(self) -> Self:
        wanted = self.bandwidth_key
        names = sorted(set(_BANDWIDTH.values()))
        given = [name for name in names if getattr(self, name) is not None]
        if given != [wanted]:
            raise ValueError(
                f"kind {self.kind} must have {wanted} and no other bandwidth, not {given or 'none'}"
            )
        by_size = self.efficiency_by_size
        if by_size is not None:
            every = (by_size.points, *by_size.by_ranks.values())
            if any(part > 1 for points in every for _, part in points):
                raise ValueError("efficiency_by_size must hold fractions")
        return self


_BANDWIDTH = {
    "switch": "GBps_per_rank",
    "full_mesh": "GBps_per_link",
    "ring": "GBps_per_link",
    "shared_bus": "GBps_of_bus",
}


class Device(Described):
    """One device (one rank).

    Attributes:
        peak_TFLOPS: Dense peak by dtype.
        gemm_efficiency: Achieved part of the peak in large matrix products.
        attention_efficiency: Achieved part of the peak in fused attention on long sequences.
        attention_saturation: Query tokens x heads of one call at which half of that is reached.
        attention_backward: Time of attention's backward over its forward; 2.5 (five products
            instead of two) where it is not given.
        attention_tile: Keys that a causal kernel takes at a time: it leaves out whole tiles only.
            One, exact skipping, where it is not given.
        memory_GBps: Memory bandwidth.
        memory_efficiency: Achieved part of it in copies.
        memory_GiB: Memory that a process can use.
        launch_us: Host and launch time of one kernel.
        host_layer_us, host_exchange_us, host_tensor_us: Time of a processor that is the device
            itself (`Cluster.shared_cores`) in forward and backward of a layer: autograd; in the
            calls around one collective; and of one tensor at a boundary of a style. None elsewhere:
            the host runs ahead of the device.
        overlap_slowdown: How much longer a kernel takes while a collective runs, as a fraction.
        comm_buffer_MiB: Memory that each communicator holds.
    """

    name: str
    peak_TFLOPS: dict[Literal["bf16", "fp16", "fp32", "fp64"], Rate] = Field(min_length=1)
    gemm_efficiency: Fraction
    attention_efficiency: Fraction
    attention_saturation: Number
    attention_backward: Annotated[Number, between(0.5, 20, "(a factor)")] | None = None
    attention_tile: Annotated[Number, between(1, 8192, "keys")] | None = None
    memory_GBps: Annotated[Number, between(0.1, 50000, "GB/s")]
    memory_efficiency: Fraction
    memory_GiB: Annotated[Number, between(0.1, 2000, "GiB")]
    launch_us: Latency
    host_layer_us: Latency | None = None
    host_exchange_us: Latency | None = None
    host_tensor_us: Latency | None = None
    overlap_slowdown: Fraction
    comm_buffer_MiB: Annotated[Number, between(0.1, 10000, "MiB")]


class Cluster(Described):
    """A device and the network between many of them.

    Attributes:
        tiers: Inner to outer; ranks are placed contiguously.
        shared_cores: Processor cores that ranks share, each on one of them at most; None where each
            rank has a device of its own. An idle rank then leaves its time to the busy ones, so
            wall time follows the work of all (`hp_tune.cost.cores`), and the device's numbers are
            those of one core.
        shared_by: Neighbouring ranks (of one host) that share them; None for all ranks of the job.
        collectives: Measured times by shape of group; where there is one it is taken instead of
            what the tiers say.
    """

    name: str = Field(min_length=1)
    description: str = ""
    device: Device
    tiers: tuple[Tier, ...] = Field(min_length=1)
    shared_cores: int | None = Field(default=None, ge=1, strict=True)
    shared_by: int | None = Field(default=None, ge=1, strict=True)
    collectives: tuple[CollectiveTimes, ...] = ()

    @property
    def digest(self) -> str:
        """sha256 of the description."""
        return sha256(self.model_dump(mode="json"))

    def measured(self, kind: str, size: int, stride: int, num_ranks: int) -> CollectiveTimes | None:
        """Return the measured times of a shape of group; those of as many busy ranks first."""
        found = [
            times
            for times in self.collectives
            if (times.kind, times.size, times.stride) == (kind, size, stride)
        ]
        return min(found, key=lambda times: abs(times.world_size - num_ranks), default=None)

    @model_validator(mode="after")
    def _shared(self) -> Self:
        if self.shared_by is not None and self.shared_cores is None:
            raise ValueError("shared_by says who shares shared_cores, which must be given too")
        return self

    @model_validator(mode="after")
    def _named(self) -> Self:
        names = [tier.name for tier in self.tiers]
        if len(set(names)) < len(names):
            raise ValueError(f"tiers ({', '.join(names)}) must have different names")
        return self

    @model_validator(mode="after")
    def _nested(self) -> Self:
        sizes = [tier.size for tier in self.tiers]
        for inner, outer in pairwise(sizes):
            if inner is None or (outer is not None and (outer <= inner or outer % inner)):
                raise ValueError(
                    f"tier sizes {sizes} must grow from inner to outer, each a multiple of the one "
                    "before; only the last may be left open"
                )
        return self

    @model_validator(mode="after")
    def _plausible(self) -> Self:
        device = self.device
        check_device(
            device.name,
            {dtype: peak.value for dtype, peak in device.peak_TFLOPS.items()},
            device.memory_GBps.value,
            device.memory_GiB.value,
        )
        for tier in self.tiers:
            check_tier(tier.name, tier.bandwidth_key, tier.bandwidth.value)
        return self
