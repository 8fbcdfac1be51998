"""traffic() says what a dispatch counter sees and what the formulas promise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from hp_comm import exchange_head_tail, gather_seq, head_to_seq, seq_to_head, traffic
from hp_mesh.testing import count_collectives, least_peak, randn, ranks

B, S, D = 2, 24, 5


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("P", "H", "Hkv"), [(2, 4, 4), (4, 8, 4), (4, 8, 2), (3, 6, 3)], ids=str)
def test_ulysses_sends_the_formulas_bytes(P: int, H: int, Hkv: int, async_op: bool) -> None:
    """One all-to-all in and one out per direction; a KV head goes once to each rank in need."""
    table = [sorted({h * Hkv // H for h in range(p * H // P, (p + 1) * H // P)}) for p in range(P)]

    def on(rank: int) -> None:
        q = randn(B, S // P, H, D, requires_grad=True)
        k, v = (randn(B, S // P, Hkv, D, seed=i, requires_grad=True) for i in (1, 2))
        with traffic() as sent, count_collectives() as counted:
            ys = seq_to_head(
                (q, k, v),
                dist.group.WORLD,
                seq_dim=1,
                head_dim=2,
                heads=(None, table, table),
                async_op=async_op,
            )
            q2, k2, v2 = ys.wait() if async_op else ys
            out = q2 * (k2.sum() + v2.sum())
            o = head_to_seq(out, dist.group.WORLD, seq_dim=1, head_dim=2, async_op=async_op)
            o = o.wait() if async_op else o
        shard = B * (S // P) * D * 8
        copies = sum(len(heads) for p, heads in enumerate(table) if p != rank)
        away = shard * (H * (P - 1) // P * 2 + 2 * copies)
        assert sent.summary() == {"all_to_all": (2, away)}
        assert counted.count() == 2 and counted.bytes("all_to_all") == away
        with traffic() as sent, count_collectives() as counted:
            o.sum().backward()
        # what came back: the gradient of each copy that this rank received
        mine = len(table[rank]) * (P - 1)
        back = shard * (H * (P - 1) // P * 2 + 2 * mine)
        assert sent.summary() == {"all_to_all": (2, back)}
        assert counted.count() == 2 and counted.bytes("all_to_all") == back

    ranks(P).run(on)


@pytest.mark.parametrize("P", [2, 3, 4])
def test_gather_and_swap_send_the_formulas_bytes(P: int) -> None:
    """2 A Hkv (P-1)/P each way, with A one head of the whole sequence; a swap sends its tensor."""
    Hkv = 2

    def on(rank: int) -> None:
        k, v = (randn(B, S // P, Hkv, D, seed=i, requires_grad=True) for i in (1, 2))
        t = randn(B, 3, 2, D, requires_grad=True)
        with traffic() as sent, count_collectives() as counted:
            k2, v2 = gather_seq((k, v), dist.group.WORLD, seq_dim=1)
            t2 = exchange_head_tail(t, dist.group.WORLD)
            (k2.sum() + v2.sum() + t2.sum()).backward()
        away = 2 * B * S * D * 8 * Hkv * (P - 1) // P
        assert sent.count("all_gather") == sent.count("reduce_scatter") == 2
        assert sent.bytes("all_gather") == sent.bytes("reduce_scatter") == away
        swaps = 0 if 2 * rank + 1 == P else 2
        assert sent.count("p2p") == swaps and sent.bytes("p2p") == swaps * t.numel() * 8
        for kind in ("all_gather", "reduce_scatter", "p2p"):
            assert sent.count(kind) == counted.count(kind)
            assert sent.bytes(kind) == counted.bytes(kind)

    ranks(P).run(on)


def test_the_worked_example_has_its_numbers() -> None:
    """Four ranks, H=32, Hkv=8, per L*D: Ulysses sends 60 forward, a gather of K and V sends 48."""
    L, unit = 6, 6 * D * 8

    def on(rank: int) -> None:
        q, k, v = (randn(1, L, H, D) for H in (32, 8, 8))
        with traffic() as sent:
            q2, _, _ = seq_to_head((q, k, v), dist.group.WORLD, seq_dim=1, head_dim=2)
            head_to_seq(q2, dist.group.WORLD, seq_dim=1, head_dim=2)
            gather_seq((k, v), dist.group.WORLD, seq_dim=1)
        assert sent.summary() == {"all_to_all": (2, 60 * unit), "all_gather": (2, 48 * unit)}

    ranks(4).run(on)


def test_uneven_exchanges_are_counted_exactly() -> None:
    """All-to-all: the true bytes. Gathers are padded to the longest, and say so."""
    lengths = [4, 1, 3]

    def on(rank: int) -> None:
        x = randn(B, lengths[rank], 6, D, requires_grad=True)
        with traffic() as sent, count_collectives() as counted:
            y = seq_to_head(x, dist.group.WORLD, seq_dim=1, head_dim=2, lengths=lengths)
            z = gather_seq(x, dist.group.WORLD, seq_dim=1, lengths=lengths)
            (y.sum() + z.sum()).backward()
        assert sent.bytes("all_gather") == 2 * B * max(lengths) * 6 * D * 8
        for kind in ("all_to_all", "all_gather", "reduce_scatter"):
            assert sent.count(kind) == counted.count(kind)
            assert sent.bytes(kind) == counted.bytes(kind)

    ranks(3).run(on)


def test_counters_nest_and_belong_to_their_rank() -> None:
    """Ranks that are threads of one process do not see each other's collectives."""

    def on(rank: int) -> int:
        group = dist.new_group([0, 1])
        with traffic() as outer:
            if rank < 2:
                gather_seq(randn(2, 3), group, seq_dim=0)
                with traffic() as inner:
                    gather_seq(randn(2, 3), group, seq_dim=0)
                assert inner.count() == 1
        return outer.count("all_gather")

    assert ranks(3).run(on) == [2, 2, 0]


def _needs_at_most(limit: float, call: Callable[[], object]) -> None:
    """Assert that no more bytes are alive while ``call`` runs, the results it returns included."""
    assert least_peak(call, limit) <= limit


@pytest.mark.parametrize("layout", ["B1", "B2", "packed-B2", "strided"])
def test_an_exchange_needs_at_most_twice_the_exchanged_tensors(layout: str) -> None:
    """One send and one receive buffer; the former is gone before results are laid out."""
    rows, H, P = 64, 8, 4

    def on(rank: int) -> None:
        n = 1 if layout == "B1" else 2
        xs = [randn(n, rows, H, 16, seed=i, requires_grad=True) for i in range(3)]
        if layout == "strided":
            xs = [randn(n, H, rows, 16, seed=i, requires_grad=True) for i in range(3)]
            xs = [x.transpose(1, 2) for x in xs]
        if layout != "packed-B2":
            xs = xs[:1]
        size = sum(x.numel() * 8 for x in xs)
        group = dist.group.WORLD
        _needs_at_most(2 * size, lambda: seq_to_head(xs, group, seq_dim=1, head_dim=2))
        ys = seq_to_head(xs, group, seq_dim=1, head_dim=2)
        ups = [randn(*y.shape) for y in ys]
        _needs_at_most(2 * size, lambda: torch.autograd.grad(ys, xs, ups, retain_graph=True))
        outs = [y.detach() for y in ys]
        _needs_at_most(2 * size, lambda: head_to_seq(outs, group, seq_dim=1, head_dim=2))

    ranks(P).run(on)


@pytest.mark.parametrize("n", [1, 2], ids=["B1", "B2"])
def test_a_gather_allocates_its_result_and_no_copy_of_the_shard(n: int) -> None:
    """With one sequence it lands where it stays; otherwise one more copy lays it out."""

    def on(rank: int) -> None:
        x = randn(n, 64, 4, 16, requires_grad=True)
        shard = x.numel() * 8
        group = dist.group.WORLD
        _needs_at_most(n * 4 * shard, lambda: gather_seq(x, group, seq_dim=1))
        y = gather_seq(x, group, seq_dim=1)
        up = randn(*y.shape)
        back = (n - 1) * 4 * shard + shard
        _needs_at_most(back, lambda: torch.autograd.grad(y, x, up, retain_graph=True))

    ranks(4).run(on)
