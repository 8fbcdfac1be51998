"""What a kernel is tuned for: shapes as they are typed, their bytes, and the sizes of a launch.

A shape is written ``S8192-H32:8:8-D128-P8``: local positions, heads of each tensor, head size,
ranks; with ``-B2`` a batch, with a layout (``BNSD``), a dtype (``fp16``) and ``rows`` where it
differs from ``BSHD``, ``bf16`` and a cut of heads. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hp_comm.kernels import catalog
from hp_comm.kernels.catalog import Case
from hp_comm.kernels.config import KERNELS, default_launch
from hp_tune.errors import UsageError

__all__ = ["ELEMENT_SIZE", "Shape", "defaults", "distinct", "kernels", "parse"]

ELEMENT_SIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
LAYOUTS = ("BSHD", "BNSD", "SBHD", "TND")
EXAMPLE = "S8192-H32:8:8-D128-P8, and -B2, -BNSD, -fp16 or -rows where they differ"
_NUMBERS = re.compile(r"([BSDP])([1-9]\d*)")
_HEADS = re.compile(r"H([1-9]\d*(?::[1-9]\d*){0,2})")


@dataclass(frozen=True, slots=True)
class Shape:
    """A layout whose launches are tuned.

    Attributes:
        rows: Positions of the sequence on this rank.
        heads: Heads of each tensor; a kernel that takes one tensor takes the first.
        size: Numbers of a head.
        ranks: Ranks that share the heads, or the rows.
        batch: Sequences.
        layout: Order of dims in memory.
        dtype: Of the data.
        dim: What is cut for the ranks.
    """

    rows: int
    heads: tuple[int, ...]
    size: int
    ranks: int
    batch: int = 1
    layout: str = "BSHD"
    dtype: str = "bf16"
    dim: str = "heads"

    def __str__(self) -> str:
        """Return it as it is typed."""
        heads = ":".join(map(str, self.heads))
        parts = [f"S{self.rows}", f"H{heads}", f"D{self.size}", f"P{self.ranks}"]
        parts += [f"B{self.batch}"] if self.batch > 1 else []
        known = ((self.layout, "BSHD"), (self.dtype, "bf16"), (self.dim, "heads"))
        return "-".join(parts + [value for value, usual in known if value != usual])

    @property
    def element_size(self) -> int:
        """Bytes of an element."""
        return ELEMENT_SIZE[self.dtype]

    def case(self, kernel: str) -> Case:
        """Return it as the catalogue of kernels describes it."""
        one_tensor = kernel not in ("pack", "unpack")
        return Case(
            str(self),
            self.batch,
            self.rows,
            self.heads[:1] if one_tensor else self.heads,
            self.size,
            self.ranks,
            self.dim,
            self.layout,
            joined=self.dim == "heads",
            work=(self.size, False, True, 1e-6) if kernel.endswith("_rotary") else None,
        )

    def sizes(self, kernel: str) -> dict[str, int]:
        """Return the sizes by which the runtime chooses an entry: those of the largest piece."""
        (first, *_) = catalog.launches(kernel, self.case(kernel), default_launch("ascend"))
        numbers = first.numbers
        if kernel in ("pack", "unpack"):
            rows, inner = numbers["rows0"], numbers["inner0"]
        else:
            rows, inner = numbers["rows"], numbers["SIZE"]
        return {"rows": int(rows), "inner": int(inner), "element_size": self.element_size}

    def bytes(self, kernel: str) -> int:
        """Return the bytes that a kernel must read and write at least."""
        case = self.case(kernel)
        positions = self.batch * self.rows * self.size
        own = positions * sum(case.heads) * self.element_size
        if kernel.startswith("merge"):
            lse = self.batch * self.rows * case.heads[0] * 4
            return 3 * (own + lse) if kernel == "merge" else 5 * (own + lse)
        sent = own
        if self.dim == "heads":  # a head that several ranks need is sent to each
            of_ranks = (heads if heads % self.ranks == 0 else self.ranks for heads in case.heads)
            sent = positions * sum(of_ranks) * self.element_size
        if case.work is None:
            return own + sent
        angles = 2 * self.rows * (case.work[0] // 2) * 4
        return own + sent + angles + (own if kernel == "unpack_rotary" else 0)


def parse(text: str) -> tuple[Shape, ...]:
    """Return the shapes in a list like ``S8192-H32:8:8-D128-P8,S2048-H8-D64-P2-fp16``."""
    found = tuple(_parse_one(one.strip()) for one in text.split(",") if one.strip())
    if not found:
        raise UsageError(f"--shapes ({text!r}) must name a shape", f"write {EXAMPLE}")
    return found


def _parse_one(text: str) -> Shape:
    numbers: dict[str, int] = {}
    heads: tuple[int, ...] = ()
    words = {"layout": "BSHD", "dtype": "bf16", "dim": "heads"}
    said: dict[str, str] = {}
    for part in text.split("-"):
        if number := _NUMBERS.fullmatch(part):
            kind = number[1]
            numbers[kind] = int(number[2])
        elif found := _HEADS.fullmatch(part):
            kind = "H"
            heads = tuple(map(int, found[1].split(":")))
        else:
            kind = _kind_of_word(text, part)
            words[kind] = part
        if said.setdefault(kind, part) != part:
            raise UsageError(
                f"--shapes: {text!r}: {said[kind]!r} and {part!r} contradict each other",
                "leave one of them out, or write two shapes with a comma between them",
            )
    missing = [name for name in "SDP" if name not in numbers] + ([] if heads else ["H"])
    if missing:
        raise UsageError(f"--shapes: {text!r} must have {', '.join(missing)}", f"write {EXAMPLE}")
    batch = numbers.get("B", 1)
    shape = Shape(numbers["S"], heads, numbers["D"], numbers["P"], batch, **words)
    _check(text, shape)
    return shape


def _kind_of_word(text: str, part: str) -> str:
    """Return what a word says something about."""
    kinds = {"layout": LAYOUTS, "dtype": tuple(ELEMENT_SIZE), "dim": ("heads", "rows")}
    for kind, known in kinds.items():
        if part in known:
            return kind
    raise UsageError(f"--shapes: {text!r}: {part!r} is not known", f"write {EXAMPLE}")


def _check(text: str, shape: Shape) -> None:
    """Refuse what cannot be cut, with the numbers."""
    where = f"--shapes: {text!r}"
    cut, what = (shape.rows, "S") if shape.dim == "rows" else (shape.heads[0], "H")
    if cut % shape.ranks:
        raise UsageError(f"{where}: {what} ({cut}) must be divisible by P ({shape.ranks})")
    for heads in shape.heads[1:] if shape.dim == "heads" else ():
        if heads % shape.ranks and shape.ranks % heads:
            raise UsageError(f"{where}: H ({heads}) must divide P ({shape.ranks}) or be a multiple")
    if shape.layout == "TND" and shape.batch > 1:
        raise UsageError(f"{where}: TND has no batch (B{shape.batch})", "use BSHD")
    if shape.size % 2:
        raise UsageError(f"{where}: D ({shape.size}) must be even: it is rotated in pairs")


def defaults(family: str) -> tuple[Shape, ...]:
    """Return the shapes that are tuned if none is named."""
    if family == "cpu":  # interpreted: a million elements would take hours
        return (Shape(20, (6, 2, 2), 24, 2), Shape(12, (4, 1, 1), 16, 4, 2, "BNSD", "fp32"))
    return tuple(Shape(rows, (32, 8, 8), 128, 8) for rows in (2048, 8192, 32768))


def distinct(kernel: str, shapes: Sequence[Shape]) -> tuple[list[Shape], list[tuple[Shape, Shape]]]:
    """Return shapes that the runtime can tell apart, and the others, each with its twin."""
    seen: dict[tuple[int, ...], Shape] = {}
    twins = []
    for shape in shapes:
        key = tuple(shape.sizes(kernel).values())
        if key in seen:
            twins.append((shape, seen[key]))
        else:
            seen[key] = shape
    return list(seen.values()), twins


def kernels(name: str | None) -> tuple[str, ...]:
    """Return the kernels to tune: the one that is named, or all."""
    if name is None:
        return KERNELS
    if name not in KERNELS:
        raise UsageError(f"--kernel ({name!r}) must be one of {', '.join(KERNELS)}")
    return (name,)
