"""Matmul, einsum and linear on every combination of placements, against the whole tensors."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from hp_mesh._torch import from_local
from hp_mesh.mesh import init_device_mesh
from hp_mesh.open_views import close_view, open_view
from hp_mesh.testing import assert_close, count_collectives, randn, ranks
from hp_mesh.view import View
from hp_mesh.window import AttentionWindow

Op = Callable[..., Tensor]


def view_on(mesh: Any, cp_axes: tuple[int, ...], head_axis: int | None = None) -> View:
    """Return a view that knows its mesh and nothing of attention."""
    return View(
        mesh=mesh,
        cp_axes=cp_axes,
        window=AttentionWindow(0, 1, 1, 1),
        query_placements=(),
        heads=(0, 1),
        num_heads=1,
        is_local=False,
        is_balanced=False,
        where="Style",
        head_axis=head_axis,
    )


def placed(whole: Tensor, mesh: Any, placements: Sequence[Placement], view: View) -> Any:
    """Return this rank's leaf and the DTensor around it; a partial sum is split unevenly."""
    local = whole.detach()
    coordinate = mesh.get_coordinate()
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            local = local.chunk(mesh.size(axis), placement.dim)[coordinate[axis]]
        elif placement.is_partial():
            local = local * (1.5 if coordinate[axis] == 0 else -0.5 / (mesh.size(axis) - 1))
    leaf = local.clone().requires_grad_()
    return leaf, from_local(leaf, mesh, placements, view.partial_grads(placements))


def gathered(grads: list[Tensor], placements: Sequence[Placement], sizes: Sequence[int]) -> Tensor:
    """Put the gradients of all ranks together: shards side by side, shares of a sum added."""
    for axis in reversed(range(len(sizes))):
        size, placement = sizes[axis], placements[axis]
        groups = [grads[i : i + size] for i in range(0, len(grads), size)]
        if isinstance(placement, Shard):
            grads = [torch.cat(group, placement.dim) for group in groups]
        elif placement.is_partial():  # d whole / d local is 1 on each rank
            grads = [group[0] for group in groups]
        else:
            grads = [sum(group[1:], group[0]) for group in groups]
    (result,) = grads
    return result


def run(
    rank: int,
    op: Op,
    wholes: Sequence[Tensor],
    layouts: Sequence[Sequence[Placement] | None],
    sizes: tuple[int, ...],
    grad: Tensor,
) -> Any:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("co", "ds")[: len(sizes)])
    view = view_on(mesh, tuple(range(len(sizes))))
    open_view(view, sys._getframe())
    try:
        pairs = [
            (leaf := whole.detach().clone().requires_grad_(), leaf)
            if layout is None
            else placed(whole, mesh, layout, view)
            for whole, layout in zip(wholes, layouts, strict=True)
        ]
        with count_collectives() as counted:
            result = op(*(tensor for _, tensor in pairs))
        # each rank's share of the loss: its rows, or on one rank what all hold
        weight = from_local(grad, mesh, [Replicate()] * mesh.ndim)
        target = [Replicate() if p.is_partial() else p for p in result.placements]
        whole = result.redistribute(placements=target)
        local = whole.to_local(grad_placements=view.partial_grads(target))
        mine = weight.redistribute(placements=target).to_local()
        first = all(mesh.get_coordinate()[a] == 0 for a, p in enumerate(target) if p.is_replicate())
        ((local * mine).sum() * (1.0 if first else 0.0)).backward()
        full = whole.full_tensor().detach()
    finally:
        close_view(view)
    return full, [leaf.grad for leaf, _ in pairs], counted.summary()


def compare(
    op: Op, shapes: Sequence[tuple[int, ...]], layouts: Any, sizes: tuple[int, ...]
) -> dict[str, int]:
    wholes = [randn(*s, seed=i, requires_grad=True) for i, s in enumerate(shapes)]
    expected = op(*wholes)
    grad = randn(*expected.shape, seed=9)
    expected.backward(grad)
    results = ranks(sizes[0] * (sizes[1] if len(sizes) > 1 else 1)).run(
        run, op, wholes, layouts, sizes, grad
    )
    for full, _, _ in results:
        assert_close(full, expected)
    for index, (whole, layout) in enumerate(zip(wholes, layouts, strict=True)):
        layout = [Replicate()] * len(sizes) if layout is None else layout
        total = gathered([grads[index] for _, grads, _ in results], layout, sizes)
        assert_close(total, whole.grad, kind="grad", name=f"operand {index} {layouts}")
    summary: dict[str, int] = results[0][2]
    return summary


R = Replicate()


def einsum(equation: str) -> Op:
    return lambda *operands: torch.einsum(equation, *operands)


OPS: dict[str, tuple[Op, list[tuple[int, ...]]]] = {
    "matmul": (torch.matmul, [(2, 6, 10, 4), (2, 6, 4, 8)]),
    "@": (lambda a, b: a @ b, [(6, 10, 4), (6, 4, 8)]),
    "bmm": (torch.bmm, [(6, 10, 4), (6, 4, 8)]),
    "broadcast": (torch.matmul, [(2, 1, 10, 4), (6, 4, 8)]),
    "2-D": (torch.matmul, [(2, 6, 4), (4, 8)]),
    "vector": (torch.matmul, [(2, 6, 4), (4,)]),
    "einsum": (einsum("bhid,bhjd->bhij"), [(2, 6, 10, 4), (2, 6, 8, 4)]),
    "einsum-heads": (einsum("bihd,bjhd->bhij"), [(2, 10, 6, 4), (2, 8, 6, 4)]),
    "ellipsis": (einsum("...id,...jd->...ij"), [(2, 6, 10, 4), (6, 8, 4)]),
    "implicit": (einsum("ab,bc"), [(6, 10), (10, 4)]),
    "outer": (einsum("a,b->ab"), [(6,), (10,)]),
    "sum": (einsum("bhi->h"), [(2, 6, 10)]),
    "diagonal": (einsum("bii->bi"), [(2, 6, 6)]),
    "linear": (F.linear, [(2, 6, 10), (4, 10), (4,)]),
}


def placements_of(shape: tuple[int, ...], parts: int) -> list[Placement]:
    return [R, *(Shard(d) for d, n in enumerate(shape) if n % parts == 0 and n >= parts)]


@pytest.mark.parametrize("name", OPS)
def test_every_placement_on_one_axis_gives_the_whole_result_and_gradients(name: str) -> None:
    op, shapes = OPS[name]
    choices = [[None, *([p] for p in placements_of(s, 2))] for s in shapes]
    for layouts in itertools.product(*choices):
        if all(layout is None for layout in layouts):
            continue
        compare(op, shapes, layouts, (2,))


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("matmul", [[Shard(2), Shard(1)], [R, Shard(1)]]),
        ("matmul", [[Shard(1), Shard(1)], [R, R]]),
        ("matmul", [[Shard(2), Shard(2)], None]),
        ("matmul", [[Shard(3), Shard(1)], [R, Shard(1)]]),
        ("matmul", [[Shard(0), Shard(3)], [Shard(0), Shard(2)]]),
        ("einsum-heads", [[Shard(1), Shard(2)], [R, Shard(2)]]),
        ("linear", [[Shard(1), R], None, None]),
        ("linear", [[R, R], [R, R], [R, R]]),
    ],
)
def test_two_axes_give_the_whole_result_without_communication(name: str, layouts: Any) -> None:
    op, shapes = OPS[name]
    shapes = [tuple(8 if n == 6 else 12 if n == 10 else n for n in s) for s in shapes]
    assert compare(op, shapes, layouts, (2, 2)) == {}


@pytest.mark.parametrize("name", ["matmul", "einsum", "linear"])
def test_sum_that_is_still_partial_is_an_operand_like_others(name: str) -> None:
    op, shapes = OPS[name]
    for layouts in ([[Partial()], [R]], [[Partial()], None], [[R], [Partial()]]):
        layouts = [*layouts, *[None] * (len(shapes) - 2)]
        compare(op, shapes, layouts, (2,))


def cut_already(rank: int, sizes: tuple[int, ...], equation: str, x: Tensor, w: Tensor) -> Any:
    """Contract heads or rows of ``x``, cut over all axes, with the part of ``w`` of the first."""
    names = ("cp",) if len(sizes) == 1 else ("tp", "cp")
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    last = len(sizes) - 1
    view = view_on(mesh, (last,), head_axis=last if last else None)
    shards = [Shard(1)] * len(sizes)
    local = x
    for axis, index in enumerate(mesh.get_coordinate()):
        local = local.chunk(mesh.size(axis), 1)[index]
    mine = w.chunk(mesh.size(0), 0)[mesh.get_coordinate()[0]].clone().requires_grad_()
    open_view(view, sys._getframe())
    try:
        with count_collectives() as counted:
            out = torch.einsum(equation, from_local(local, mesh, shards), mine)
        out.to_local().sum().backward()
    finally:
        close_view(view)
    assert counted.summary() == {}
    return out.full_tensor(), mine.grad


@pytest.mark.parametrize(
    ("sizes", "equation", "shapes"),
    [
        ((2,), "bsd,sd->bs", [(3, 4, 5), (4, 5)]),
        ((3,), "bsd,sd->bs", [(2, 9, 5), (9, 5)]),
        ((2, 2), "bhd,hde->bhe", [(3, 8, 5), (8, 5, 6)]),
        ((2, 3), "bhd,hde->bhe", [(3, 12, 5), (12, 5, 6)]),
    ],
    ids=["rows of 2 ranks", "rows of 3 ranks", "heads of tp 2, cp 2", "heads of tp 2, cp 3"],
)
def test_a_plain_operand_that_is_cut_already_is_not_cut_again(
    sizes: tuple[int, ...], equation: str, shapes: list[tuple[int, ...]]
) -> None:
    """This rank's rows, or TP's heads: the one that would be left would fit all of the others."""
    x, w = randn(*shapes[0]), randn(*shapes[1], seed=1, requires_grad=True)
    expected = torch.einsum(equation, x, w)
    expected.sum().backward()

    found = ranks(sizes[0] * (sizes[1] if len(sizes) > 1 else 1)).run(
        cut_already, sizes, equation, x, w.detach()
    )
    for out, _ in found:
        assert_close(out, expected)
    per_first = len(found) // sizes[0]
    shares = [grad for _, grad in found]
    grads = [sum(shares[at : at + per_first]) for at in range(0, len(shares), per_first)]
    assert_close(torch.cat(grads), w.grad, kind="grad")
