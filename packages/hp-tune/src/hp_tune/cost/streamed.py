"""The schedule of a layer with ``kv_chunks``: each gather behind the attention to the part before.

As `hp_cp.attention.streamed` runs it::

    forward    network  gather 0 | gather 1 | gather 2 | ..
               compute           | part 0   | part 1   | ..
    backward   network  gather 0 | gather 1 | gather 2, sum 0 | ..
               compute           | part 0   | part 1          | ..

Attention is priced as the device's fused kernel, call by call. hp-cp has one for streams on a CPU
only; elsewhere its parts run in plain torch, slower than this says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hp_tune.cost.term import Piece, chained

if TYPE_CHECKING:
    from hp_tune.cost.pricing import Move, Pricing

__all__ = ["streamed_core"]


def streamed_core(
    price: Pricing,
    attention: Piece,
    gathers: Sequence[Move],
    sums: Sequence[Move],
    *,
    runs: int,
    merged_bytes: int,
    ready: tuple[str, ...],
) -> list[Piece]:
    """Return the pieces of attention part by part, with its gathers and sums.

    Args:
        price: Of the cluster.
        attention: All of attention in one piece.
        gathers: Of k and of v, as many calls each as there are parts.
        sums: Of their gradients; none forward.
        runs: Kernel calls of a part: forward up to 3, backward one for each rank's keys and more.
        merged_bytes: What is read and written once per part: the output, or the gradient of q.
        ready: What the first part waits for.
    """
    count = gathers[0].count
    launches = price.launch * runs
    seconds = (attention.seconds - price.launch) / count + launches

    def start(i: int, after: tuple[str, ...]) -> list[Piece]:
        return [price.move(move, f"{move.name} #{i}").waiting(after) for move in gathers]

    ahead = start(0, ready)
    found, done = list(ahead), ready
    for i in range(count):
        here = tuple(piece.id for piece in ahead)
        if i + 1 < count:  # on the wire before the sum of this part, and when this one is here
            ahead = start(i + 1, (*here, *done))
            found += ahead
        part = attention._replace(seconds=seconds, key=f"{attention.name} #{i}")
        merge = price.copy("merge of parts", merged_bytes, 1, f"merge of parts #{i}")
        found += chained([part, merge], (*here, *done))
        done = (merge.id,)
        found += [price.move(move, f"{move.name} #{i}").waiting(done) for move in sums]
    return found
