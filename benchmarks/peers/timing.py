"""Rounds: each times the oracle, the bare wire and every contender, in an order of its own."""

from __future__ import annotations

import functools
import gc
import os
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hp_mesh.testing import randn
from peers.adapters.registry import build, find
from peers.cases import Case, shuffled
from peers.contender import Attention
from peers.formulas import exchange_elements
from peers.kernel import attention
from peers.oracle import Shard, shard

__all__ = ["BARE", "ORACLE", "TOO_SLOW", "WIRE", "time_rounds"]

ORACLE = "oracle"
WIRE = "wire"
BARE = "bare"
TOO_SLOW = 4.0
"""Times the floor: a peer that takes longer in its second step is not worth an hour of rounds."""

Step = Callable[[], float]
"""Runs once; returns the seconds of its forward part."""


def time_rounds(
    rank: int, case: Case, names: Sequence[str], rounds: int
) -> dict[str, list[list[float]]]:
    """Return ``{name: [[wall, forward wall, main thread's CPU, process's CPU], ...]}`` by round.

    All in seconds. A peer that is `TOO_SLOW` has the one step that showed it, and no other.
    """
    rows = shard(case, rank)
    steps: dict[str, tuple[Step, str]] = {
        ORACLE: (_step(_oracle(case), _oracle_shard(case, rank)), "first"),
        WIRE: (_wire(case), "first"),
        BARE: (_bare(case, rank), "first"),
    }
    for name in names:
        steps[name] = (_step(build(name, case), rows), find(name).preflight)
    for step, preflight in steps.values():
        os.environ["HP_PREFLIGHT"] = preflight
        step()
    times: dict[str, list[list[float]]] = {name: [] for name in steps}
    slow = _too_slow({name: step for name, (step, _) in steps.items() if _is_peer(name)})
    for name, seconds in slow.items():
        times[name].append([seconds, 0.0, 0.0, 0.0])
        del steps[name]
    for number in range(rounds):
        gc.collect()
        gc.disable()  # a collection belongs to no contender
        for name in shuffled(list(steps), number):
            step, os.environ["HP_PREFLIGHT"] = steps[name]
            dist.barrier()
            process, thread, start = time.process_time(), time.thread_time(), time.perf_counter()
            forward = step()
            wall, thread = time.perf_counter() - start, time.thread_time() - thread
            times[name].append([wall, forward, thread, time.process_time() - process])
        gc.enable()
    return times


def _is_peer(name: str) -> bool:
    return name in (ORACLE, WIRE) or not (name == BARE or find(name).ours)


def _too_slow(steps: dict[str, Step]) -> dict[str, float]:
    """Return the seconds of those that take `TOO_SLOW` times the floor, alike on all ranks."""
    walls = []
    for step in steps.values():
        dist.barrier()
        start = time.perf_counter()
        step()
        walls.append(time.perf_counter() - start)
    agreed = torch.tensor(walls, dtype=torch.float64)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    seconds = dict(zip(steps, agreed.tolist(), strict=True))
    limit = TOO_SLOW * (seconds[ORACLE] + seconds[WIRE])
    return {name: wall for name, wall in seconds.items() if wall > limit}


def _step(attention_of: Attention, rows: Shard) -> Step:
    def run() -> float:
        rows.clear()
        start = time.perf_counter()
        output = attention_of(*rows.inputs)
        forward = time.perf_counter() - start
        torch.autograd.backward(output, rows.upstream)
        return forward

    return run


def _oracle(case: Case) -> Attention:
    return lambda q, k, v: attention(q, k, v, causal=case.causal)


def _oracle_shard(case: Case, rank: int) -> Shard:
    """Return what the attention of a Ulysses rank gets: all rows of its share of the heads."""
    heads = case.heads // case.ranks
    kv_heads = max(case.kv_heads // case.ranks, 1)

    def drawn(heads: int, seed: int) -> Tensor:
        shape = (case.batch, case.seq, heads, case.head_size)
        return randn(*shape, seed=seed + 10 * rank, dtype=torch.float32)

    q, k, v = (drawn(h, i).requires_grad_() for i, h in enumerate((heads, kv_heads, kv_heads)))
    return Shard((q, k, v), drawn(heads, 3))


def _wire(case: Case) -> Step:
    """Return the least that Ulysses must send, two all-to-alls each way, and nothing else."""
    exchanges = _exchanges(case)

    def run() -> float:
        start = time.perf_counter()
        for exchange in exchanges:
            exchange()
        forward = time.perf_counter() - start
        for exchange in reversed(exchanges):
            exchange()
        return forward

    return run


def _bare(case: Case, rank: int) -> Step:
    """Return the floor's two parts as one step: each rank waits for the others where Ulysses does.

    Nothing is copied and nothing fits together; what it takes above the floor is waiting.
    """
    attend, rows, (inputs, output) = _oracle(case), _oracle_shard(case, rank), _exchanges(case)

    def run() -> float:
        rows.clear()
        start = time.perf_counter()
        inputs()
        out = attend(*rows.inputs)
        output()
        forward = time.perf_counter() - start
        output()
        torch.autograd.backward(out, rows.upstream)
        inputs()
        return forward

    return run


def _exchanges(case: Case) -> list[Callable[[], object]]:
    """Return what exchanges the bytes of (q, k, v) and of the output, on buffers of its own."""
    return [
        functools.partial(dist.all_to_all_single, torch.ones(elements), torch.ones(elements))
        for elements in exchange_elements(case)
    ]
