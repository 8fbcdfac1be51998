"""Pools of ranks: results, errors, deadlines, and that a bad call spoils nothing."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from hp_mesh.testing import RankError, RankTimeout, assert_close, randn, ranks


def total(rank: int) -> int:
    x = torch.tensor(rank + 1)
    dist.all_reduce(x)
    return int(x)


def fail_on_one(rank: int, bad: int) -> int:
    if rank == bad:
        raise ValueError(f"rank {rank} does not like this")
    return total(rank)


def fail_on_all(rank: int) -> None:
    raise ValueError("all alike")


def double(rank: int, x: torch.Tensor, *, plus: int) -> torch.Tensor:
    return 2 * x + plus


def stay(rank: int) -> int:
    if rank == 0:
        time.sleep(600.0)
    return rank


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 16])
def test_pools_of_many_sizes_live_side_by_side(n: int) -> None:
    assert ranks(n).run(total) == [n * (n + 1) // 2] * n
    assert ranks(2).run(total) == [3, 3]


def test_a_pool_is_started_once() -> None:
    first = ranks(3).run(lambda rank: threading.get_ident())
    again = ranks(3).run(lambda rank: threading.get_ident())

    assert ranks(3) is ranks(3)
    assert first == again and len(set(first)) == 3


def test_arguments_arrive_on_every_rank() -> None:
    x = randn(3, 5)

    for result in ranks(2).run(double, x, plus=1):
        assert torch.equal(result, 2 * x + 1)


def test_run_raises_the_first_error_and_shows_every_rank() -> None:
    with pytest.raises(RankError, match="rank 2 failed first") as caught:
        ranks(3).run(fail_on_one, 2)

    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.rank == 2
    assert isinstance(caught.value.errors[2], ValueError)
    for rank in range(3):
        assert f"--- rank {rank} ---" in str(caught.value)
    assert ranks(3).run(total) == [6, 6, 6]


def test_ranks_that_wait_for_one_that_raised_are_told_soon() -> None:
    """Long before the time of the call or of the group is up."""
    errors = ranks(3).errors(fail_on_one, 1)

    assert isinstance(errors[1], ValueError)
    assert isinstance(errors[0], RankTimeout) and "all_reduce" in str(errors[0])
    assert ranks(3).run(total) == [6, 6, 6]


def test_errors_has_one_entry_per_rank_and_none_for_success() -> None:
    assert [str(error) for error in ranks(4).errors(fail_on_all)] == ["all alike"] * 4
    assert ranks(4).errors(total) == [None] * 4


def test_a_rank_that_is_slow_is_not_left_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """It works, and so it may; what it has to say is said, though another has raised long ago."""
    monkeypatch.setattr("hp_mesh.testing._threads.GRACE", 0.2)

    def work(rank: int) -> None:
        end = time.monotonic() + (rank and 1.0)
        while time.monotonic() < end:
            pass
        raise ValueError(f"rank {rank}")

    assert [str(error) for error in ranks(2).errors(work)] == ["rank 0", "rank 1"]


def test_a_rank_that_hangs_is_reported_with_its_stack_and_the_next_call_works() -> None:
    hang = threading.Event()

    def stuck(rank: int) -> int:
        if rank == 0:
            hang.wait()
        return rank

    for timeout in (0.5, 5.0, 50.0):  # until the other one has answered on a busy machine
        errors = ranks(2).errors(stuck, timeout=timeout)
        assert isinstance(errors[0], RankTimeout) and "stuck" in str(errors[0])
        if errors[1] is None:
            break
    hang.set()
    assert errors[1] is None
    assert ranks(2).run(total) == [3, 3]


def test_a_skip_inside_a_rank_skips_the_test() -> None:
    def skip(rank: int) -> None:
        pytest.skip("not today")

    with pytest.raises(pytest.skip.Exception, match="not today"):
        ranks(2).run(skip)


def test_grad_mode_is_fresh_in_every_call() -> None:
    ranks(2).run(lambda rank: torch.set_grad_enabled(False))

    assert ranks(2).run(lambda rank: torch.is_grad_enabled()) == [True, True]


def test_groups_end_with_the_call_that_made_them() -> None:
    def make(rank: int) -> tuple[int, int]:
        before = len(dist.distributed_c10d._world.pg_map)
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        return before, len(dist.distributed_c10d._world.pg_map)

    for _ in range(3):
        assert ranks(4).run(make) == [(1, 3)] * 4


def test_backward_runs_through_collectives_in_threads() -> None:
    x = randn(4, 3)

    def gather(rank: int) -> torch.Tensor:
        shard = x.chunk(2)[rank].clone().requires_grad_()
        whole = funcol.all_gather_single_autograd(shard, 0, dist.group.WORLD)
        (whole * (rank + 1)).pow(2).sum().backward()
        assert shard.grad is not None
        return shard.grad

    for rank, grad in enumerate(ranks(2).run(gather)):
        assert_close(grad, 2 * (1 + 4) * x.chunk(2)[rank], kind="grad")


def test_dtensor_with_uneven_shards_is_right_on_every_rank() -> None:
    """DTensor's process-wide caches must not serve one rank what another computed."""
    x = randn(7, 5)

    def through(rank: int) -> torch.Tensor:
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("p",))
        rows = [(0, 3), (3, 6), (6, 7)][rank]
        local = x[rows[0] : rows[1]]
        d = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=x.shape, stride=x.stride()
        )
        return d.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    for _ in range(2):
        for whole in ranks(3).run(through):
            assert torch.equal(whole, x)


def test_a_mesh_of_an_earlier_call_is_never_mistaken_for_this_one() -> None:
    """Equal meshes of two calls have other groups, so caches by mesh must tell them apart."""
    meshes = []

    def keep(rank: int) -> None:
        meshes.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))

    ranks(4).run(keep)
    ranks(4).run(keep)

    assert len(set(meshes)) == 8


@pytest.mark.parametrize("n", [0, -1, True, 2.0])
def test_a_world_size_that_is_none_is_refused(n: object) -> None:
    with pytest.raises(ValueError, match="ranks: n"):
        ranks(n)  # type: ignore[arg-type]


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r'backend \(.mpi.\) must be "threads" or "processes"'):
        ranks(2, backend="mpi")  # type: ignore[arg-type]


def own_process(rank: int) -> tuple[int, str]:
    import os

    return os.getpid(), threading.current_thread().name


def unpicklable(rank: int) -> object:
    return lambda: rank


def test_processes_run_a_function_of_a_test_file() -> None:
    pool = ranks(2, backend="processes")
    first = pool.run(own_process)

    assert len({pid for pid, _ in first}) == 2
    assert pool.run(own_process) == first, "they are kept"
    assert pool.run(total) == [3, 3]
    x = randn(2, 3)
    for result in pool.run(double, x, plus=3):
        assert torch.equal(result, 2 * x + 3)


def test_processes_report_errors_and_recover() -> None:
    pool = ranks(2, backend="processes")
    before = pool.run(own_process)

    with pytest.raises(RankError, match="failed first") as caught:
        pool.run(fail_on_all)
    assert [str(error) for error in caught.value.errors] == ["all alike"] * 2
    assert "could not be pickled" in str(pool.errors(unpicklable)[0])
    assert pool.run(total) == [3, 3]
    assert pool.run(own_process) == before, "a group is renewed, the processes stay"

    for timeout in (0.5, 5.0, 50.0):  # until the other one has answered on a busy machine
        errors = pool.errors(stay, timeout=timeout)
        assert isinstance(errors[0], RankTimeout)
        if errors[1] is None:
            break
    assert errors[1] is None
    assert pool.run(total) == [3, 3]


def test_processes_refuse_a_function_that_cannot_be_found_again() -> None:
    with pytest.raises(ValueError, match="must be a function at the top level of a file"):
        ranks(2, backend="processes").run(lambda rank: rank)


def test_groups_of_earlier_calls_are_freed_though_dtensor_keeps_their_meshes() -> None:
    """A session of a thousand tests must not end with a thousand gloo groups and their threads."""

    def use_a_new_mesh(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        x = DTensor.from_local(randn(3, 4), mesh, [Shard(0), Replicate()], run_check=False)
        (x * 2).sum()

    def threads_after(calls: int) -> int:
        for _ in range(calls):
            ranks(4).run(use_a_new_mesh)
        return len(list(tasks.iterdir()))

    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        pytest.skip("threads are counted in /proc, which this system has not")
    before = threads_after(2)
    # those of earlier tests may be about to end: there can only be fewer
    assert any(threads_after(4) <= before for _ in range(5))
