"""What the tuner knows of a cluster: one device, and the tiers of links from inner to outer.

Every number says where it is from: ``spec`` (the vendor), ``measured`` (someone ran it, see its
``ref``) or ``assumed`` (nobody did; the report shows these, and which of them decide).
"""

from __future__ import annotations

from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from hp_mesh.checks import nearest
from hp_tune.errors import UsageError
from hp_tune.files import explain_validation, load_yaml, sha256

__all__ = [
    "Cluster",
    "Curve",
    "Device",
    "Number",
    "Source",
    "Tier",
    "cluster_presets",
    "read_cluster",
]

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


class Curve(_Described):
    """Bandwidth of a collective by the bytes that a rank sends, measured.

    Attributes:
        points: ``(MiB, GB/s)`` in ascending order; interpolated in the logarithm of the size.
    """

    points: tuple[tuple[float, float], ...] = Field(min_length=2)
    source: Source
    ref: str

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        sizes = [size for size, _ in self.points]
        if sizes != sorted(set(sizes)) or min(min(p) for p in self.points) <= 0:
            raise ValueError("points must be positive, with ascending sizes")
        return self


class Tier(_Described):
    """One level of the network.

    Attributes:
        size: Ranks in one domain of this tier, inner tiers included; None for as many as there are.
        kind: ``switch``: each rank has its bandwidth whatever the group's size. ``full_mesh``: a
            link per pair, so a group of g ranks uses g - 1 links and a small group has little.
            ``shared_bus``: all ranks of the domain share one bandwidth.
        GBps_per_rank: One direction, for ``switch``.
        GBps_per_link: One direction, for ``full_mesh``.
        GBps_of_bus: For ``shared_bus``.
        efficiency: Achieved part of that bandwidth for large messages.
        latency_us: Start of one collective on this tier, software included.
        all_to_all: Measured bandwidth per rank by size; replaces bandwidth and efficiency.
        all_gather: The same for gathers and reduce-scatters.
        ranks_per_nic: Ranks that share one link out of the domain below.
        oversubscription: Factor by which the uplinks are too few when all ranks send.
    """

    name: str
    size: int | None = Field(default=None, ge=2)
    kind: Literal["switch", "full_mesh", "shared_bus"]
    GBps_per_rank: Bandwidth | None = None
    GBps_per_link: Bandwidth | None = None
    GBps_of_bus: Bandwidth | None = None
    efficiency: Fraction
    latency_us: Latency
    all_to_all: Curve | None = None
    all_gather: Curve | None = None
    ranks_per_nic: int = Field(default=1, ge=1)
    oversubscription: float = Field(default=1.0, ge=1)

    @property
    def bandwidth(self) -> Number:
        """The one of the three bandwidths that belongs to the kind."""
        found = {
            "switch": self.GBps_per_rank,
            "full_mesh": self.GBps_per_link,
            "shared_bus": self.GBps_of_bus,
        }[self.kind]
        assert found is not None, "checked when the tier was read"
        return found

    @model_validator(mode="after")
    def _one_bandwidth(self) -> Self:
        wanted = {
            "switch": "GBps_per_rank",
            "full_mesh": "GBps_per_link",
            "shared_bus": "GBps_of_bus",
        }[self.kind]
        given = [
            name
            for name in ("GBps_per_rank", "GBps_per_link", "GBps_of_bus")
            if getattr(self, name) is not None
        ]
        if given != [wanted]:
            raise ValueError(
                f"kind {self.kind} must have {wanted} and no other bandwidth, not {given or 'none'}"
            )
        return self


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


def cluster_presets() -> dict[str, Path]:
    """Return the embedded cluster files by name."""
    folder = Path(str(files("hp_tune") / "presets" / "clusters"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def read_cluster(source: str | Path) -> Cluster:
    """Return the cluster described by a preset name or a YAML file."""
    presets = cluster_presets()
    path = Path(source)
    if not path.is_file():
        if str(source) not in presets:
            close = nearest(str(source), presets)
            names = ", ".join(presets)
            raise UsageError(
                f"--cluster ({source}) must be a YAML file or a preset",
                f"did you mean {close}? presets: {names}" if close else f"presets: {names}",
            )
        path = presets[str(source)]
    data, positions = load_yaml(path)
    try:
        return Cluster.model_validate(data)
    except ValidationError as error:
        raise explain_validation(error, Cluster, str(path), positions) from None
