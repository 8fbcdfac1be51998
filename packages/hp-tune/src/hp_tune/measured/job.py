"""The job of a measured trial: ``torchrun ... -m hp_tune.measured.job REQUEST`` on every rank.

For each configuration: right (against the unsharded layer, on a short sequence), active (what was
sent is what the plan describes), warm, and then timed, all configurations in turn.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hp_comm.counters import traffic
from hp_mesh.mesh import init_device_mesh
from hp_tune.measured.check import Verdict, check, compare_traffic, step_traffic
from hp_tune.measured.device import Device
from hp_tune.measured.layers import (
    DTYPES,
    Cut,
    Step,
    expected_traffic,
    make_layer,
    make_parts,
)
from hp_tune.measured.request import JobRequest, StyleCall, check_length
from hp_tune.measured.rounds import Runner, measure
from hp_tune.torchrun.worker import answer, request

__all__ = ["main"]


class _Answer:
    """What the job has found so far; rank 0 writes it after every stage."""

    def __init__(self, asked: JobRequest) -> None:
        self.at, self.stage = 0, "start"
        self.found: list[dict[str, Any]] = [
            {"checked_len": check_length(asked)} for _ in asked.styles
        ]

    def enter(self, at: int, stage: str) -> None:
        """Say which configuration is at work on what; no rank begins, and perhaps fails, before."""
        self.at, self.stage = at, stage
        self.write()
        dist.barrier()

    def put(self, at: int, **values: Any) -> None:
        """Add to what is known of a configuration."""
        self.found[at] |= values

    def write(self, *, done: bool = False) -> None:
        """Write the answer, as rank 0."""
        if dist.get_rank() == 0:
            answer({"at": self.at, "stage": self.stage, "done": done, "configs": self.found})


def main() -> None:
    """Run the job that this process was asked to be a rank of."""
    asked = JobRequest.from_json(request())
    device = Device(os.environ["HP_TUNE_BACKEND"], int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(device.collectives)
    try:
        _run(asked, device)
    finally:
        dist.destroy_process_group()


def _run(asked: JobRequest, device: Device) -> None:
    mesh = _cp_mesh(asked, device)
    told = _Answer(asked)
    right = []
    for at, style in enumerate(asked.styles):
        told.enter(at, "check")
        verdict = _checked(asked, style, mesh, device)
        told.put(at, outcome=verdict.outcome, reason=verdict.reason)
        if verdict.outcome == "ok":
            right.append(at)
    like = torch.empty(0, dtype=DTYPES[asked.dtype], device=device.device)
    parts = [make_parts(asked.hidden_size, shape, like, seed=1) for shape in asked.layers]
    runners = {}
    for at in right:
        told.enter(at, "warm-up")
        device.watch_memory()
        runner = _runner(asked, asked.styles[at], parts, like, mesh)
        verdict, sent = _warm(asked, asked.styles[at], runner, device, mesh)
        told.put(at, outcome=verdict.outcome, reason=verdict.reason, traffic=sent)
        told.put(at, memory_bytes=_largest(device.peak_memory(), device))
        if verdict.outcome == "ok":
            runners[at] = runner
    if runners:
        told.enter(-1, "timed rounds")
        samples = measure(list(runners.values()), asked.protocol, device)
        for at, found in zip(runners, samples, strict=True):
            told.put(at, samples_ms=found.total, forward_ms=found.forward)
    told.write(done=True)


def _cp_mesh(asked: JobRequest, device: Device) -> DeviceMesh:
    """Return the CP mesh: TP ranks are neighbours, as in training, or left out."""
    world, cp, tp = dist.get_world_size(), asked.cp_size, asked.tp_size
    tp = tp if world % (cp * tp) == 0 else 1
    names = ("dp", "cp", "tp")
    mesh = init_device_mesh(device.type, (world // (cp * tp), cp, tp), mesh_dim_names=names)
    found: DeviceMesh = mesh["cp"]
    return found


def _checked(asked: JobRequest, style: StyleCall, mesh: DeviceMesh, device: Device) -> Verdict:
    for index in range(len(asked.layers)):
        verdict = check(asked, style, index, mesh, device)
        if verdict.outcome != "ok":
            return verdict
    return Verdict()


def _runner(
    asked: JobRequest, style: StyleCall, parts: list[Any], like: torch.Tensor, mesh: DeviceMesh
) -> Runner:
    cut = Cut(asked.seq_len, mesh.get_local_rank(), mesh.size(), asked.layout)
    steps = [
        Step(make_layer(own, asked, style, mesh), shape, cut, asked.recompute)
        for shape, own in zip(asked.layers, parts, strict=True)
    ]
    rows = cut.shape(asked.batch, asked.hidden_size)
    generator = torch.Generator(like.device).manual_seed(3 + cut.rank)  # ranks hold other rows
    x, upstream = (
        torch.randn(rows, dtype=like.dtype, device=like.device, generator=generator)
        for _ in range(2)
    )
    return Runner(steps, x.requires_grad_(), upstream)


def _warm(
    asked: JobRequest, style: StyleCall, runner: Runner, device: Device, mesh: DeviceMesh
) -> tuple[Verdict, dict[str, tuple[int, int]]]:
    """Run the warm-up steps, and compare what the last one sent with the plan."""
    problem = Verdict()
    sums: dict[str, tuple[int, int]] = {}
    for index, shape in enumerate(asked.layers):
        for _ in range(max(2, asked.protocol.warmup)):
            with traffic() as counted:
                runner.run(index, device)
        sent = step_traffic(counted)
        described = expected_traffic(
            shape, asked, style, seq_len=asked.seq_len, batch=asked.batch,
            element_size=DTYPES[asked.dtype].itemsize, rank=mesh.get_local_rank(),
        )  # fmt: skip
        found = compare_traffic(style, sent, described)
        problem = problem if problem.reason else found
        for kind, (calls, size) in sent.items():
            before = sums.get(kind, (0, 0))
            sums[kind] = (before[0] + calls, before[1] + size)
    return problem, sums


def _largest(number: int, device: Device) -> int:
    numbers = torch.tensor([number], device=device.device)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return int(numbers.item())


if __name__ == "__main__":
    main()
