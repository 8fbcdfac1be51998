"""Which outputs ranks ran backward of, for the next comparison of the ranks.

Two layers of one mode send alike in backward. Ranks that run backward of several losses, each in an
order of its own, pair what does not belong together, and no collective can tell. So every backward
is noted, and what was noted since the ranks last compared is a part of what they compare next
(`hp_comm.agreement.preflight`): one call late, but not in silence, and at no collective more.
"""

from __future__ import annotations

import weakref
from hashlib import blake2b

from torch.distributed import ProcessGroup

from hp_mesh.recorder import tensors_of

__all__ = ["note_backward", "noted"]


class _Noted:
    """The outputs of one group that backward reached, in their order."""

    __slots__ = ("count", "digest", "last")

    def __init__(self) -> None:
        self.count = 0
        self.digest = b""
        self.last = ""

    def add(self, output: str) -> None:
        if output == self.last:  # one backward, by several outputs of a call; ranks may use not all
            return
        self.count += 1
        self.digest = blake2b(self.digest + output.encode(), digest_size=4).digest()
        self.last = output

    def __str__(self) -> str:
        return f"{self.count}, the last of {self.last} (order {self.digest.hex()})"


_by_group: weakref.WeakKeyDictionary[ProcessGroup, _Noted] = weakref.WeakKeyDictionary()


class _Note:
    """Prehook of the node of an output, which backward reaches before all others of the call."""

    __slots__ = ("_group", "_output")

    def __init__(self, group: ProcessGroup, output: str) -> None:
        self._group, self._output = group, output

    def __call__(self, _: object) -> None:
        _by_group.setdefault(self._group, _Noted()).add(self._output)


def note_backward(group: ProcessGroup, output: str, tensors: object) -> None:
    """Note when backward reaches what a call returned.

    Only for calls whose backward sends something: ranks may run any other as they like.

    Args:
        group: The ranks that compare.
        output: Which one it is, alike on all ranks: the module and its call.
        tensors: What the call returned.
    """
    for x in tensors_of(tensors):
        if x.grad_fn is not None:
            x.grad_fn.register_prehook(_Note(group, output))


def noted(group: ProcessGroup) -> str:
    """Return what was noted on ``group`` since the last time, in words; empty if nothing was."""
    found = _by_group.pop(group, None)
    return "" if found is None else str(found)
