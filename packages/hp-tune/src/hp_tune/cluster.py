"""What the tuner knows of a cluster: one device, and the tiers of links from inner to outer.

Every number says where it is from: ``spec`` (the vendor), ``measured`` (someone ran it, see its
``ref``) or ``assumed`` (nobody did; the report shows these, and which of them decide).
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from hp_tune.files import sha256
from hp_tune.plausible import check_device, check_tier

__all__ = ["Cluster", "Curve", "Device", "Number", "Points", "Source", "Tier"]

Source = Literal["spec", "measured", "assumed"]


class _Described(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Number(_Described):
    """A positive number with its source; a bare number in a file is taken as assumed."""

    value: float = Field(gt=0)
    source: Source = "assumed"
    ref: str = ""

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return {"value": value, "source": "assumed", "ref": "given without a source"}
        return value


def _between(low: float, high: float, unit: str) -> AfterValidator:
    """Refuse what no device has: usually a wrong unit, or both directions counted as one."""

    def check(number: Number) -> Number:
        if not low <= number.value <= high:
            raise ValueError(f"{number.value:g} must be between {low:g} and {high:g} {unit}")
        return number

    return AfterValidator(check)


Fraction = Annotated[Number, _between(0.001, 1, "(a fraction)")]
Bandwidth = Annotated[Number, _between(0.001, 5000, "GB/s, decimal, one direction")]
Latency = Annotated[Number, _between(0.01, 1e5, "microseconds")]
Rate = Annotated[Number, _between(1e-4, 2e4, "TFLOPS")]


Points = tuple[tuple[float, float], ...]


class Curve(_Described):
    """What a collective achieves by the size of its message, measured.

    Attributes:
        points: ``(MiB, GB/s)`` in ascending order; interpolated in the logarithm of the size.
        by_ranks: Instead, such points for groups of some numbers of ranks: where all share a bus,
            many ranks get less each.
    """

    points: Points = ()
    by_ranks: dict[int, Points] = Field(default_factory=dict)
    source: Source
    ref: str

    def for_ranks(self, ranks: int) -> Points:
        """Return the points of the largest measured group of at most ``ranks``, or the smallest."""
        if not self.by_ranks:
            return self.points
        sizes = sorted(self.by_ranks)
        return self.by_ranks[max([size for size in sizes if size <= ranks], default=sizes[0])]

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if bool(self.points) == bool(self.by_ranks):
            raise ValueError("a curve must have points or by_ranks, and not both")
        for points in (self.points, *self.by_ranks.values()):
            sizes = [size for size, _ in points]
            if sizes != sorted(set(sizes)) or min((min(p) for p in points), default=1) <= 0:
                raise ValueError("points must be positive, with ascending sizes")
        if any(len(points) < 2 for points in (self.points, *self.by_ranks.values()) if points):
            raise ValueError("a curve must have at least two points")
        return self


class Tier(_Described):
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
    ranks_per_nic: Annotated[Number, _between(1, 64, "ranks")] | None = None
    oversubscription: Annotated[Number, _between(1, 64, "(a factor)")] | None = None

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
        if by_size is not None and any(part > 1 for _, part in by_size.for_ranks(2)):
            raise ValueError("efficiency_by_size must hold fractions")
        return self


_BANDWIDTH = {
    "switch": "GBps_per_rank",
    "full_mesh": "GBps_per_link",
    "ring": "GBps_per_link",
    "shared_bus": "GBps_of_bus",
}


class Device(_Described):
    """One device (one rank).

    Attributes:
        peak_TFLOPS: Dense peak by dtype.
        gemm_efficiency: Achieved part of the peak in large matrix products.
        attention_efficiency: Achieved part of the peak in fused attention on long sequences.
        attention_saturation: Query tokens x heads of one call at which half of that is reached.
        memory_GBps: Memory bandwidth.
        memory_efficiency: Achieved part of it in copies.
        memory_GiB: Memory that a process can use.
        launch_us: Host and launch time of one kernel.
        overlap_slowdown: How much longer a kernel takes while a collective runs, as a fraction.
        comm_buffer_MiB: Memory that each communicator holds.
    """

    name: str
    peak_TFLOPS: dict[Literal["bf16", "fp16", "fp32", "fp64"], Rate]
    gemm_efficiency: Fraction
    attention_efficiency: Fraction
    attention_saturation: Number
    memory_GBps: Annotated[Number, _between(0.1, 50000, "GB/s")]
    memory_efficiency: Fraction
    memory_GiB: Annotated[Number, _between(0.1, 2000, "GiB")]
    launch_us: Latency
    overlap_slowdown: Fraction
    comm_buffer_MiB: Annotated[Number, _between(0.1, 10000, "MiB")]


class Cluster(_Described):
    """A device and the network between many of them.

    Attributes:
        tiers: Inner to outer; ranks are placed contiguously.
        shared_cores: Ranks share the same processor cores, so an idle rank leaves its time to the
            busy ones and wall time follows the mean of the work instead of the slowest rank.
    """

    name: str
    description: str = ""
    device: Device
    tiers: tuple[Tier, ...] = Field(min_length=1)
    shared_cores: bool = False

    @property
    def digest(self) -> str:
        """sha256 of the description."""
        return sha256(self.model_dump(mode="json"))

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
