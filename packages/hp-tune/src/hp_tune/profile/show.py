"""Print what ``hp-tune profile`` and ``hp-tune import`` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hp_tune.clusters.cluster import Cluster
from hp_tune.clusters.collective_times import CollectiveTimes
from hp_tune.cost.cores import stretch
from hp_tune.printing.tables import new_console, new_table, print_json

__all__ = ["show"]


def show(cluster: Cluster, found: Mapping[str, Any], path: Path, *, as_json: bool) -> None:
    """Print the collectives as a table, and how to use the file; or all of it as JSON."""
    if as_json:
        described = cluster.model_dump(mode="json", exclude_none=True)
        print_json({"path": str(path), "cluster": described, "found": dict(found)})
        return
    console = new_console()
    table = new_table("collective", "ranks", "stride", "MiB sent: ms", "GB/s", "cores busy")
    for times in cluster.collectives:
        size, ms = times.points[-1]
        busy = "" if times.cpu is None else f"{times.cpu:.0%}"
        rate = f"{size * 2**20 / ms / 1e6:.3g}"
        table.add_row(times.kind, str(times.size), str(times.stride), _few(times), rate, busy)
    console.print(table)
    for line in _notes(cluster):
        console.print(line, soft_wrap=True)
    console.print(f"wrote {path}  (hp-tune search --cluster {path})", soft_wrap=True)


def _few(times: CollectiveTimes) -> str:
    """Return the first, the middle and the last point."""
    points = times.points
    chosen = dict.fromkeys((0, len(points) // 2, len(points) - 1))
    return "  ".join(f"{points[at][0]:.3g}: {points[at][1]:.3g}" for at in chosen)


def _notes(cluster: Cluster) -> list[str]:
    device = cluster.device
    peaks = ", ".join(f"{peak.value:.3g} {dtype}" for dtype, peak in device.peak_TFLOPS.items())
    backward = 2.5 if device.attention_backward is None else device.attention_backward.value
    found = [
        f"device   {device.name}: {peaks} TFLOPS, products {device.gemm_efficiency.value:.0%}, "
        f"attention {device.attention_efficiency.value:.0%} of it, backward {backward:.3g} x",
        f"copies   {device.memory_GBps.value * device.memory_efficiency.value:.3g} GB/s, "
        f"launch {device.launch_us.value:.3g} us",
    ]
    world = max((times.world_size for times in cluster.collectives), default=1)
    if cluster.shared_cores is not None and stretch(cluster, world) > 1:
        found.append(
            f"cores    ranks share {cluster.shared_cores}: causal imbalance is invisible in wall "
            "time but for the last ranks to be done"
        )
    return found
