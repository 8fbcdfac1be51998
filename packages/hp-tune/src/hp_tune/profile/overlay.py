"""Turn what the ranks found into the description of a cluster, or into a change of one.

A description without a base takes what is fastest for the peak, and what is usual for the part of
it that is achieved. A change of a known cluster keeps the vendor's peaks and says what part of them
was reached, so that a report can still say how far from the peak a term is.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from math import log
from typing import Any

from hp_tune.clusters.cluster import Cluster, Tier
from hp_tune.clusters.collective_times import CollectiveTimes
from hp_tune.cost.pairs import tiled_pairs
from hp_tune.profile.fitting import fit
from hp_tune.profile.smooth import ascending

__all__ = ["describe"]

TILES = (1, 64, 128, 256, 512, 1024)
CURVES = ("all_to_all", "all_gather", "reduce_scatter")
Found = Mapping[str, Any]


def describe(found: Found, *, name: str, base: str | None, known: Cluster | None) -> dict[str, Any]:
    """Return the content of a cluster file.

    Args:
        found: The answer of `hp_tune.profile.worker`.
        name: Of the new description.
        base: What it extends, as the file will say; None for a whole description.
        known: The cluster of that name.
    """
    ref = (
        f"hp-tune profile {found['time']}: {found['backend']}, torch {found['torch']}, "
        f"{found['world_size'] // found['nproc_per_node']} x {found['nproc_per_node']} ranks"
    )
    made: dict[str, Any] = {} if base is None else {"extends": base}
    made |= {"name": name, "description": _description(found)}
    sharing = _sharing(found)
    made |= sharing
    made["device"] = _device(found, known, ref)
    times = [
        times_of(row, found["world_size"], ref, cores=bool(sharing)) for row in found["collectives"]
    ]
    made["tiers"] = _tiers(found, known, times, ref)
    if not made["tiers"]:
        del made["tiers"]
    made["collectives"] = [entry.model_dump(mode="json", exclude_none=True) for entry in times]
    return made


def measured(value: float, ref: str) -> dict[str, Any]:
    """Return a number of a cluster file, to four digits."""
    return {"value": float(f"{value:.4g}"), "source": "measured", "ref": ref}


def times_of(row: Found, world_size: int, ref: str, *, cores: bool) -> CollectiveTimes:
    """Return the times of one shape of group, smoothed: a larger message never takes less time."""
    sizes = [point[0] / 2**20 for point in row["points"]]
    times = ascending([point[1] for point in row["points"]])
    return CollectiveTimes(
        kind=row["kind"],
        size=row["size"],
        stride=row["stride"],
        world_size=world_size,
        points=tuple(
            (float(f"{size:.6g}"), float(f"{ms:.4g}"))
            for size, ms in zip(sizes, times, strict=True)
        ),
        cpu=round(row["cpu"], 3) if cores and row.get("cpu") is not None else None,
        ref=ref,
    )


def _description(found: Found) -> str:
    hosts = found["world_size"] // found["nproc_per_node"]
    return f"{hosts} x {found['nproc_per_node']} ranks on {found['device']}, {found['backend']}"


def _sharing(found: Found) -> dict[str, int]:
    """Return the cores that ranks share, and which do: those of one machine."""
    if found["cores"] is None:
        return {}
    together = found["places"].count(found["places"][0])
    if together == found["world_size"]:
        return {"shared_cores": found["cores"]}
    return {"shared_cores": found["cores"], "shared_by": together}


def _alone(row: Found) -> float:
    """Return the ms of a row on a device of its own: processor time where ranks share cores."""
    return float(row.get("busy_ms", row["ms"]))


def _device(found: Found, known: Cluster | None, ref: str) -> dict[str, Any]:
    rows = found["compute"]["rows"]

    def rates(what: str, unit: str) -> list[float]:
        return [row[unit] / _alone(row) * 1e3 for row in rows if row["what"] == what]

    gemms = rates("gemm", "flops")
    dense, pack = 2 * rates("copy", "bytes")[0] / 1e9, 2 * rates("pack", "bytes")[0] / 1e9
    launch = next(_alone(row) for row in rows if row["what"] == "launch") * 1e3
    peak, memory, made = max(gemms), dense, dict[str, Any]()
    if known is None:
        made |= {
            "name": found["device"],
            "peak_TFLOPS": {found["dtype"]: measured(peak / 1e12, f"{ref}, largest of products")},
            "memory_GBps": measured(memory, f"{ref}, dense copy"),
            "memory_GiB": measured(found["memory_GiB"], ref),
            "comm_buffer_MiB": {
                "value": 1.0 if found["backend"] == "cpu-gloo" else 400.0,
                "source": "assumed",
                "ref": "not measured: what a communicator holds",
            },
        }
    else:
        number = known.device.peak_TFLOPS.get(found["dtype"])
        peak = peak if number is None else number.value * 1e12
        memory = known.device.memory_GBps.value
        if number is None:
            made["peak_TFLOPS"] = {
                **{key: value.model_dump() for key, value in known.device.peak_TFLOPS.items()},
                found["dtype"]: measured(peak / 1e12, f"{ref}, largest of products"),
            }
    efficiency, saturation = _attention(rows, peak)
    tile = _tile(rows, peak, efficiency, saturation)
    made |= {
        "gemm_efficiency": measured(_part(statistics.median(gemms) / peak), ref),
        "attention_efficiency": measured(_part(efficiency), ref),
        "attention_saturation": measured(saturation, ref),
        "attention_backward": measured(_backward(rows), ref),
        "attention_tile": measured(tile, f"{ref}, causal beside full"),
        "memory_efficiency": measured(_part(pack / memory), f"{ref}, heads to the front"),
        "launch_us": measured(max(0.01, launch), ref),
    }
    made |= _host(found, ref)
    overlap = found["overlap"]
    if overlap is not None:
        slower = overlap["beside_ms"] / overlap["alone_ms"] - 1
        made["overlap_slowdown"] = measured(_part(slower), ref)
    elif known is None:
        made["overlap_slowdown"] = {"value": 0.001, "source": "assumed", "ref": "one rank"}
    return made


def _host(found: Found, ref: str) -> dict[str, Any]:
    """Return what a layer, a collective and a tensor at a boundary cost the processor."""
    small = {
        (row["kind"], row["size"], row["stride"]): row["least_cpu_ms"]
        for row in found["collectives"]
    }
    rows, rest = [], []
    for row in found["host"]:
        calls = sum(count for *_, count in row["sent"])
        sent = sum(small[kind, size, stride] * count for kind, size, stride, count in row["sent"])
        rows.append((1.0, float(calls), float(row["crossings"])))
        rest.append(max(0.0, row["cpu_ms"] - sent))
    if not rows:
        return {}
    names = ("host_layer_us", "host_exchange_us", "host_tensor_us")
    fitted = fit(rows, rest)
    return {
        name: measured(max(0.01, ms * 1e3), f"{ref}, steps of {len(rows)} configurations")
        for name, ms in zip(names, fitted, strict=True)
    }


def _part(value: float) -> float:
    return min(1.0, max(0.001, value))


def _attention(rows: Sequence[Found], peak: float) -> tuple[float, float]:
    """Return efficiency and saturation: ``1 / rate = (1 + saturation / rows) / (peak x eff)``.

    A straight line through ``(1 / rows, 1 / rate)``, by least squares of the relative error.
    """
    found = [row for row in rows if row["what"] == "attention" and not row["causal"]]
    xs: list[float] = [1 / row["rows"] for row in found]
    ys: list[float] = [_alone(row) / 1e3 / row["flops"] for row in found]
    weights = [1 / y**2 for y in ys]
    total = sum(weights)
    mean_x, mean_y = (
        sum(w * value for w, value in zip(weights, values, strict=True)) / total
        for values in (xs, ys)
    )
    points = list(zip(weights, xs, ys, strict=True))
    spread = sum(w * (x - mean_x) ** 2 for w, x, _ in points)
    together = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in points)
    slope = together / spread if spread > 0 else 0.0
    intercept = mean_y - slope * mean_x
    if slope <= 0 or intercept <= 0:  # as fast with few rows: nothing to fill
        return 1 / (mean_y * peak), 1.0
    return 1 / (intercept * peak), max(1.0, slope / intercept)


def _tile(rows: Sequence[Found], peak: float, efficiency: float, saturation: float) -> int:
    """Return the tile of keys with which causal attention fits full attention best."""
    found = [row for row in rows if row["what"] == "attention" and row["causal"]]

    def misses(tile: int) -> float:
        """Sum up squares of how many times longer it took than with this tile."""
        total = 0.0
        for row in found:
            rate = peak * efficiency * row["rows"] / (row["rows"] + saturation)
            more = tiled_pairs(row["length"], tile) / tiled_pairs(row["length"], 1)
            total += log(_alone(row) / 1e3 / (row["flops"] * more / rate)) ** 2
        return total

    return min(TILES, key=misses)


def _backward(rows: Sequence[Found]) -> float:
    """Return the time of backward over that of forward, of the median shape."""
    forward = [_alone(row) for row in rows if row["what"] == "attention"]
    backward = [_alone(row) for row in rows if row["what"] == "attention backward"]
    ratios = [b / f for f, b in zip(forward, backward, strict=True)]
    return min(20.0, max(0.5, statistics.median(ratios)))


def _tiers(
    found: Found, known: Cluster | None, times: Sequence[CollectiveTimes], ref: str
) -> list[dict[str, Any]]:
    """Return the tiers that were measured: inside a host, and between hosts."""
    world, nproc = found["world_size"], found["nproc_per_node"]
    made: list[dict[str, Any]] = []
    if nproc > 1:
        inner = known.tiers[0] if known is not None else None
        made.append(_tier("host", nproc, (nproc, 1), inner, times, ref))
    if world > nproc:
        outer = None
        if known is not None:
            outer = next(
                (tier for tier in known.tiers if tier.size is None or tier.size >= world),
                known.tiers[-1],
            )
        made.append(_tier("network", None, (world // nproc, nproc), outer, times, ref))
    elif known is None and made:
        made[-1].pop("size")
    return made


def _tier(
    name: str,
    size: int | None,
    shape: tuple[int, int],
    known: Tier | None,
    times: Sequence[CollectiveTimes],
    ref: str,
) -> dict[str, Any]:
    mine = {entry.kind: entry for entry in times if (entry.size, entry.stride) == shape}
    curves = {kind: _rates(mine[kind]) for kind in CURVES if kind in mine}
    latency = min(entry.points[0][1] for entry in mine.values()) * 1e3
    made: dict[str, Any] = {"name": name if known is None else known.name}
    sharing = 1.0
    if known is None:
        best = max(rate for points in curves.values() for _, rate in points)
        if size is not None:
            made["size"] = size
        made |= {
            "kind": "switch",
            "GBps_per_rank": measured(max(0.001, best), f"{ref}, best of all collectives"),
            "efficiency": measured(1.0, ref),
        }
    else:
        sharing = known.sharing  # a curve is taken for what a rank alone would get
    made["latency_us"] = measured(max(0.01, latency), f"{ref}, shortest collective")
    for kind, points in curves.items():
        if len(points) > 1:
            made[kind] = {
                "points": [[size, float(f"{rate * sharing:.4g}")] for size, rate in points],
                "source": "measured",
                "ref": ref,
            }
    return made


def _rates(times: CollectiveTimes) -> list[tuple[float, float]]:
    """Return ``(MiB, GB/s)`` of what leaves a rank."""
    return [(size, size * 2**20 / (ms / 1e3) / 1e9) for size, ms in times.points]
