"""From launches at measured shapes to a file that serves every shape, the nearest one deciding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from hp_comm.kernels import config
from hp_comm.kernels.config import Bounds, Entry, KernelConfig
from hp_mesh.checks import require

__all__ = ["Found", "entries_of", "write"]

Found = tuple[Mapping[str, int], Mapping[str, int]]
"""Sizes that were measured, and the launch that is best there."""


def entries_of(found: Sequence[Found]) -> tuple[Entry, ...]:
    """Return entries that send every size to the measured one that is nearest to it.

    Near is meant in ratios: between 1024 and 4096 the border is at 2048. The space of sizes is cut
    in two where the measured sizes lie farthest apart, and each part again, so where they form a
    grid each gets exactly what is nearest to it. The last entry has no bounds and serves the rest.

    Args:
        found: At least one; no sizes twice.
    """
    boxes = _boxes(list(found), {})
    *others, (_, last) = boxes
    while others and others[-1][1] == last:  # the last entry says so too
        others.pop()
    return (*(Entry(when, launch) for when, launch in others), Entry({}, last))


def _boxes(
    found: list[Found], when: dict[str, Bounds]
) -> list[tuple[dict[str, Bounds], dict[str, int]]]:
    """Return the parts of the box ``when``, each with its launch."""
    launches = [dict(launch) for _, launch in found]
    if all(launch == launches[0] for launch in launches):
        return [(when, launches[0])]
    name, below = _widest_gap([sizes for sizes, _ in found])
    low, high = when.get(name, (None, None))
    left = [one for one in found if one[0][name] <= below]
    right = [one for one in found if one[0][name] > below]
    border = math.isqrt(below * min(sizes[name] for sizes, _ in right))
    return _boxes(left, {**when, name: (low, border)}) + _boxes(
        right, {**when, name: (border + 1, high)}
    )


def _widest_gap(sizes: Sequence[Mapping[str, int]]) -> tuple[str, int]:
    """Return the name whose neighbouring values lie farthest apart, and the lower of the two."""
    gaps = []
    for name in sizes[0]:
        values = sorted({one[name] for one in sizes})
        gaps += [(math.log(high / low), name, low) for low, high in pairwise(values)]
    assert gaps, "measured sizes differ"
    _, name, low = max(gaps)
    return name, low


def write(kernel: str, device: str, found: Sequence[Found], found_by: str, folder: Path) -> Path:
    """Write a kernel's file, read it back, and return where it is.

    Args:
        kernel: Name of the kernel.
        device: As the runtime names it.
        found: See `entries_of`.
        found_by: Provenance, one line.
        folder: Where launch configs are kept.
    """
    path = config.path_of(kernel, device, folder)
    tuned = KernelConfig(kernel, device, entries_of(found), found_by, config.kernel_hash())
    config.write(tuned, path)
    again = config.read(path)
    for sizes, launch in found:
        chosen = config.choose(again, sizes)
        require(
            chosen == dict(launch), str(path), f"{dict(sizes)} must find {launch}, found {chosen}"
        )
    return path
