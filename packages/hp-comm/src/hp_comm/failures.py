"""A collective that fails says which one it was, of which call, on which ranks.

When a rank has ended or hangs, what the backend raises on the others names a socket. Which line of
the model that was is known here.
"""

from __future__ import annotations

from types import TracebackType

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hp_comm import _torch

__all__ = ["CollectiveError", "Naming"]


class CollectiveError(RuntimeError):
    """A collective did not complete; the cause is what the backend raised."""


class Naming:
    """Turns what a backend raises inside ``with`` into a `CollectiveError` that names the call.

    Args:
        where: The call, such as ``seq_to_head``.
        kind: The collective, such as ``all_to_all``.
        group: Its ranks.
    """

    __slots__ = ("_group", "_kind", "_where")

    def __init__(self, where: str, kind: str, group: ProcessGroup) -> None:
        self._where, self._kind, self._group = where, kind, group

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # backends raise RuntimeError or a subclass for a peer that is gone and for a timeout alike
        if isinstance(error, RuntimeError) and not isinstance(error, CollectiveError):
            raise CollectiveError(self._message(error)) from error

    def _message(self, error: RuntimeError) -> str:
        reason = str(error).strip().partition("\n")[0]
        return (
            f"{self._where}: {self._kind} over {self._ranks()} did not complete: {reason}; a rank "
            "of the group has ended, hangs, or runs another collective: its own log says why"
        )

    def _ranks(self) -> str:
        try:
            ranks = dist.get_process_group_ranks(self._group)
            mine = dist.get_rank()
        except (RuntimeError, ValueError):  # the group is being destroyed
            return f"{_torch.group_size(self._group)} ranks"
        return f"ranks {', '.join(map(str, ranks))} (this is {mine})"
