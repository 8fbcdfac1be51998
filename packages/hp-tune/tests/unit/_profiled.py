"""An answer of ``hp-tune profile``'s ranks, made from numbers that are known."""

from __future__ import annotations

from typing import Any

from hp_tune.profile.shapes import cp_shapes

START_MS, GBPS, PEAK = 0.5, 2.0, 0.1e12
"""Start and bandwidth of every collective, and what a rank alone on a core computes per second."""
SATURATION, EFFICIENCY, BACKWARD = 300.0, 0.4, 3.0


def answer(
    world: int = 4, nproc: int = 2, cores: int | None = 2, places: str = "aaaa", **changes: Any
) -> dict[str, Any]:
    """What ranks find where everything is as the constants say, ``world / cores`` times slower."""
    slow = max(1.0, world / cores) if cores else 1.0

    def computed(flops: float, share: float = 1.0) -> float:
        return flops / (PEAK * share) * 1e3 * slow

    rows: list[dict[str, Any]] = [
        {"what": "gemm", "flops": 2 * n**3, "ms": computed(2 * n**3, share)}
        for n, share in ((128, 0.5), (256, 0.8), (512, 1.0))
    ]
    rows += [
        {"what": "copy", "bytes": 4e6, "ms": 2 * 4e6 / 8e9 * 1e3 * slow},
        {"what": "pack", "bytes": 4e6, "ms": 2 * 4e6 / 2e9 * 1e3 * slow},
        {"what": "launch", "ms": 0.01 * slow},
    ]
    for queries, keys in ((64, 64), (256, 256), (1024, 1024), (256, 1024)):
        flops = 4.0 * 4 * 64 * queries * keys
        busy = queries * 4
        row = {"rows": busy, "flops": flops}
        ms = computed(flops, EFFICIENCY * busy / (busy + SATURATION))
        rows.append({**row, "what": "attention", "ms": ms})
        rows.append({**row, "what": "attention backward", "ms": BACKWARD * ms})
    sizes = [4096 * 4**power for power in range(6)]
    collectives = [
        {
            "kind": shape.kind, "size": shape.size, "stride": shape.stride, "cpu": 0.25,
            "points": [[size, START_MS + size / GBPS / 1e6, 0.0, 0.0] for size in sizes],
        }
        for shape in cp_shapes(world, nproc)
    ]  # fmt: skip
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
        "overlap": {"alone_ms": 10.0, "beside_ms": 13.0},
        **changes,
    }
