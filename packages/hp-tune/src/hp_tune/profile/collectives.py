"""The collectives that are timed: by kind, shape of group and size of message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hp_mesh.window import mirror_rank
from hp_tune.profile.shapes import Shape, groups_of, message_sizes
from hp_tune.profile.timing import Clock, Piece

__all__ = ["gather", "measure_collectives"]

ENOUGH_MS = 400.0
"""No larger message of a shape is measured after one that takes so long: the slope is known."""

TRAINS = ((0.5, 8), (60.0, 4))
"""Calls that are timed together, below so many ms: links let a single short message pass at once,
from a buffer that the next one finds full, and the calls of a layer follow each other."""

# torch 2.13 has new names for these and warns of the old ones, which is all that others have
gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def measure_collectives(
    clock: Clock, shapes: list[Shape], *, smallest: int, largest: int, rounds: int, cores: int
) -> list[dict[str, Any]]:
    """Return ``{kind, size, stride, points: [[bytes sent, ms, low, high], ...], cpu}`` per shape.

    ``cpu`` is the part of ``cores`` that the largest message kept busy, over all ranks;
    ``least_cpu_ms`` the processor time of a rank in the smallest.
    """
    world = dist.get_world_size()
    members = {(shape.size, shape.stride): _group(shape, world) for shape in shapes}
    pieces: dict[str, Piece] = {}
    sent: dict[str, int] = {}
    for shape in shapes:
        group = members[shape.size, shape.stride]
        for size in message_sizes(smallest, largest):
            name = f"{shape.kind} {shape.size} {shape.stride} {size}"
            run, sent[name] = _collective(shape, size, group, clock.device)
            run()  # the first call makes the connections
            ms = min(clock.longest([clock.once(Piece(run))[0]])[0] for _ in range(2))
            pieces[name] = Piece(run, next((calls for limit, calls in TRAINS if ms < limit), 1))
            if ms > ENOUGH_MS:
                break
    found = clock.measure(pieces, rounds)
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        start = f"{shape.kind} {shape.size} {shape.stride} "
        mine = [name for name in pieces if name.startswith(start)]
        last = found[mine[-1]]
        rows.append(
            {
                "kind": shape.kind,
                "size": shape.size,
                "stride": shape.stride,
                "points": [
                    [sent[name], found[name].ms, found[name].low, found[name].high] for name in mine
                ],
                "cpu": min(1.0, last.cpu_ms / (cores * last.ms)),
                "least_cpu_ms": found[mine[0]].cpu_ms / world,
            }
        )
    return rows


def _group(shape: Shape, world_size: int) -> ProcessGroup:
    """Return this rank's group of a shape; all ranks make all groups, in the same order."""
    if shape.size == world_size:
        assert dist.group.WORLD is not None, "initialised"
        return dist.group.WORLD
    mine: ProcessGroup | None = None
    for ranks in groups_of(shape, world_size):
        made = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = made
    assert mine is not None, "each rank is in one group of a shape"
    return mine


def _collective(
    shape: Shape, size: int, group: ProcessGroup, device: torch.device
) -> tuple[Callable[[], object], int]:
    """Return a call in which a rank sends about ``size`` bytes, and how many it sends."""
    peers = shape.size - 1
    if shape.kind == "p2p":
        return _swap(size, group, device), size // 4 * 4
    part = max(1, size // peers // 4)  # elements of 4 bytes for each peer
    whole = torch.zeros(part * shape.size, device=device)
    shard = torch.zeros(part, device=device)
    if shape.kind == "all_to_all":
        received = torch.zeros_like(whole)
        return lambda: dist.all_to_all_single(received, whole, group=group), part * 4 * peers
    if shape.kind == "all_gather":
        return lambda: gather(whole, shard, group=group), part * 4 * peers
    return lambda: scatter(shard, whole, group=group), part * 4 * peers


def _swap(size: int, group: ProcessGroup, device: torch.device) -> Callable[[], object]:
    """Return a swap between mirror ranks; the middle one of an odd number has no peer."""
    mine, theirs = torch.zeros(size // 4, device=device), torch.zeros(size // 4, device=device)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    peer = mirror_rank(rank, world)

    def swap() -> None:
        if peer == rank:
            return
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine, group=group, group_peer=peer),
                dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer),
            ]
        )
        for work in works:
            work.wait()

    return swap
