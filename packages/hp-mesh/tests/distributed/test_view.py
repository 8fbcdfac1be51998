"""The global view: registered ops, plain tensors beside DTensors, and the ways out of a DTensor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.overrides import handle_torch_function

from hp_mesh import handlers as registry
from hp_mesh._torch import from_local
from hp_mesh.handlers import register_handler, registration_of
from hp_mesh.mesh import init_device_mesh
from hp_mesh.open_views import attention_window, close_view, open_view
from hp_mesh.testing import assert_close, count_collectives, randn, ranks
from hp_mesh.view import View
from hp_mesh.window import AttentionWindow

L, P, H, K = 5, 3, 6, 7
ROWS, HEADS = Shard(1), Shard(0)


@contextmanager
def opened(*, is_local: bool = False) -> Iterator[View]:
    """Open a view of ``P`` ranks that hold ``L`` rows each."""
    mesh = init_device_mesh("cpu", (P,), mesh_dim_names=("cp",))
    rank = mesh.get_local_rank()
    view = View(
        mesh=mesh,
        cp_axes=(0,),
        window=AttentionWindow(rank * L, L, P * L, P * L),
        query_placements=(ROWS,),
        heads=(0, H),
        num_heads=H,
        is_local=is_local,
        is_balanced=False,
        where="Style",
    )
    open_view(view, sys._getframe(2))
    try:
        yield view
    finally:
        close_view(view)


def scores(view: View, shard: Shard = ROWS) -> tuple[Tensor, DTensor]:
    """Return all scores ``[H, P*L, K]`` and this rank's part of them as a DTensor."""
    whole = randn(H, P * L, K, seed=1)
    local = whole.chunk(P, shard.dim)[view.mesh.get_local_rank()]
    return whole, from_local(local, view.mesh, [shard])


@pytest.mark.parametrize("is_local", [False, True], ids=["DTensors", "plain"])
def test_attention_window_answers_inside_only(is_local: bool) -> None:
    def run(rank: int) -> None:
        assert attention_window() is None
        with opened(is_local=is_local):
            assert attention_window() == AttentionWindow(rank * L, L, P * L, P * L)
        assert attention_window() is None

    ranks(P).run(run)


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


@pytest.mark.usefixtures("handlers")
def test_handler_is_found_by_callable_and_by_the_name_of_an_op_defined_later() -> None:
    seen: list[str] = []

    def note(view: View, op: Callable[..., Any], args: Any, kwargs: Any) -> str:
        seen.append(view.where)
        return f"handled {len(args)} {sorted(kwargs)}"

    register_handler("hp_mesh_test::late", note)
    register_handler(torch.erf, note)
    library = torch.library.Library("hp_mesh_test", "DEF")
    library.define("late(Tensor x, int n=1) -> Tensor")
    library.impl("late", lambda x, n=1: x + n, "CompositeExplicitAutograd")
    x = torch.zeros(2)

    def run(rank: int) -> None:
        with opened():
            for op in (torch.ops.hp_mesh_test.late, torch.ops.hp_mesh_test.late.default):
                assert op(x, n=2) == "handled 1 ['n']"
            assert torch.erf(x) == "handled 1 []"
        assert torch.ops.hp_mesh_test.late(x, n=2)[0] == 2.0

    ranks(P).run(run)
    assert seen == ["Style"] * 3 * P
    library._destroy()


@pytest.mark.usefixtures("handlers")
def test_what_a_handler_takes_is_said_for_each_op() -> None:
    """One function may run two ops: what it is trusted with for one, it is not for the other."""

    def both(view: View, op: Callable[..., Any], args: Any, kwargs: Any) -> None:
        raise AssertionError("nothing is called here")

    register_handler(torch.erf, both, knows_rows=True, streams=True)
    register_handler(torch.erfc, both)

    found = [registration_of(op) for op in (torch.erf, torch.erfc)]
    taken = [(one.knows_rows, one.streams) for one in found if one is not None]
    assert taken == [(True, True), (False, False)]


def test_a_callable_without_a_hash_is_left_to_dtensor() -> None:
    """It is no key of the registry, nor of anything that is remembered of functions."""

    class Twice:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, x: Tensor) -> Tensor:
            return x * 2

    def run(rank: int) -> None:
        with opened() as view:
            _, mine = scores(view)
            out = handle_torch_function(Twice(), (mine,), mine)
            assert_close(out.to_local(), 2 * mine.to_local())

    ranks(P).run(run)


@pytest.mark.parametrize(
    "shape",
    [(P * L, K), (1, P * L, K), (H, P * L, K), (P * L, 1), (K,), (1, 1), (H, 1, 1), ()],
    ids=str,
)
@pytest.mark.parametrize("shard", [ROWS, HEADS], ids=["rows", "heads"])
def test_plain_tensor_takes_part_by_shape_and_its_gradient_is_this_ranks_share(
    shape: tuple[int, ...], shard: Shard
) -> None:
    """On both sides of an op; forward and backward send nothing."""
    whole = randn(H, P * L, K, seed=1)
    reference = randn(1, *shape, seed=2)[0].requires_grad_()
    (whole * reference - (reference - whole) ** 2).sum().backward()

    def run(rank: int) -> Any:
        with opened() as view:
            _, mine = scores(view, shard)
            parameter = randn(1, *shape, seed=2)[0].requires_grad_()
            with count_collectives() as counted:
                out = mine * parameter - (parameter - mine) ** 2
                local = out.to_local()
                local.sum().backward()
            assert counted.summary() == {}
        return parameter.grad

    assert_close(sum(ranks(P).run(run)), reference.grad, kind="grad")


def test_mask_that_the_caller_has_cut_is_this_ranks_rows() -> None:
    def run(rank: int) -> None:
        with opened() as view:
            whole, mine = scores(view)
            window = attention_window()
            assert window is not None
            at = torch.arange(window.query_start, window.query_end)
            mask = at[:, None] < torch.arange(K)[None]
            bias = randn(P * L, K, seed=3)[window.query_start : window.query_end].requires_grad_()
            out = (mine.masked_fill(mask, 0.0) + bias).to_local()
            out.sum().backward()
        full = whole.masked_fill(torch.arange(P * L)[:, None] < torch.arange(K)[None], 0.0)
        full = full + randn(P * L, K, seed=3)
        assert_close(out, full.chunk(P, 1)[rank])
        assert_close(bias.grad, torch.full((L, K), float(H), dtype=torch.float64))

    ranks(P).run(run)


def test_mask_of_another_length_is_an_error() -> None:
    def run(rank: int) -> str:
        with opened() as view:
            _, mine = scores(view)
            with pytest.raises(RuntimeError) as caught:
                mine + torch.zeros(L + 1, K, dtype=torch.float64)
        return str(caught.value)

    assert all("must match" in m or "broadcast" in m for m in ranks(P).run(run))


@pytest.mark.parametrize("way", ["to_local", "full_tensor", "transposed", "mixed"])
def test_gradient_of_what_every_rank_reads_whole_is_partial_inside(way: str) -> None:
    """Each rank's rows add their part; torch's default would keep one part only."""
    whole_k, weights = randn(K, 4, seed=4), randn(P * L, K, seed=5)

    def leave(k: Tensor) -> Tensor:
        if way == "full_tensor":
            return k.full_tensor()
        if way == "transposed":
            return k.transpose(0, 1).to_local().transpose(0, 1)
        return k.to_local()

    def run(rank: int) -> tuple[Tensor, Any]:
        with opened() as view:
            leaf = whole_k.clone().requires_grad_()
            placed = from_local(leaf, view.mesh, [Replicate()], view.partial_grads([Replicate()]))
            mine = weights.chunk(P)[rank]
            with count_collectives() as counted:
                out = (mine @ leave(placed)).square().sum()
                if way == "mixed":
                    rows = from_local(mine, view.mesh, [Shard(0)])
                    out = out + (rows @ placed).to_local().square().sum()
                out.backward()
        return leaf.grad, counted.summary()

    reference = whole_k.clone().requires_grad_()
    (weights @ reference).square().sum().mul(2 if way == "mixed" else 1).backward()
    results = ranks(P).run(run)
    assert_close(sum(grad for grad, _ in results), reference.grad, kind="grad")
    assert all(summary == {} for _, summary in results)


def test_outside_a_boundary_the_default_gradient_is_torchs() -> None:
    def run(rank: int) -> None:
        with opened() as view:
            mesh = view.mesh
        leaf = torch.ones(2, dtype=torch.float64, requires_grad=True)
        placed = DTensor.from_local(leaf, mesh, [Replicate()])
        seen = []
        doubled = placed * 2
        doubled.register_hook(lambda grad: seen.append(grad.placements))
        doubled.to_local().sum().backward()
        assert seen == [(Replicate(),)]
        assert leaf.grad.tolist() == [2.0, 2.0]

    ranks(P).run(run)


def test_gradient_comes_back_as_a_share_from_whatever_placement() -> None:
    """A shard with zeros around it, a replicated one on the first rank, a partial one as it is."""
    full = randn(P * 2, 3, seed=6)  # 3 - 1 - 1 = 1 on three ranks

    def run(rank: int) -> list[Tensor]:
        grads = []
        with opened() as view:
            for placement in (Shard(0), Shard(1), Replicate(), Partial()):
                leaf = torch.zeros(P * 2, 3, dtype=torch.float64, requires_grad=True)
                x = from_local(leaf, view.mesh, [Replicate()], [Partial()])
                local = full.chunk(P, placement.dim)[rank] if placement.is_shard() else full
                if placement.is_partial():
                    local = full * (3.0 if rank == 0 else -1.0)
                x.backward(from_local(local, view.mesh, [placement]))
                grads.append(leaf.grad)
        return grads

    for shares in zip(*ranks(P).run(run), strict=True):
        assert_close(sum(shares), full, kind="grad")
