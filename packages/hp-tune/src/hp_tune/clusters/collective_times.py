"""How long a collective takes on one shape of group, as it was measured."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hp_tune.clusters.number import Described, Source

__all__ = ["CollectiveTimes", "Kind"]

Kind = Literal["all_to_all", "all_gather", "reduce_scatter", "p2p"]


class CollectiveTimes(Described):
    """Times of one kind of collective, taken while every group of the shape did the same.

    More than a curve of a tier: all that a group of this shape meets is in it, such as the order in
    which a library goes through the tiers, and links that the groups share.

    Attributes:
        kind: The collective; ``p2p`` is a swap between mirror ranks (first and last, ...).
        size: Ranks of a group.
        stride: Ranks from one member to the next.
        world_size: Ranks that were busy, all groups together.
        points: ``(MiB sent by a rank, ms)``, ascending in both; what a rank keeps is not counted.
        cpu: Part of all shared cores that large messages keep busy (`Cluster.shared_cores`).
        source: ``measured`` as a rule.
        ref: By what and when.
    """

    kind: Kind
    size: Annotated[int, Field(ge=2)]
    stride: Annotated[int, Field(ge=1)]
    world_size: Annotated[int, Field(ge=2)]
    points: tuple[tuple[float, float], ...] = Field(min_length=1)
    cpu: Annotated[float, Field(ge=0, le=1)] | None = None
    source: Source = "measured"
    ref: str

    @property
    def name(self) -> str:
        """What terms call it, such as ``all_gather.4x1``: size and stride."""
        return f"{self.kind}.{self.size}x{self.stride}"

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        for (size, ms), (next_size, next_ms) in pairwise(self.points):
            if next_size <= size or next_ms < ms:
                raise ValueError("points must ascend: larger messages take no less time")
        if any(size <= 0 or ms <= 0 for size, ms in self.points):
            raise ValueError("points must be positive")
        return self

    def seconds(self, bytes_sent: float) -> float:
        """Return the time of a call in which a rank sends ``bytes_sent``.

        Straight lines between the points, which is exact for a start-up time and a bandwidth;
        the smallest message's time below them, and the last line's slope above.
        """
        size = bytes_sent / 2**20
        points = self.points
        if size <= points[0][0]:
            return points[0][1] / 1e3
        last_size, last_ms = points[-1]
        if size > last_size:
            slope = last_ms / last_size
            if len(points) > 1:
                slope = (last_ms - points[-2][1]) / (last_size - points[-2][0])
            return (last_ms + (size - last_size) * slope) / 1e3
        for (x0, y0), (x1, y1) in pairwise(points):
            if size <= x1:
                return (y0 + (y1 - y0) * (size - x0) / (x1 - x0)) / 1e3
        raise AssertionError("a size between the first and the last point lies between two")
