"""The collective counter sees what runs, in every spelling, with the right bytes."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from hp_mesh.testing import assert_close, count_collectives, largest_allocation, randn, ranks

P = 3
ROW = 5 * 8  # bytes of a row of five float64


def a2a(x: torch.Tensor) -> None:
    dist.all_to_all_single(torch.empty_like(x), x)


def a2a_async(x: torch.Tensor) -> None:
    work = dist.all_to_all_single(torch.empty_like(x), x, async_op=True)
    assert work is not None
    work.wait()


def a2a_list(x: torch.Tensor) -> None:
    dist.all_to_all(list(torch.empty_like(x).chunk(P)), list(x.chunk(P)))


def a2a_functional(x: torch.Tensor) -> None:
    funcol.wait_tensor(funcol.all_to_all_single(x, None, None, dist.group.WORLD))


def gather(x: torch.Tensor) -> None:
    dist.all_gather_single(x.new_empty(P * x.shape[0], x.shape[1]), x)


def gather_old_name(x: torch.Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_gather_into_tensor(x.new_empty(P * x.shape[0], x.shape[1]), x)


def gather_list(x: torch.Tensor) -> None:
    dist.all_gather([torch.empty_like(x) for _ in range(P)], x)


def gather_functional(x: torch.Tensor) -> None:
    funcol.wait_tensor(funcol.all_gather_single(x, 0, dist.group.WORLD))


def scatter(x: torch.Tensor) -> None:
    dist.reduce_scatter_single(x.new_empty(x.shape[0] // P, x.shape[1]), x)


def scatter_list(x: torch.Tensor) -> None:
    dist.reduce_scatter(x.new_empty(x.shape[0] // P, x.shape[1]), list(x.chunk(P)))


def scatter_functional(x: torch.Tensor) -> None:
    funcol.wait_tensor(funcol.reduce_scatter_single(x, "sum", 0, dist.group.WORLD))


def reduce(x: torch.Tensor) -> None:
    dist.all_reduce(x)


def reduce_functional(x: torch.Tensor) -> None:
    funcol.wait_tensor(funcol.all_reduce(x, "sum", dist.group.WORLD))


def ring(x: torch.Tensor) -> None:
    rank = dist.get_rank()
    received = dist.irecv(torch.empty_like(x), (rank - 1) % P)
    sent = dist.isend(x, (rank + 1) % P)
    assert received is not None and sent is not None
    received.wait()
    sent.wait()


def ring_batched(x: torch.Tensor) -> None:
    rank = dist.get_rank()
    ops = [
        dist.P2POp(dist.isend, x, (rank + 1) % P),
        dist.P2POp(dist.irecv, torch.empty_like(x), (rank - 1) % P),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


@pytest.mark.parametrize(
    ("call", "kind", "sent"),
    [
        (a2a, "all_to_all", 4 * ROW),
        (a2a_async, "all_to_all", 4 * ROW),
        (a2a_list, "all_to_all", 4 * ROW),
        (a2a_functional, "all_to_all", 4 * ROW),
        (gather, "all_gather", 12 * ROW),
        (gather_old_name, "all_gather", 12 * ROW),
        (gather_list, "all_gather", 12 * ROW),
        (gather_functional, "all_gather", 12 * ROW),
        (scatter, "reduce_scatter", 4 * ROW),
        (scatter_list, "reduce_scatter", 4 * ROW),
        (scatter_functional, "reduce_scatter", 4 * ROW),
        (reduce, "all_reduce", 8 * ROW),
        (reduce_functional, "all_reduce", 8 * ROW),
        (ring, "p2p", 6 * ROW),
        (ring_batched, "p2p", 6 * ROW),
    ],
)
def test_each_spelling_is_seen_once_with_its_bytes(
    call: Callable[[torch.Tensor], None], kind: str, sent: int
) -> None:
    def counted(rank: int) -> count_collectives:
        with count_collectives() as seen:
            call(randn(6, 5, seed=rank))
        return seen

    for seen in ranks(P).run(counted):
        assert seen.summary() == {kind: 1}
        assert seen.bytes(kind) == seen.bytes() == sent
        (record,) = seen.records
        assert (record.dtype, record.group_size) == (torch.float64, P)
        assert record.ranks == (0, 1, 2)


def test_uneven_splits_leave_out_what_stays() -> None:
    def counted(rank: int) -> int:
        send = [1, 2, 3]
        receive = [send[rank]] * P
        with count_collectives() as seen:
            x = randn(6, 5)
            dist.all_to_all_single(x.new_empty(sum(receive), 5), x, receive, send)
        return seen.bytes("all_to_all")

    assert ranks(P).run(counted) == [5 * ROW, 4 * ROW, 3 * ROW]


def test_backward_is_counted_by_the_same_block() -> None:
    def counted(rank: int) -> dict[str, int]:
        x = randn(6, 5, requires_grad=True)
        with count_collectives() as seen:
            funcol.all_gather_single_autograd(x, 0, dist.group.WORLD).sum().backward()
        return seen.summary()

    assert ranks(P).run(counted) == [{"all_gather": 1, "reduce_scatter": 1}] * P


def test_an_all_gather_of_bytes_is_the_preflight() -> None:
    def counted(rank: int) -> tuple[dict[str, int], int, int]:
        with count_collectives() as seen:
            header = torch.zeros(16, dtype=torch.uint8)
            dist.all_gather_single(header.new_empty(16 * P), header)
        return seen.summary(), seen.count("preflight"), seen.bytes("preflight")

    assert ranks(P).run(counted) == [({}, 1, 32)] * P


def test_only_the_root_sends_a_broadcast() -> None:
    def counted(rank: int) -> int:
        with count_collectives() as seen:
            dist.broadcast(randn(2, 5), src=1)
            dist.barrier()
        assert seen.summary() == {"barrier": 1, "broadcast": 1}
        return seen.bytes()

    assert ranks(P).run(counted) == [0, 4 * ROW, 0]


def test_dtensor_and_fsdp_are_seen() -> None:
    def counted(rank: int) -> tuple[dict[str, int], dict[str, int]]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("p",))
        d = DTensor.from_local(randn(2, 5), mesh, [Shard(0)], run_check=False)
        with count_collectives() as by_dtensor:
            d.redistribute(placements=[Replicate()]).to_local().sum()
        layer = torch.nn.Linear(4, 4)
        fully_shard(layer, mesh=mesh)
        with count_collectives() as by_fsdp:
            layer(torch.ones(1, 4)).sum().backward()
        return by_dtensor.summary(), by_fsdp.summary()

    dtensor, fsdp = ranks(2).run(counted)[0]
    assert dtensor == {"all_gather": 1}
    assert fsdp == {"all_gather": 1, "reduce_scatter": 1}, "the root keeps what it gathered"


def test_what_dtensor_does_inside_an_operator_is_seen() -> None:
    """A matmul of two row-sharded matrices must gather one of them: both tools see it."""
    a, b = randn(6, 10), randn(10, 4, seed=1)

    def counted(rank: int) -> tuple[dict[str, int], int, torch.Tensor]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("p",))
        da = DTensor.from_local(a.chunk(2)[rank], mesh, [Shard(0)], run_check=False)
        db = DTensor.from_local(b.chunk(2)[rank], mesh, [Shard(0)], run_check=False)
        with count_collectives() as seen, largest_allocation() as memory:
            product = da @ db
        return seen.summary(), memory.largest, product.full_tensor()

    for summary, largest, product in ranks(2).run(counted):
        assert summary == {"all_gather": 1}
        assert largest in (a.numel() * 8, b.numel() * 8)
        assert_close(product, a @ b)


def test_collectives_inside_a_custom_operator_are_seen() -> None:
    @torch.library.custom_op("hp_mesh_test::sum_over_ranks", mutates_args=())
    def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y

    def counted(rank: int) -> tuple[dict[str, int], int]:
        with count_collectives() as seen:
            total = sum_over_ranks(torch.tensor([rank + 1]))
        return seen.summary(), int(total)

    assert ranks(3).run(counted) == [({"all_reduce": 1}, 6)] * 3


def test_threads_count_apart_and_subgroups_tell_their_ranks() -> None:
    def counted(rank: int) -> tuple[int, list[tuple[int, ...]]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        with count_collectives() as seen:
            for _ in range(1 + mesh.get_local_rank("a")):
                dist.all_reduce(torch.ones(3), group=mesh.get_group("b"))
        return seen.count(), [record.ranks for record in seen.records]

    assert ranks(4).run(counted) == [
        (1, [(0, 1)]),
        (1, [(0, 1)]),
        (2, [(2, 3)] * 2),
        (2, [(2, 3)] * 2),
    ]
