"""Streamed tensors: whole in the view, but on each rank only its shard until an op asks for more.

Inside the boundary k and v are the whole sequence. Streamed, they stay sharded along it, which a
DTensor can say: shape, transposes, splits of heads, norms and rotary embeddings are those of the
whole, computed on the shard. What they become is marked as well, op by op. An attention op with a
handler that streams takes them part by part; any other op that would need more than the shard is
refused, since DTensor would gather the whole behind one's back::

    k -> norm -> rotary -> transpose -> scaled_dot_product_attention     marked up to the last
    k -> q @ k.mT                                                        refused: needs every key
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from hp_mesh._torch import without_communication
from hp_mesh.checks import fail

__all__ = ["Streamed"]

_MARK = "_hp_mesh_streamed"


@dataclass(frozen=True, eq=False)
class Streamed:
    """Which tensors of one call are streamed, and how.

    Attributes:
        axis: Axis of the view's mesh over which they stay sharded.
        group: The ranks along it.
        parts: Number of parts that they are to be taken in.
        option: The style's option that asks for it, as the user typed it.
        where: Name of the style, for messages.
    """

    axis: int
    group: ProcessGroup
    parts: int
    option: str
    where: str

    def mark(self, tensor: DTensor) -> DTensor:
        """Note that ``tensor`` is streamed; return it."""
        setattr(tensor, _MARK, self)
        return tensor

    def holds(self, tensor: object) -> bool:
        """Whether ``tensor`` is streamed, or was made of one that is."""
        return getattr(tensor, _MARK, None) is self

    def run(self, name: str, call: Callable[[], Any]) -> Any:
        """Run an op that reads streamed tensors, and mark what it made; refuse to gather."""
        try:
            with without_communication():
                result = call()
        except RuntimeError as error:
            if "mplicit redistribution" in str(error):
                raise self.refusal(name) from error
            raise
        if name.startswith("new_"):
            return result  # takes dtype and device only
        for tensor in _dtensors(result):
            if not isinstance(tensor.placements[self.axis], Shard):
                raise self.refusal(name)
            self.mark(tensor)
        return result

    def refusal(self, name: str) -> ValueError:
        """Return the error for an op that needs more than this rank's shard."""
        return fail(
            self.where,
            f"{name} inside the boundary needs the whole of k or v, of which {self.option} keeps "
            "this rank's shard only; the op that reads them must be "
            "F.scaled_dot_product_attention, which takes them part by part",
            f"compute attention with it, or leave {self.option} out",
        )


def _dtensors(result: Any) -> Iterable[DTensor]:
    values = result if isinstance(result, (list, tuple)) else (result,)
    return (value for value in values if isinstance(value, DTensor))
