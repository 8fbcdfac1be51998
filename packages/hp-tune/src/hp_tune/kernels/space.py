"""The launches that are searched, and why some are not even compiled; no torch and no optuna here.

V13: what a program holds must fit on chip. That offsets inside a block fit 32 bits (V14) is seen to
by the planner, which makes the block smaller; launches that come out the same are tried once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from hp_comm.kernels import catalog, limits
from hp_comm.kernels.config import default_launch
from hp_comm.kernels.plans import Launch
from hp_tune.kernels.devices import Family
from hp_tune.kernels.shapes import Shape
from hp_tune.searching.rules import Rejection

__all__ = ["Space", "label", "planned", "refusal", "space_of", "start"]

WARPS, STAGES = (2, 4, 8), (1, 2, 3, 4)
WARP_SIZE, REGISTERS = 32, 255
REGISTER_BYTES = 4


@dataclass(frozen=True, slots=True)
class Space:
    """Launch parameters with their values, in ascending order."""

    parameters: Mapping[str, tuple[int, ...]]

    def __len__(self) -> int:
        """Return the number of points."""
        count = 1
        for values in self.parameters.values():
            count *= len(values)
        return count

    def __iter__(self) -> Iterator[dict[str, int]]:
        """Yield every point."""
        for values in product(*self.parameters.values()):
            yield dict(zip(self.parameters, values, strict=True))

    def __contains__(self, launch: object) -> bool:
        """Say whether a launch is one of the points."""
        return (
            isinstance(launch, Mapping)
            and set(launch) == set(self.parameters)
            and all(value in self.parameters[name] for name, value in launch.items())
        )


def space_of(family: Family, cores: int = 0) -> Space:
    """Return what is searched on a family of devices.

    Args:
        family: Of devices.
        cores: Vector cores of an Ascend: its grids are multiples of them, and what runs untuned.
    """
    if family == "cuda":
        tiles = tuple(2**n for n in range(10, 17))
        return Space({"tile": tiles, "num_warps": WARPS, "num_stages": STAGES})
    if family == "ascend":
        tiles = tuple(2**n for n in range(10, 18))
        untuned = default_launch(family)["programs"]
        programs = tuple(sorted({untuned, *(cores * n for n in (1, 2, 3, 4))}))
        return Space({"tile": tiles, "programs": programs, "multibuffer": (0, 1)})
    return Space({"tile": (16, 64, 256, 1024, 65536), "programs": (1, 3, 40)})


def start(space: Space, family: Family) -> dict[str, int] | None:
    """Return the point that is tried first, which is what runs untuned; None if it is not one."""
    launch = default_launch(family)
    if family == "cuda":
        launch.setdefault("num_stages", STAGES[-2])
    return launch if launch in space else None


def label(launch: Mapping[str, int]) -> str:
    """Return a launch as one word."""
    return " ".join(f"{name}={value}" for name, value in launch.items())


def planned(kernel: str, shape: Shape, launch: Mapping[str, int]) -> str:
    """Return what a launch comes to: two that come to the same are one."""
    launches = catalog.launches(kernel, shape.case(kernel), launch)
    return repr([(one.grid, sorted(one.numbers.items()), one.options) for one in launches])


def refusal(
    kernel: str, shape: Shape, launch: Mapping[str, int], family: Family
) -> Rejection | None:
    """Return why a launch cannot work, or None; nothing is compiled."""
    for one in catalog.launches(kernel, shape.case(kernel), launch):
        found = None
        if family == "ascend":
            found = _over_unified_buffer(kernel, shape, one)
        if family == "cuda":
            found = _over_registers(kernel, shape, one, launch)
        if found is not None:
            return found
    return None


def _over_unified_buffer(kernel: str, shape: Shape, one: Launch) -> Rejection | None:
    # without double buffering: the compiler gives that up before it refuses a kernel
    needed = limits.predict_ub_bytes(kernel, shape.element_size, one.numbers)
    if needed <= limits.UB_BYTES:
        return None
    return Rejection(
        "V13",
        f"about {needed} bytes of the unified buffer are needed, {limits.UB_BYTES} are there",
        {"ub_bytes": needed, "ub_limit": limits.UB_BYTES},
        "a smaller tile",
    )


def _over_registers(
    kernel: str, shape: Shape, one: Launch, launch: Mapping[str, int]
) -> Rejection | None:
    threads = launch["num_warps"] * WARP_SIZE
    needed = -(-max(_tile_bytes(kernel, shape, one)) // (threads * REGISTER_BYTES))
    if needed <= REGISTERS:
        return None
    return Rejection(
        "V13",
        f"at least {needed} registers of a thread are needed for a tile, {REGISTERS} are there",
        {"registers": needed, "register_limit": REGISTERS, "threads": threads},
        "a smaller tile, or more warps",
    )


def _tile_bytes(kernel: str, shape: Shape, one: Launch) -> list[int]:
    """Return the bytes of registers that the tile of each tensor takes at least."""
    numbers = {name: int(value) for name, value in one.numbers.items()}
    if kernel in ("pack", "unpack"):
        return [
            numbers[f"BLOCK_ROWS{i}"]
            * numbers[f"BLOCK_INNER{i}"]
            * (4 if numbers.get(f"SUMMANDS{i}", 1) > 1 else shape.element_size)
            for i in range(numbers["TENSORS"])
        ]
    width = numbers["BLOCK_INNER"] if kernel.startswith("merge") else numbers["SIZE"]
    return [2 * numbers["BLOCK_ROWS"] * width * 4]  # two in fp32 meet in every sum
