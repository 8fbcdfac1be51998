"""How much slower kernels are while a collective runs."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from hp_tune.profile.collectives import gather
from hp_tune.profile.timing import Clock, Piece

__all__ = ["measure_overlap"]


def measure_overlap(
    clock: Clock, dtype: torch.dtype, *, gemm: int, sent: int, rounds: int
) -> dict[str, float] | None:
    """Return the ms of products alone and beside a gather that outlasts them; None for one rank.

    Args:
        clock: Of this rank.
        dtype: Of the products.
        gemm: Their rows and columns.
        sent: Bytes that each rank sends in the gather.
        rounds: Timed rounds, after one that does not count.
    """
    if dist.get_world_size() == 1:
        return None
    a, b = (torch.randn(gemm, gemm, dtype=dtype, device=clock.device) for _ in range(2))
    shard = torch.zeros(max(1, sent // 4 // (dist.get_world_size() - 1)), device=clock.device)
    whole = torch.zeros(shard.numel() * dist.get_world_size(), device=clock.device)
    product, send = Piece(lambda: a @ b), Piece(lambda: gather(whole, shard))
    for piece in (product, send):
        clock.once(piece)
    one, all_of_it = clock.longest([clock.once(product)[0], clock.once(send)[0]])
    count = max(1, int(all_of_it / max(one, 1e-3) / 2))

    def products() -> None:
        for _ in range(count):
            a @ b

    alone: list[float] = []
    beside: list[float] = []
    for _ in range(rounds + 1):
        alone.append(clock.once(Piece(products))[0])
        dist.barrier()
        start = time.perf_counter()
        work = gather(whole, shard, async_op=True)
        products()
        clock.finish_kernels()
        beside.append(1e3 * (time.perf_counter() - start))
        work.wait()
        clock.synchronize()
    found = clock.longest([statistics.median(alone[1:]), statistics.median(beside[1:])])
    return {"alone_ms": found[0], "beside_ms": found[1]}
