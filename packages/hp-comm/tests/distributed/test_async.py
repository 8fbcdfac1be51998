"""Handles and the two autograd nodes behind them: never too early, never wrong, and overlapping."""

from __future__ import annotations

import gc
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hp_comm import Handle, exchange_head_tail, gather_seq, head_to_seq, seq_to_head
from hp_comm.autograd import _Launch, _Wait
from hp_comm.moves import Transfer
from hp_comm.transfers import Exchange
from hp_mesh.testing import assert_close, count_collectives, poison_empty, randn, ranks

Call = Callable[..., Any]

CALLS: dict[str, Call] = {
    "seq_to_head": lambda x, **kw: seq_to_head(x, dist.group.WORLD, seq_dim=1, head_dim=2, **kw),
    "head_to_seq": lambda x, **kw: head_to_seq(x, dist.group.WORLD, seq_dim=1, head_dim=2, **kw),
    "gather_seq": lambda x, **kw: gather_seq(x, dist.group.WORLD, seq_dim=1, **kw),
    "exchange_head_tail": lambda x, **kw: exchange_head_tail(x, dist.group.WORLD, **kw),
}


@pytest.mark.parametrize("B", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_async_equals_sync_bit_for_bit_with_a_late_rank(name: str, B: int) -> None:
    """B17: rank 1 is late; rank 0 waits for it and reads nothing that has not arrived."""
    call = CALLS[name]

    def on(rank: int) -> None:
        x = randn(B, 6, 4, 3, seed=rank)
        expected = call(x)
        if rank == 1:
            time.sleep(0.3)
        with poison_empty():
            handle = call(x, async_op=True)
            y = handle.wait()
        assert torch.equal(y, expected)
        assert handle.wait() is y and handle.done()

    ranks(2).run(on)


@pytest.mark.parametrize("name", CALLS)
def test_async_gradients_equal_sync_gradients_bit_for_bit(name: str) -> None:
    """Three steps, each with its own data."""
    call = CALLS[name]

    def on(rank: int) -> None:
        for step in range(3):
            a = randn(2, 6, 4, 3, seed=10 * step + rank, requires_grad=True)
            b = a.detach().clone().requires_grad_()
            sync = call(a)
            up = randn(*sync.shape, seed=100 + rank)
            sync.backward(up)
            call(b, async_op=True).wait().backward(up)
            assert torch.equal(a.grad, b.grad)

    ranks(2).run(on)


def test_handles_may_be_waited_for_in_any_order() -> None:
    """B17: launch three, wait in reverse; each result is its own."""

    def on(rank: int) -> None:
        xs = [randn(2, 6, 4, 3, seed=10 * i + rank, requires_grad=True) for i in range(3)]
        handles = [CALLS["seq_to_head"](x, async_op=True) for x in xs]
        ys = [handle.wait() for handle in reversed(handles)][::-1]
        for x, y in zip(xs, ys, strict=True):
            assert torch.equal(y, CALLS["seq_to_head"](x))
        sum((i + 1) * y.sum() for i, y in enumerate(ys)).backward()
        for i, x in enumerate(xs):
            assert torch.equal(x.grad, torch.full_like(x, i + 1.0))

    ranks(2).run(on)


def test_the_input_may_be_written_after_the_launch() -> None:
    """What is on the wire is a copy: x is the caller's again as soon as the call returns."""

    def on(rank: int) -> None:
        for name, call in CALLS.items():
            x = randn(1, 6, 4, 3, seed=rank)
            expected = call(x.clone())
            if rank == 1:
                time.sleep(0.1)
            handle = call(x, async_op=True)
            x.fill_(float("nan"))
            assert torch.equal(handle.wait(), expected), name

    ranks(2).run(on)


def test_backward_launches_all_three_before_it_waits_and_interleaves_the_projections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The transfers of k and q run while v's projection computes its weight gradient."""
    events: dict[int, list[str]] = {}
    mine = threading.local()

    def note(event: str) -> None:
        if getattr(mine, "on", False):
            events.setdefault(dist.get_rank(), []).append(event)

    start, wait = Exchange.start, Transfer.wait

    def started(self: Exchange, xs: Any, *, overlap: bool) -> Any:
        note("start")
        return start(self, xs, overlap=overlap)

    def waited(self: Transfer) -> None:
        note("wait")
        wait(self)

    monkeypatch.setattr(Exchange, "start", started)
    monkeypatch.setattr(Transfer, "wait", waited)

    def on(rank: int) -> None:
        x = randn(2, 6, 12, seed=rank)
        weights = [randn(12, 12, seed=i, requires_grad=True) for i in range(3)]
        handles = []
        for i, w in enumerate(weights):
            w.register_hook(lambda g, i=i: note(f"weight {i}"))
            handles.append(CALLS["seq_to_head"]((x @ w).view(2, 6, 4, 3), async_op=True))
        q, k, v = (handle.wait() for handle in handles)
        loss = (q * k * v).sum()
        mine.on = True
        loss.backward()

    ranks(2).run(on)
    expected = ["start"] * 3 + ["wait", "weight 2", "wait", "weight 1", "wait", "weight 0"]
    assert events == {0: expected, 1: expected}


def test_every_consumer_of_the_result_and_of_the_input_adds_its_gradient() -> None:
    """A second consumer of a projection, and two of the result, are summed by autograd."""

    def on(rank: int) -> None:
        x = randn(2, 6, 4, 3, seed=rank, requires_grad=True)
        p = x * 2
        y = CALLS["seq_to_head"](p, async_op=True).wait()
        (y.sum() + 3 * y.transpose(1, 2).sum() + 5 * p.sum()).backward()
        assert_close(x.grad, torch.full_like(x, 2.0 * (1 + 3 + 5)), kind="grad")

    ranks(2).run(on)


def test_the_graph_can_be_walked_again() -> None:
    """retain_graph: the second backward launches and waits anew and adds the same gradient."""

    def on(rank: int) -> None:
        x = randn(2, 6, 4, 3, seed=rank, requires_grad=True)
        y = CALLS["gather_seq"](x, async_op=True).wait()
        with count_collectives() as counted:
            y.sum().backward(retain_graph=True)
            once = x.grad.clone()
            y.sum().backward()
        assert torch.equal(x.grad, 2 * once)
        assert counted.summary() == {"reduce_scatter": 2}

    ranks(2).run(on)


def test_two_micro_batches_in_flight_keep_their_gradients() -> None:
    """Launch a, launch b, finish b and a, then backward of both, in both orders."""

    def on(rank: int) -> None:
        a, b = (randn(2, 6, 4, 3, seed=10 * i + rank, requires_grad=True) for i in (1, 2))
        ha, hb = CALLS["seq_to_head"](a, async_op=True), CALLS["gather_seq"](b, async_op=True)
        yb, ya = hb.wait(), ha.wait()
        yb.sum().backward()
        (ya * ya).sum().backward()
        assert_close(a.grad, 2 * a, kind="grad")
        assert_close(b.grad, torch.full_like(b, 2.0), kind="grad")

    ranks(2).run(on)


def test_a_packed_handle_returns_the_tuple_and_spares_what_needs_no_gradient() -> None:
    """q, k, v in one launch, mixed dtypes: k has no gradient and is not sent back."""

    def on(rank: int) -> None:
        q = randn(2, 6, 4, 3, seed=rank, requires_grad=True)
        k = randn(2, 6, 2, 3, seed=rank)
        v = randn(2, 6, 2, 5, seed=rank, dtype=torch.float32, requires_grad=True)
        with count_collectives() as counted:
            ys = CALLS["seq_to_head"]((q, k, v), async_op=True).wait()
        assert counted.summary() == {"all_to_all": 2}
        assert [y.requires_grad for y in ys] == [True, False, True]
        with count_collectives() as counted:
            (ys[0].sum() + 2 * ys[2].sum()).backward()
        assert counted.summary() == {"all_to_all": 2}
        assert counted.bytes("all_to_all") == (q.numel() * 8 + v.numel() * 4) // 2
        assert torch.equal(v.grad, torch.full_like(v, 2.0))

    ranks(2).run(on)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_recomputes_the_same_exchanges(use_reentrant: bool) -> None:
    """Same gradients with and without, the same collectives on all ranks, no handle left over."""

    def block(x: Tensor) -> Tensor:
        handles = [CALLS["seq_to_head"]((x * (i + 1)).sin(), async_op=True) for i in range(2)]
        q, k = (handle.wait() for handle in handles)
        return CALLS["head_to_seq"]((q * k).exp(), async_op=True).wait()

    def on(rank: int) -> dict[str, int]:
        a = randn(2, 6, 4, 3, seed=rank, requires_grad=True)
        b = a.detach().clone().requires_grad_()
        block(a).sum().backward()
        with count_collectives() as counted:
            checkpoint(block, b, use_reentrant=use_reentrant).sum().backward()
        assert_close(b.grad, a.grad, kind="grad")
        return counted.summary()

    first, second = ranks(2).run(on)
    assert first == second


def test_second_derivatives_cross_a_handle() -> None:
    """The token that runs backward belongs to a launch that can itself be differentiated."""

    def on(rank: int) -> None:
        x = randn(1, 4, 4, 2, seed=rank, requires_grad=True)
        y = CALLS["seq_to_head"](x, async_op=True).wait()
        (grad,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
        assert_close(grad, 3 * x**2, kind="grad")
        assert_close(second, 6 * x, kind="grad")

    ranks(2).run(on)


def test_a_backward_that_failed_halfway_leaves_nothing_behind() -> None:
    """An error between the two nodes of backward: the next walk of the graph is right."""

    def on(rank: int) -> None:
        x = randn(2, 6, 4, 3, seed=rank, requires_grad=True)
        failing = [True]

        def hook(grad: Tensor) -> None:
            if failing[0]:
                raise ArithmeticError("on purpose")

        first, second = x * 2, x * 3
        second.register_hook(hook)
        handles = [CALLS["seq_to_head"](p, async_op=True) for p in (first, second)]
        ys = [handle.wait() for handle in handles]
        with pytest.raises(ArithmeticError):
            (ys[0].sum() + ys[1].sum()).backward(retain_graph=True)
        failing[0] = False
        x.grad = None
        (ys[0].sum() + ys[1].sum()).backward()
        assert_close(x.grad, torch.full_like(x, 5.0), kind="grad")

    ranks(2).run(on)


def test_without_gradients_there_is_no_graph() -> None:
    """no_grad at launch: a plain result. no_grad at the wait: detached there."""

    def on(rank: int) -> None:
        x = randn(2, 6, 4, 3, seed=rank, requires_grad=True)
        with torch.no_grad():
            handle = CALLS["seq_to_head"](x, async_op=True)
        assert not handle.wait().requires_grad
        handle = CALLS["seq_to_head"](x, async_op=True)
        with torch.no_grad():
            assert not handle.wait().requires_grad

    ranks(2).run(on)


def test_a_dropped_handle_is_reported_and_the_next_call_works() -> None:
    """The exchange is completed, so no peer is left waiting and no buffer is written later."""

    def on(rank: int) -> list[str]:
        x = randn(2, 6, 4, 3, seed=rank, requires_grad=True)
        handle: Handle[Tensor] | None = CALLS["seq_to_head"](x, async_op=True)
        assert handle is not None
        handle = None
        gc.collect()
        y = CALLS["seq_to_head"](x)
        y.sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))
        return []

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ranks(2).run(on)
    texts = [str(w.message) for w in caught if "dropped before wait()" in str(w.message)]
    assert len(texts) == 2


def test_nothing_of_the_forward_pass_is_kept_for_backward() -> None:
    """Moves are linear: neither form saves a tensor."""

    def on(rank: int) -> None:
        saved: list[Tensor] = []
        keep = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
        x = randn(2, 6, 4, 3, seed=rank, requires_grad=True)
        with keep:
            for call in CALLS.values():
                call(x)
                call(x, async_op=True).wait()
        assert saved == []

    ranks(2).run(on)


def test_anomaly_detection_finds_nothing_to_complain_of() -> None:
    """No gradient on an edge is an unfinished or uninitialised buffer."""

    def on(rank: int) -> None:
        x = randn(2, 6, 4, 3, seed=rank, requires_grad=True)
        with poison_empty():
            y = CALLS["seq_to_head"](x, async_op=True).wait()
            y.sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Anomaly Detection has been enabled")
        with torch.autograd.detect_anomaly():
            ranks(2).run(on)


def test_the_nodes_of_the_graph_are_launch_and_wait() -> None:
    """The consumer hangs on wait, wait on launch, launch on the producer: nothing between."""

    def on(rank: int) -> None:
        x = randn(2, 6, 4, 3, seed=rank, requires_grad=True)
        node: Any = CALLS["seq_to_head"](x, async_op=True).wait().grad_fn
        assert isinstance(node, _Wait._backward_cls)
        (after,) = [n for n, _ in node.next_functions if n is not None]
        assert isinstance(after, _Launch._backward_cls)

    ranks(2).run(on)
