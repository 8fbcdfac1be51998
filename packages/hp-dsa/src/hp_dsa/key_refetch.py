"""``keep_keys=False``: how the gathered keys of one call are gathered again in backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hp_comm import Handle
from hp_dsa.gather import Gatherer, Pack
from hp_mesh.refetch import Refetch

__all__ = ["GatheredKeys"]


class GatheredKeys(Refetch):
    """The keys of one call, in the gathers that they came in.

    Args:
        where: Name of the style, for messages.
        packs: The gathers.
        gatherer: How they were gathered.
    """

    def __init__(self, where: str, packs: Sequence[Pack], gatherer: Gatherer) -> None:
        sources = [source for pack in packs for source in pack.sources]
        super().__init__(
            where,
            ["a gathered key"] * len(packs),
            "keep_keys",
            [source.local.detach() for source in sources],
            # a DTensor's local tensor does not count the changes of the DTensor
            [source.tensor for source in sources if isinstance(source.tensor, DTensor)],
            [pack.whole for pack in packs],
            overlap=False,
        )
        self._gatherer = gatherer
        self._counts = [len(pack.sources) for pack in packs]

    def start(self, shards: Sequence[Tensor], *, overlap: bool) -> Handle[list[Tensor]]:
        """Gather all of them again, in the packs of the first time."""
        queue = iter(shards)
        packs = [[next(queue) for _ in range(count)] for count in self._counts]
        joined = [pack[0] if len(pack) == 1 else torch.cat(pack, -1) for pack in packs]
        return Handle.ready(self.where, self._gatherer.gather(joined))

    def finish(self, result: Any) -> tuple[Tensor, ...]:
        """Return them as they came."""
        return tuple(result)
