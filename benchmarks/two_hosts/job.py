"""What every rank runs: check each mode, then time modes and pieces in interleaved rounds.

Rank 0 writes what it found to a file, one JSON document; `run.py` makes the table of it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import wires
from block import FAMILIES, Block, Mode, Sizes, build, local_pieces, step
from rig import rate_command
from schedule import wires_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hp_comm import traffic
from hp_cp import init_device_mesh, make_plan
from hp_mesh.mesh import split_cp_mesh
from hp_mesh.testing import assert_close, randn

Found = dict[str, Any]


def main(config: Found) -> None:
    """Measure every family at every rate."""
    # the default on gloo, comparing in each call, is for debugging: it waits, also behind a launch
    os.environ.setdefault("HP_PREFLIGHT", "first")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    split_cp_mesh(mesh, 2)
    wires.let_transport_run_first()
    sizes = Sizes(**config["sizes"])
    set_rate(config["rates"][-1])
    emulate = config["emulate"]
    reference = Reference(sizes)
    x, upstream = reference.x, reference.upstream
    if emulate:  # its projections keep the width
        shape = (1, sizes.seq // mesh.size(), sizes.width)
        x, upstream = torch.zeros(*shape, requires_grad=True), torch.zeros(*shape)
    found = []
    for family in config["families"]:
        modes = [Mode(family, "sync"), Mode(family, "async")]
        modes += [Mode(family, "groups", count) for count in config["groups"]]
        checks = {
            mode: check(mode, build(mode, sizes, mesh, emulate=False), reference) for mode in modes
        }
        steps = {
            mode: partial(step, build(mode, sizes, mesh, emulate=emulate), x, upstream)
            for mode in modes
        }
        compute = local_pieces(family, sizes, mesh, (1, *config["groups"]), emulate=emulate)
        transfers = transfers_of(family, modes, sizes, mesh)
        for rate in config["rates"]:
            say(f"{family} at {rate:g} mbit")
            set_rate(rate)
            times, pieces, cpu = measure(steps, compute, transfers, config["rounds"])
            for mode in modes:
                row = {"family": family, "rate": rate, "kind": mode.kind, "groups": mode.groups}
                row |= {"name": mode.name, **checks[mode], **times[mode], "pieces": pieces}
                row |= {"wire_cpu": cpu, "timeline": timeline(steps[mode])}
                found.append(row)
    if dist.get_rank() == 0:
        Path(config["result"]).write_text(json.dumps(found))
    dist.destroy_process_group()


def say(text: str) -> None:
    """Print once, not once a rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def set_rate(mbit: float) -> None:
    """Set the rate of the link, on both hosts, while nothing is sent."""
    dist.barrier()
    if os.environ["LOCAL_RANK"] == "0":
        subprocess.run(rate_command(mbit), check=True, timeout=30)
    dist.barrier()


class Reference:
    """The block in one process, and this rank's part of what goes in and must come out."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        size = dist.get_world_size()
        x, upstream = (
            randn(1, sizes.seq, sizes.hidden, seed=seed, dtype=torch.float32) for seed in (7, 8)
        )
        block = Block(sizes)
        x.requires_grad_()
        output = step(block, x, upstream)
        assert x.grad is not None, "backward ran"

        def shard(whole: Tensor) -> Tensor:
            return whole.chunk(size, 1)[dist.get_rank()].detach().clone()

        self.x, self.upstream = shard(x).requires_grad_(), shard(upstream)
        self.output, self.grad = shard(output), shard(x.grad)
        self.weights = [weight.grad for weight in block.parameters()]


def check(mode: Mode, block: Block, reference: Reference) -> Found:
    """Compare output, all gradients and bytes; the second step, since async learns in the first."""
    step(block, reference.x, reference.upstream)
    with traffic() as sent:
        output = step(block, reference.x, reference.upstream)
    assert_close(output, reference.output)
    assert reference.x.grad is not None, "backward ran"
    assert_close(reference.x.grad, reference.grad, kind="grad")
    for weight, expected in zip(block.parameters(), reference.weights, strict=True):
        assert weight.grad is not None and expected is not None, "backward ran"
        total = weight.grad.clone()
        dist.all_reduce(total)
        assert_close(total, expected, kind="grad")
    sizes = reference.sizes
    predicted = make_plan(dist.get_world_size(), FAMILIES[mode.family]).describe(
        num_heads=sizes.heads,
        num_kv_heads=sizes.heads,
        seq_len=sizes.seq,
        head_size=sizes.head_size,
        element_size=4,
        rank=dist.get_rank(),
        head_groups=mode.groups,
    )
    totals = torch.tensor([sent.bytes(), predicted.bytes()], dtype=torch.float64)
    dist.all_reduce(totals)
    return {"bytes": float(totals[0]), "checked": bool(totals[0] == totals[1])}


def timed(work: Callable[[], object]) -> float:
    """Return the ms of ``work``, started on all ranks together, of the rank that took longest."""
    dist.barrier()
    start = time.perf_counter()
    work()
    return worst(1e3 * (time.perf_counter() - start))


def worst(value: float) -> float:
    """Return the largest value over the ranks."""
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def measure(
    steps: Mapping[Mode, Callable[[], object]],
    compute: dict[str, tuple[Callable[[], Tensor], Tensor]],
    transfers: dict[str, Callable[[], None]],
    rounds: int,
) -> tuple[dict[Mode, Found], dict[str, float], dict[str, float]]:
    """Time steps as they are and with the wires cut, and all pieces, round after round.

    Returns:
        Of each mode the walls of all rounds; the median ms of each piece; and of each transfer the
        CPU ms of all ranks.
    """
    walls: dict[Mode, list[float]] = {mode: [] for mode in steps}
    alone: dict[Mode, list[float]] = {mode: [] for mode in steps}
    pieces: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for mode, one_step in steps.items():
            for collected, wire in ((walls[mode], nullcontext()), (alone[mode], wires.cut())):
                with wire:
                    collected.append(timed(one_step))
        for name, (forward, gradient) in compute.items():
            outputs: list[Tensor] = []
            stem, _, count = name.partition("/")
            count = count and f"/{count}"
            with wires.cut():
                ms = timed(lambda: outputs.append(forward()))  # noqa: B023
                pieces.setdefault(f"{stem} forward{count}", []).append(ms)
                ms = timed(lambda: outputs.pop().backward(gradient))  # noqa: B023
                pieces.setdefault(f"{stem} backward{count}", []).append(ms)
        for name, transfer in transfers.items():
            before = time.process_time()
            pieces.setdefault(name, []).append(timed(transfer) / wires.TRAIN)
            ms = 1e3 * (time.process_time() - before) / wires.TRAIN
            used = torch.tensor(ms, dtype=torch.float64)
            dist.all_reduce(used)
            cpu.setdefault(name, []).append(float(used))
        if number == 0:  # warm-up
            for rows in (walls, alone, pieces, cpu):
                for row in rows.values():
                    row.clear()
    return (
        {mode: {"walls": walls[mode], "alone": alone[mode]} for mode in steps},
        {name: statistics.median(values) for name, values in pieces.items()},
        {name: statistics.median(values) for name, values in cpu.items()},
    )


def transfers_of(
    family: str, modes: list[Mode], sizes: Sizes, mesh: DeviceMesh
) -> dict[str, Callable[[], None]]:
    """Return the bare transfers of all modes, by piece."""
    shard = sizes.seq * sizes.heads * sizes.head_size // mesh.size()
    found: dict[str, Callable[[], None]] = {}
    for mode in modes:
        for name in wires_of(family, mode.kind, mode.groups):
            piece, elements, group = name.split("/")[0], shard // mode.groups, mesh.get_group()
            if family == "hybrid":
                group = split_cp_mesh(mesh, 2).get_group(1 if piece.startswith("swap") else 0)
            found[name] = wires.bare(piece, elements, group)
    return found


def timeline(one_step: Callable[[], object]) -> list[Found]:
    """Return the collectives of one step as rank 0 saw them, in ms from its start."""
    one_step()
    dist.barrier()
    start = time.perf_counter()
    with wires.watched() as events:
        one_step()
    end = 1e3 * (time.perf_counter() - start)
    moments = ("launch", "done", "wait", "end")
    rows = [
        {"kind": event.kind, "bytes": event.size}
        | {moment: 1e3 * (getattr(event, moment) - start) for moment in moments}
        for event in events
    ]
    return [
        *rows,
        {"kind": "step", "bytes": 0, "launch": 0.0, "done": end, "wait": end, "end": end},
    ]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
