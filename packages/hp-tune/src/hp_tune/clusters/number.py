"""Numbers that say where they are from, and what a collective achieves by the size of a message."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

__all__ = [
    "Bandwidth",
    "Curve",
    "Described",
    "Fraction",
    "Latency",
    "Number",
    "Points",
    "Rate",
    "Source",
    "between",
]

Source = Literal["spec", "measured", "assumed"]


class Described(BaseModel):
    """A part of a cluster: frozen, and without keys that nobody knows."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Number(Described):
    """A positive number with its source; a bare number in a file is taken as assumed."""

    value: float = Field(gt=0, strict=True)
    source: Source = "assumed"
    ref: str = ""

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return {"value": value, "source": "assumed", "ref": "given without a source"}
        if not isinstance(value, dict | cls):
            dot = ", with a dot and a sign in an exponent: 1.0e+3" if isinstance(value, str) else ""
            raise ValueError(f"{value!r} must be a number{dot}, or have value, source and ref")
        return value


def between(low: float, high: float, unit: str) -> AfterValidator:
    """Refuse what no device has: usually a wrong unit, or both directions counted as one."""

    def check(number: Number) -> Number:
        if not low <= number.value <= high:
            raise ValueError(f"{number.value:g} must be between {low:g} and {high:g} {unit}")
        return number

    return AfterValidator(check)


Fraction = Annotated[Number, between(0.001, 1, "(a fraction)")]
Bandwidth = Annotated[Number, between(0.001, 5000, "GB/s, decimal, one direction")]
Latency = Annotated[Number, between(0.01, 1e5, "microseconds")]
Rate = Annotated[Number, between(1e-4, 2e4, "TFLOPS")]


Points = tuple[tuple[float, float], ...]


class Curve(Described):
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
        if any(ranks < 1 for ranks in self.by_ranks):
            raise ValueError(f"by_ranks {sorted(self.by_ranks)} must be numbers of ranks")
        found = (*self.by_ranks.values(),) or (self.points,)
        for points in found:
            sizes = [size for size, _ in points]
            if sizes != sorted(set(sizes)) or min((min(p) for p in points), default=1) <= 0:
                raise ValueError("points must be positive, with ascending sizes")
        if any(len(points) < 2 for points in found):
            raise ValueError("a curve must have at least two points")
        return self
