"""DSA's operators against their reference, and one layer on gloo ranks.

Rounds are interleaved; ``speedup`` is the median over rounds of the reference's time over the
operator's. On a CPU that is the time of its one thread, which other programs do not stretch as they
do the time on the wall. A row passes when its results agree with the reference's and it keeps its
limits: the indexer at 4096 tokens, 8 heads, K 512 has to stay below 0.15 GiB and be 3 times as
fast.

On a CPU a layer runs on ranks, too: see `dsa_rows.py`.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from dsa_rows import layer_rows
from torch import Tensor

from hp_dsa import ops
from hp_mesh.testing import assert_close, peak_memory, randn

GIB = 1 << 30
HEADS, LATENT, ROPE, INDEX_SIZE, SCALE = 16, 512, 64, 128, 192**-0.5


@dataclass(frozen=True)
class Bench:
    """One operator at one size, with the limits that its row has to keep."""

    name: str
    tokens: int
    index_heads: int
    selected: int
    step: Callable[[dict[str, Any]], tuple[Tensor, ...]]
    gib: float = float("inf")
    speedup: float = 0.0


def indexer(x: dict[str, Any]) -> tuple[Tensor, ...]:
    """Select; the scores are compared, in descending order, since near ties may swap."""
    return (
        ops.lightning_indexer(
            x["qi"], x["ki"], x["w"], sparse_count=x["K"], return_value=True
        )[1],
    )  # fmt: skip


def attention(x: dict[str, Any]) -> tuple[Tensor, ...]:
    """Run sparse attention forward and backward."""
    leaves = [x[name] for name in ("q", "k", "qr", "kr")]
    out, _, _ = ops.sparse_flash_attention(
        x["q"], x["k"], x["k"], x["indices"], SCALE, query_rope=x["qr"], key_rope=x["kr"]
    )
    return out.detach(), *torch.autograd.grad(out, leaves, x["upstream"])


def sparse_loss(x: dict[str, Any]) -> tuple[Tensor, ...]:
    """Compute the loss over selected keys, with gradients."""
    return ops.sparse_lightning_indexer_grad_kl_loss(
        x["q"], x["k"], x["qi"], x["ki"], x["w"], x["indices"], x["max"], x["sum"], SCALE,
        query_rope=x["qr"], key_rope=x["kr"],
    )  # fmt: skip


def dense_loss(x: dict[str, Any]) -> tuple[Tensor, ...]:
    """Compute the loss over all visible keys, with gradients; statistics of the index included."""
    statistics_of_index = ops.dense_lightning_indexer_softmax_lse(x["qi"], x["ki"], x["w"])
    return ops.dense_lightning_indexer_grad_kl_loss(
        x["q"], x["k"], x["qi"], x["ki"], x["w"], x["full max"], x["full sum"],
        *statistics_of_index, SCALE, query_rope=x["qr"], key_rope=x["kr"],
    )  # fmt: skip


BENCHES = (
    Bench("indexer", 4096, 8, 512, indexer, gib=0.15, speedup=3.0),
    Bench("attention, both ways", 1024, 8, 256, attention),
    Bench("sparse loss", 1024, 8, 256, sparse_loss),
    Bench("dense loss", 1024, 8, 256, dense_loss),
)


def run(rounds: int, device: str = "cpu") -> list[dict[str, Any]]:
    """Return a row for each operator and, on CUDA, for each implementation of it."""
    torch.set_num_threads(1)
    names = ("tiled",) if device == "cpu" else ("tiled", "triton")
    rows = [measure(bench, name, rounds, device) for bench in BENCHES for name in names]
    return rows if device != "cpu" else [*rows, *layer_rows(rounds)]


def measure(bench: Bench, name: str, rounds: int, device: str) -> dict[str, Any]:
    """Check one operator against the reference, then time both in turns."""
    x = inputs(bench, device, torch.float32)
    with using("reference"):
        expected = bench.step(x)
    with using(name):
        extra = extra_memory(bench, x, device)
        found = bench.step(x)
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, kind="grad")
    if device != "cpu":
        x = inputs(bench, device, torch.bfloat16)  # what a GPU is timed with
    times: dict[str, list[float]] = {name: [], "reference": []}
    for _ in range(rounds):
        for other, taken in times.items():
            with using(other):
                taken.append(timed(bench, x, device))
    ratios = [b / a for a, b in zip(times[name], times["reference"], strict=True)]
    speedup = statistics.median(ratios)
    return {
        "case": f"{bench.name}, {bench.tokens} tokens, K {bench.selected}, {name}",
        "ms": 1e3 * statistics.median(times[name]),
        "reference ms": 1e3 * statistics.median(times["reference"]),
        "speedup": speedup,
        "extra GiB": extra / GIB,
        "checked": extra <= bench.gib * GIB and speedup >= bench.speedup,
    }


def inputs(bench: Bench, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Draw inputs; indices and statistics come from the operators themselves."""
    S, heads = bench.tokens, bench.index_heads
    shapes: dict[str, tuple[int, ...]] = {
        "qi": (1, S, heads, INDEX_SIZE), "ki": (1, S, 1, INDEX_SIZE), "w": (1, S, heads),
    }  # fmt: skip
    needs_attention = bench.step is not indexer
    if needs_attention:
        shapes |= {
            "q": (1, S, HEADS, LATENT), "k": (1, S, 1, LATENT), "qr": (1, S, HEADS, ROPE),
            "kr": (1, S, 1, ROPE), "upstream": (1, S, HEADS, LATENT),
        }  # fmt: skip
    x: dict[str, Any] = {
        name: randn(*shape, seed=seed, dtype=dtype).to(device)
        for seed, (name, shape) in enumerate(shapes.items())
    }
    x["K"] = bench.selected
    if needs_attention:
        with torch.no_grad(), using("tiled"):
            for count, prefix in ((bench.selected, ""), (S, "full ")):
                chosen, _ = ops.lightning_indexer(x["qi"], x["ki"], x["w"], sparse_count=count)
                _, x[prefix + "max"], x[prefix + "sum"] = ops.sparse_flash_attention(
                    x["q"], x["k"], x["k"], chosen, SCALE, query_rope=x["qr"], key_rope=x["kr"],
                    return_softmax_lse=True,
                )  # fmt: skip
                x[prefix + "indices"] = chosen
        for name in ("q", "k", "qr", "kr"):
            x[name].requires_grad_()
    return x


@contextmanager
def using(name: str) -> Iterator[None]:
    """Make the operators run the implementation ``name``."""
    before = os.environ.get("HP_DSA")
    os.environ["HP_DSA"] = name
    try:
        yield
    finally:
        del os.environ["HP_DSA"]
        if before is not None:
            os.environ["HP_DSA"] = before


def extra_memory(bench: Bench, x: dict[str, Any], device: str) -> int:
    """Return the peak of one step beyond its inputs and outputs, in bytes."""
    if device == "cpu":
        with peak_memory() as memory:
            results = bench.step(x)
        peak = memory.peak
    else:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = bench.step(x)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    return peak - sum(result.nbytes for result in results)


def timed(bench: Bench, x: dict[str, Any], device: str) -> float:
    """Return the time of one step: CPU time of the one thread, on CUDA wall time."""
    if device == "cpu":
        start = time.process_time()
        bench.step(x)
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    bench.step(x)
    torch.cuda.synchronize()
    return time.perf_counter() - start
