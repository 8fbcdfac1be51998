"""fetch_rows: rows of other shards, their gradients back to the owners, and no byte more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hp_comm import fetch_rows, traffic
from hp_mesh.testing import assert_close, count_collectives, poison_empty, randn, ranks

L = 5
Ranges = list[tuple[int, int]]


def windows(P: int, before: int, first: int) -> list[Ranges]:
    """Each rank asks for ``before`` rows in front of its own, and the ``first`` of all."""
    found: list[Ranges] = []
    for r in range(P):
        start = max(0, r * L - before)
        head = [(0, first)] if 0 < first < start else []
        found.append([*head, (0 if first >= start else start, (r + 1) * L)])
    return found


TABLES: dict[str, Any] = {
    "the row before": lambda P: windows(P, 1, 0),
    "several ranks back": lambda P: windows(P, 2 * L + 1, 0),
    "first rows too": lambda P: windows(P, 2, 3),
    "first rows of two ranks": lambda P: windows(P, 1, L + 2),
    "everything": lambda P: [[(0, P * L)]] * P,
    "nothing of one's own": lambda P: [[((r + 1) % P * L, (r + 1) % P * L + 2)] for r in range(P)],
    "own rows alone": lambda P: windows(P, 0, 0),
    "none": lambda P: [[]] * P,
}


def taken(x: Tensor, ranges: Ranges) -> Tensor:
    """Return the rows of the whole tensor."""
    return torch.cat([x[:, a:b] for a, b in ranges], 1) if ranges else x[:, :0]


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("P", [1, 2, 4])
def test_each_rank_gets_its_rows_and_owners_the_sum_of_gradients(
    P: int, table: str, async_op: bool
) -> None:
    """k and v of other sizes, strided in, dense out; messages and bytes of the table."""
    rows: list[Ranges] = TABLES[table](P)
    whole = [randn(2, P * L, 3, size, seed=size) for size in (4, 3)]
    ups = [[randn(*taken(x, r).shape, seed=50 + i) for x in whole] for i, r in enumerate(rows)]

    def lengths(owner: int, asker: int) -> int:
        low, high = owner * L, (owner + 1) * L
        return sum(max(0, min(b, high) - max(a, low)) for a, b in rows[asker])

    def on(rank: int) -> None:
        leaves = [x[:, rank * L : (rank + 1) * L].mT.contiguous().requires_grad_() for x in whole]
        with count_collectives() as counted, traffic() as sent, poison_empty():
            out = fetch_rows(
                [x.mT for x in leaves], dist.group.WORLD, seq_dim=1, rows=rows, async_op=async_op
            )
            out = out.wait() if async_op else out
            torch.autograd.backward(out, ups[rank])
        for i, (x, y, leaf) in enumerate(zip(whole, out, leaves, strict=True)):
            assert y.is_contiguous() and torch.equal(y, taken(x, rows[rank]))
            full = x.clone().requires_grad_()
            sum((taken(full, r) * ups[p][i]).sum() for p, r in enumerate(rows)).backward()
            assert full.grad is not None
            assert_close(leaf.grad.mT, full.grad[:, rank * L : (rank + 1) * L], kind="grad")

        others = [p for p in range(P) if p != rank]
        out_rows = [lengths(rank, p) for p in others]
        in_rows = [lengths(p, rank) for p in others]
        messages = sum(n > 0 for n in [*out_rows, *in_rows])
        expected = (messages, (sum(out_rows) + sum(in_rows)) * 2 * 3 * 7 * 8)
        seen = (counted.count("p2p"), counted.bytes("p2p"))
        assert seen == (sent.count("p2p"), sent.bytes("p2p")) == expected

    ranks(P).run(on)


def test_dtypes_travel_apart_and_inputs_without_gradient_get_none() -> None:
    """One tensor of two wants a gradient: only its rows go back."""

    def on(rank: int) -> None:
        a = torch.full((1, L), float(rank), requires_grad=True)
        b = torch.full((1, L), float(rank), dtype=torch.bfloat16)
        with traffic() as sent:
            x, y = fetch_rows([a, b], dist.group.WORLD, seq_dim=1, rows=windows(3, 2, 0))
            x.sum().backward()
        assert y.dtype == torch.bfloat16 and not y.requires_grad
        assert torch.equal(x.detach().bfloat16(), y)
        out = [] if rank == 2 else [8, 4]
        back = [] if rank == 0 else [8]
        assert [r.bytes_sent for r in sent.records] == [*out, *back]
        extra = 0.0 if rank == 2 else 1.0
        assert torch.equal(a.grad, torch.tensor([[1.0] * 3 + [1.0 + extra] * 2]))

    ranks(3).run(on)


def test_second_derivatives_and_a_graph_walked_twice() -> None:
    """The move is linear: its mirror's mirror is itself."""

    def on(rank: int) -> None:
        x = randn(1, L, 2, seed=rank, requires_grad=True)
        y = fetch_rows(x, dist.group.WORLD, seq_dim=1, rows=windows(2, 2, 0))
        (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        first.sum().backward()
        shared = torch.ones(1, L, 2, dtype=torch.float64)
        shared[:, 3:] += 1.0 - rank
        assert_close(x.grad, 6 * x.detach() * shared, kind="grad")

    ranks(2).run(on)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[(0, 5)]], "rows \\(1 entries\\) must have an entry for each of 2 ranks"),
        ([[(0, 5)], [(3, 6), (5, 9)]], "rows\\[1\\].*ascending, disjoint"),
        ([[(0, 5)], [(3, 11)]], "of the 10 rows of all shards"),
        ([[(0, 5)], [(4, 4)]], "ascending, disjoint"),
    ],
)
def test_rows_that_no_shard_has_are_refused_before_anything_is_sent(
    rows: list[Ranges], message: str
) -> None:
    """The table is the same on all ranks, and so is its error."""

    def on(rank: int) -> None:
        with traffic() as sent, pytest.raises(ValueError, match=f"fetch_rows: .*{message}"):
            fetch_rows(torch.zeros(1, L), dist.group.WORLD, seq_dim=1, rows=rows)
        assert sent.count() == 0

    ranks(2).run(on)
