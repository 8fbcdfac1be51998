"""A style told of another layout than its tensors have, where every size happens to fit.

Nothing can be seen at the boundary then: ``[B, H, S/P, D]`` read as BSHD is ``H`` rows of ``S/P``
heads. But an attention op knows which of its dims are which, and finds the sequence of the view
where it has its heads::

    style BSHD, tensors BNSD, P = 4      q [2, 8, 8, D] on each rank
    Ulysses, inside                      q [2, 32, 8, D] with Shard(2): attention of 32 heads over
                                         the 8 rows of one rank
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from hp_mesh.checks import require
from hp_mesh.view import View

__all__ = ["refuse_crossed_dims"]


def refuse_crossed_dims(
    view: View, q: Tensor, k: Tensor, seq_dim: int, head_dim: int, where: str
) -> None:
    """Refuse attention over what the style took for heads; the same on all ranks.

    Args:
        view: The active view.
        q: Queries of the op: a DTensor of the view, or this rank's part.
        k: Keys.
        seq_dim: Dim of ``q`` that the op attends along.
        head_dim: Dim that the op has its heads in.
        where: Name of the op, for errors.
    """
    if isinstance(q, DTensor):
        length = view.window.global_length // (2 if view.is_balanced else 1)
        of_heads = [] if view.head_axis is None else [q.placements[view.head_axis]]
        crossed = any(q.placements[axis].is_shard(head_dim) for axis in view.row_axes)
        crossed = crossed or any(placement.is_shard(seq_dim) for placement in of_heads)
    else:
        length, keys = view.window.query_length, view.window.key_length
        crossed = k.size(head_dim) == keys != k.size(seq_dim)
    require(
        not crossed or q.size(head_dim) != length,
        where,
        f"q {list(q.shape)} has the sequence ({length}) in dim {head_dim}, which must be its heads "
        f"here, and attends along dim {seq_dim} ({q.size(seq_dim)})",
        "check seq_dim and head_dim of the style: BSHD is 1, 2 and BNSD is 2, 1",
    )
