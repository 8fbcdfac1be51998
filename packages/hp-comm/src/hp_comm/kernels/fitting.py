"""A launch config on a layout that it was not found for: what is too large is made smaller.

A file has the tile that is best for the layout that was tuned. On another one of the same sizes the
same tile may need more of an Ascend's unified buffer: places that are summed, a last dim that does
not lie in one piece. There the compiler would refuse it in the middle of a step. No torch here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from hp_comm.kernels.limits import UB_BYTES, predict_ub_bytes
from hp_comm.kernels.plans import Launch

__all__ = ["fitting"]

log = logging.getLogger("hp_comm.kernels")


def fitting(
    kernel: str,
    device: str,
    element_size: int,
    launch: Mapping[str, int],
    plan: Callable[[Mapping[str, int]], Sequence[Launch]],
) -> tuple[Launch, ...]:
    """Return the calls of a kernel, with the tile of ``launch`` or a smaller one that fits.

    Args:
        kernel: Its name.
        device: As launch configs name it; only an Ascend refuses a tile.
        element_size: Bytes of an element of the data.
        launch: See `hp_comm.kernels.config`.
        plan: Returns the calls for a launch config.
    """
    planned = tuple(plan(launch))
    tile = launch["tile"]
    while device.startswith("ascend") and tile > 1 and not _fit(kernel, element_size, planned):
        tile //= 2
        planned = tuple(plan({**launch, "tile": tile}))
    if tile != launch["tile"]:
        log.info(
            "%s: a tile of %d does not fit this layout on %s; %d is used",
            kernel,
            launch["tile"],
            device,
            tile,
        )
    return planned


def _fit(kernel: str, element_size: int, planned: Sequence[Launch]) -> bool:
    return all(predict_ub_bytes(kernel, element_size, one.numbers) <= UB_BYTES for one in planned)
