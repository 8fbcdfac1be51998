"""Copies around the wire: one on the side that needs it, none where the layout is a buffer's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hp_comm import gather_seq, head_to_seq, merge_head_tail, seq_to_head, split_head_tail
from hp_mesh.testing import randn, ranks

P, S, H, D = 2, 12, 4, 6


class _Copies(TorchDispatchMode):
    """Count the operators that write a tensor anew, by what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        self.count += name in ("aten::copy_", "aten::clone", "aten::cat", "aten::index_select")
        return func(*args, **(kwargs or {}))


def _shapes(layout: str, batch: int, rows: int, heads: int) -> tuple[int, ...]:
    sizes = {"B": batch, "S": rows, "H": heads, "D": D}
    return tuple(sizes[letter] for letter in layout)


def _count(rank: int, run: Callable[..., Any], *shapes: tuple[int, ...]) -> tuple[int, int]:
    """Return the copies of forward and backward; the gradient that comes is dense."""
    xs = [randn(*shape, seed=i, requires_grad=True) for i, shape in enumerate(shapes)]
    with _Copies() as forward:
        outs = run(xs, dist.group.WORLD)
    outs = [outs] if isinstance(outs, Tensor) else list(outs)
    upstream = [torch.ones(out.shape, dtype=out.dtype) for out in outs]
    with _Copies() as backward:
        torch.autograd.grad(outs, xs, upstream)
    return forward.count, backward.count


def _to_heads(layout: str, **options: Any) -> Callable[..., Any]:
    dims = {"seq_dim": layout.index("S"), "head_dim": layout.index("H")}
    return lambda xs, group: seq_to_head(xs, group, **dims, **options)


def _to_rows(layout: str) -> Callable[..., Any]:
    dims = {"seq_dim": layout.index("S"), "head_dim": layout.index("H")}
    return lambda xs, group: head_to_seq(xs[0], group, **dims)


@pytest.mark.parametrize(
    ("layout", "batch", "options", "expected"),
    [
        # q, k and v: three into the send buffer, three out of what came; slices need none
        ("BSHD", 1, {}, (6, 6)),
        ("BSHD", 1, {"dense": False}, (3, 6)),
        ("BSHD", 3, {"dense": False}, (3, 6)),
        ("BHSD", 3, {"dense": False}, (3, 6)),
    ],
)
def test_q_k_v_in_one_exchange(
    layout: str, batch: int, options: dict[str, Any], expected: tuple[int, int]
) -> None:
    shapes = [_shapes(layout, batch, S // P, h) for h in (H, 2, 2)]
    assert ranks(P).run(_count, _to_heads(layout, **options), *shapes) == [expected] * P


@pytest.mark.parametrize(
    ("layout", "batch", "expected"),
    [
        ("BSHD", 1, (1, 1)),  # rows lie as they are sent; heads are put together, or taken apart
        ("SBHD", 3, (1, 1)),
        ("SHD", 1, (1, 1)),
        ("HBSD", 3, (1, 1)),
        ("BSHD", 3, (2, 1)),  # rows of a batch lie apart; its gradient may
        ("HSD", 1, (1, 1)),  # heads lead: they come, and go, in place
    ],
)
def test_the_output_on_its_way_back(layout: str, batch: int, expected: tuple[int, int]) -> None:
    shape = _shapes(layout, batch, S, H // P)
    assert ranks(P).run(_count, _to_rows(layout), shape) == [expected] * P


@pytest.mark.parametrize(
    ("layout", "batch", "options", "expected"),
    [
        # gloo's reduce-scatter makes the last copy of backward itself
        ("BSHD", 1, {}, (0, 1)),
        ("SBHD", 3, {}, (0, 1)),
        ("BSHD", 3, {}, (1, 2)),  # all of the sequence is put together
        ("BSHD", 3, {"dense": False}, (1, 2)),  # only the shard is, before it is sent
        # each chunk is put where it belongs, once, also in a batch; both of rank 1 lie together
        ("BSHD", 1, {"order": "head_tail"}, (3, 4)),
        ("BSHD", 3, {"order": "head_tail"}, (3, 4)),
        ("SBHD", 3, {"order": "head_tail", "dense": False}, (3, 4)),
    ],
)
def test_a_gather(
    layout: str, batch: int, options: dict[str, Any], expected: tuple[int, int]
) -> None:
    def run(xs: list[Tensor], group: Any) -> Tensor:
        return gather_seq(xs[0], group, seq_dim=layout.index("S"), **options)

    shape = _shapes(layout, batch, S // P, H)
    assert ranks(P).run(_count, run, shape) == [expected] * P


@pytest.mark.parametrize("trade", [True, False], ids=["traded", "head-tail data"])
@pytest.mark.parametrize("layout", ["BSHD", "SBHD"])
def test_halves_for_balance(layout: str, trade: bool) -> None:
    """Each half is copied once where they are put together; where they part, the one that goes."""
    dim = layout.index("S")

    def split(xs: list[Tensor], group: Any) -> Any:
        return split_head_tail(xs[0], group, seq_dim=dim, trade=trade)

    def merge(xs: list[Tensor], group: Any) -> Any:
        return merge_head_tail(*xs, group, seq_dim=dim, trade=trade)

    whole, half = (_shapes(layout, 3, rows, H) for rows in (6, 3))
    strided = int(trade and layout == "BSHD")  # rows of a batch lie apart
    assert ranks(P).run(_count, split, whole) == [(strided, 2)] * P
    assert ranks(P).run(_count, merge, half, half) == [(2, strided)] * P
