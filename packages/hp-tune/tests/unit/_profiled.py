"""An answer of ``hp-tune profile``'s ranks, made from numbers that are known."""

from __future__ import annotations

from typing import Any

from hp_tune.cost.pairs import tiled_pairs
from hp_tune.profile.shapes import cp_shapes

START_MS, GBPS, PEAK = 0.5, 2.0, 0.1e12
SMALL_MS, LAYER_MS, EXCHANGE_MS, TENSOR_MS = 0.3, 2.0, 0.4, 0.15
"""Start and bandwidth of every collective, and what a rank alone on a core computes per second."""
SATURATION, EFFICIENCY, BACKWARD, TILE = 300.0, 0.4, 3.0, 128


def answer(
    world: int = 4, nproc: int = 2, cores: int | None = 2, places: str = "aaaa", **changes: Any
) -> dict[str, Any]:
    """What ranks find where everything is as the constants say, ``world / cores`` times slower."""
    slow = max(1.0, world / cores) if cores else 1.0
    rows: list[dict[str, Any]] = []

    def add(what: str, alone_ms: float, **row: Any) -> None:
        times = {"ms": alone_ms * slow} | ({"busy_ms": alone_ms} if cores else {})
        rows.append({"what": what, **row, **times})

    for n, share in ((128, 0.5), (256, 0.8), (512, 1.0)):
        add("gemm", 2 * n**3 / (PEAK * share) * 1e3, flops=2 * n**3)
    add("copy", 2 * 4e6 / 8e9 * 1e3, bytes=4e6)
    add("pack", 2 * 4e6 / 2e9 * 1e3, bytes=4e6)
    add("launch", 0.01)
    for queries, keys, causal in (
        (64, 64, False), (256, 1024, False), (1024, 1024, False),
        (128, 128, True), (512, 512, True), (1024, 1024, True),
    ):  # fmt: skip
        pairs = tiled_pairs(queries, 1) if causal else queries * keys
        computed = tiled_pairs(queries, TILE) if causal else pairs
        busy, flop = queries * 4, 4.0 * 4 * 64
        ms = flop * computed / (PEAK * EFFICIENCY * busy / (busy + SATURATION)) * 1e3
        row = {"rows": busy, "length": queries, "flops": flop * pairs, "causal": causal}
        add("attention", ms, **row)
        add("attention backward", BACKWARD * ms, **row)
    sizes = [4096 * 4**power for power in range(6)]
    collectives = [
        {
            "kind": shape.kind, "size": shape.size, "stride": shape.stride, "cpu": 0.25,
            "least_cpu_ms": SMALL_MS,
            "points": [[size, START_MS + size / GBPS / 1e6, 0.0, 0.0] for size in sizes],
        }
        for shape in cp_shapes(world, nproc)
    ]  # fmt: skip
    host = [
        {
            "name": name,
            "sent": [["all_gather", world, 1, calls]],
            "crossings": tensors,
            "cpu_ms": LAYER_MS + (EXCHANGE_MS + SMALL_MS) * calls + TENSOR_MS * tensors,
        }
        for name, calls, tensors in (("a", 4, 8), ("b", 8, 8), ("c", 8, 14), ("d", 4, 14))
    ]
    return {
        "backend": "cpu-gloo",
        "dtype": "fp32",
        "world_size": world,
        "nproc_per_node": nproc,
        "places": list(places),
        "cores": cores,
        "device": "Some CPU",
        "memory_GiB": 4.0,
        "torch": "2.13.0",
        "time": "2026-11-30",
        "collectives": collectives,
        "compute": {"dtype": "fp32", "rows": rows},
        "host": host if cores else [],
        "overlap": {"alone_ms": 10.0, "beside_ms": 13.0},
        **changes,
    }
