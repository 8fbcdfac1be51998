"""What every rank of ``hp-tune profile`` runs; rank 0 answers with what all of them found."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hp_tune.profile.collectives import measure_collectives
from hp_tune.profile.compute import measure_compute
from hp_tune.profile.host import measure_host
from hp_tune.profile.overlap import measure_overlap
from hp_tune.profile.shapes import cp_shapes
from hp_tune.profile.timing import Clock
from hp_tune.torchrun.worker import answer, report, request

__all__: list[str] = []

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def main() -> None:
    """Measure, and answer."""
    # comparing the ranks in each call is for debugging, and a message of its own
    os.environ.setdefault("HP_PREFLIGHT", "first")
    asked = request()
    kind, _, transport = str(asked["backend"]).partition("-")
    if kind == "npu":
        import_module("torch_npu")  # registers the device
    device = torch.device("cpu" if kind == "cpu" else f"{kind}:{os.environ['LOCAL_RANK']}")
    if kind != "cpu":
        torch.get_device_module(device).set_device(device)
    dist.init_process_group(transport, timeout=timedelta(seconds=300))
    host_too = kind == "cpu" and dist.get_world_size() > 1
    watch = _Watch(
        ["collectives", "products, copies, attention", *["host"] * host_too], asked["rounds"]
    )
    clock = Clock(device, watch.after_round)
    places = _places()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = max(1, (cores or 1) // torch.get_num_threads())
    world = dist.get_world_size()
    nproc = int(os.environ["LOCAL_WORLD_SIZE"])
    collectives = measure_collectives(
        clock,
        cp_shapes(world, nproc),
        smallest=asked["smallest"],
        largest=asked["largest"],
        rounds=asked["rounds"],
        cores=cores,
    )
    compute = measure_compute(
        clock,
        DTYPES[asked["dtype"]],
        lengths=asked["lengths"],
        copied=asked["copied"],
        gemm=asked["gemm"],
        rounds=asked["rounds"],
    )
    host = measure_host(clock, rounds=asked["rounds"]) if kind == "cpu" else []
    found = {
        "backend": asked["backend"],
        "dtype": asked["dtype"],
        "world_size": world,
        "nproc_per_node": nproc,
        "places": places,
        "cores": cores if kind == "cpu" else None,
        "device": _device_name(device),
        "memory_GiB": _memory(device) / 2**30,
        "torch": torch.__version__,
        "time": time.strftime("%Y-%m-%d", time.gmtime()),
        "collectives": collectives,
        "compute": compute,
        "host": host,
        "overlap": measure_overlap(
            clock,
            DTYPES[asked["dtype"]],
            gemm=asked["gemm"] // 2,
            sent=asked["largest"] // 4,
            rounds=asked["rounds"],
        ),
    }
    if dist.get_rank() == 0:
        answer(found)
    dist.destroy_process_group()


class _Watch:
    """Reports rounds, as rank 0, under the names of what is measured one after another."""

    def __init__(self, names: list[str], rounds: int) -> None:
        self._names, self._each = names, rounds + 1  # the first one of each does not count
        self._done = 0
        self.show()

    def after_round(self) -> None:
        """Count a round."""
        self._done += 1
        self.show()

    def show(self) -> None:
        """Say what is measured now."""
        if dist.get_rank() == 0:
            now = [*self._names, "overlap"][self._done // self._each]
            report(now, self._done, len(self._names) * self._each)


def _places() -> list[str]:
    """Return the machine of each rank: two network namespaces of one machine are one place."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    place = boot.read_text().strip() if boot.is_file() else socket.gethostname()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, place)
    return [str(one) for one in found]


def _device_name(device: torch.device) -> str:
    if device.type != "cpu":
        return str(torch.get_device_module(device).get_device_name())
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else "CPU"


def _memory(device: torch.device) -> float:
    """Return the bytes that a rank can use: of its device, or its share of the machine's."""
    if device.type != "cpu":
        return float(torch.get_device_module(device).mem_get_info()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / dist.get_world_size()


if __name__ == "__main__":
    main()
