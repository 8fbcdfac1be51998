"""What takes part: a name, and how to make its attention for a case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ProcessGroup

from peers.cases import Case

__all__ = ["Attention", "Contender"]

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v ``[B, S/P, H, D]`` of this rank -> its rows of the output, ``[B, S/P, Hq, D]``."""


@dataclass(frozen=True)
class Contender:
    """One way to compute attention on sequence shards.

    Attributes:
        name: As it stands in the tables; it says where a kernel is a stand-in.
        build: Make the attention on this rank; imports what it needs, so that a library that is
            missing or broken fails here.
        mode: Which of our formulas its bytes must meet; None for a peer.
        preflight: ``HP_PREFLIGHT`` while it runs.
        limit: Whether it is neither ours nor a peer but what neither can beat.
    """

    name: str
    build: Callable[[Case, ProcessGroup], Attention]
    mode: str | None = None
    preflight: str = "first"
    limit: bool = False

    @property
    def ours(self) -> bool:
        """Whether it is one of our modes."""
        return self.mode is not None
