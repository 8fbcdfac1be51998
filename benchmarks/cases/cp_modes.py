"""Every mode on 4 gloo ranks against the same attention in one process.

One round times the unsharded attention (forward and backward, one thread, the other ranks idle),
then each mode on all ranks at once; rounds are interleaved. ``ratio`` is the median over rounds of
the mode's wall time over the unsharded one's: on a machine with as many free cores as ranks its
floor is 1/4, on fewer cores 1/cores. ``wire`` is the bytes that left all ranks over the bytes that
`Plan.describe` predicts: 1.00 or the row fails.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hp_comm import traffic
from hp_cp import ContextParallel, init_device_mesh, make_plan
from hp_mesh.testing import assert_close, count_collectives, randn, ranks

RANKS, BATCH, SEQ, HEADS, HEAD_SIZE = 4, 1, 1024, 8, 64
MODES: dict[str, dict[str, Any]] = {
    "ulysses": {"ulysses_degree": None},
    "colossal": {"ulysses_degree": 1},
    "colossal, balanced": {"ulysses_degree": 1, "load_balance": True},
    "hybrid 2x2": {"ulysses_degree": 2},
}
KV_HEADS = (8, 2, 1)


class Core(nn.Module):
    """Causal attention as a model writes it, ``[B, S, H, D]``."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output, ``[B, S, H, D]``."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)


def run(rounds: int) -> list[dict[str, Any]]:
    """Return a row for each mode and number of KV heads."""
    pool = ranks(RANKS, backend="processes")
    rows = []
    for kv_heads in KV_HEADS:
        for name, options in MODES.items():
            results = pool.run(measure, options, kv_heads, rounds, timeout=600.0)
            rows.append({"case": f"{name}, heads {HEADS}:{kv_heads}", **results[0]})
    pool.close()
    return rows


def measure(rank: int, options: dict[str, Any], kv_heads: int, rounds: int) -> dict[str, Any]:
    """Check, then time one mode on this rank; every rank returns the same row."""
    torch.set_num_threads(1)
    shapes = [(BATCH, SEQ, h, HEAD_SIZE) for h in (HEADS, kv_heads, kv_heads, HEADS)]
    q, k, v, upstream = (randn(*s, seed=i, dtype=torch.float32) for i, s in enumerate(shapes))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    shards = [x.chunk(RANKS, 1)[rank].clone().requires_grad_() for x in (q, k, v)]
    core, sharded = Core(), Core()
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    ContextParallel(**options).apply(sharded, mesh)

    with traffic() as sent, count_collectives() as seen:
        output = step(sharded, shards, upstream.chunk(RANKS, 1)[rank])
    expected = step(core, whole, upstream)
    plan = make_plan(RANKS, options["ulysses_degree"], options.get("load_balance", False))
    description = plan.describe(
        num_heads=HEADS,
        num_kv_heads=kv_heads,
        seq_len=SEQ,
        head_size=HEAD_SIZE,
        batch=BATCH,
        element_size=4,
        rank=rank,
    )
    assert_close(output, expected.chunk(RANKS, 1)[rank])
    for shard, full in zip(shards, whole, strict=True):
        assert shard.grad is not None and full.grad is not None, "backward ran"
        assert_close(shard.grad, full.grad.chunk(RANKS, 1)[rank], kind="grad")
    assert sent.bytes() - sent.bytes("preflight") == seen.bytes(), "two counters, one truth"
    totals = torch.tensor([seen.bytes(), description.bytes()], dtype=torch.float64)
    dist.all_reduce(totals)

    ratios, times = [], []
    for _ in range(rounds):
        alone = timed(core, whole, upstream, on=rank == 0)
        together = timed(sharded, shards, upstream.chunk(RANKS, 1)[rank], on=True)
        ratios.append(together / alone)
        times.append(together)
    measured, predicted = totals.tolist()
    return {
        "ms": 1e3 * statistics.median(times),
        "ratio": statistics.median(ratios),
        "collectives": seen.count(),
        "wire MB": measured / 1e6,
        "wire": measured / predicted,
        "checked": measured == predicted,
    }


def step(module: nn.Module, inputs: list[Tensor], upstream: Tensor) -> Tensor:
    """Run forward and backward; return the output."""
    for x in inputs:
        x.grad = None
    output: Tensor = module(*inputs)
    output.backward(upstream)
    return output.detach()


def timed(module: nn.Module, inputs: list[Tensor], upstream: Tensor, *, on: bool) -> float:
    """Return the wall time of one step, the longest over the ranks; ranks that are off wait."""
    dist.barrier()
    start = time.perf_counter()
    if on:
        step(module, inputs, upstream)
    elapsed = torch.tensor([time.perf_counter() - start if on else 0.0], dtype=torch.float64)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return float(elapsed)
