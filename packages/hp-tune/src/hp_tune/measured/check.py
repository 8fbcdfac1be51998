"""Right and active: a configuration against the unsharded layer, and what it sent on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hp_comm.counters import traffic
from hp_tune.measured.device import Device
from hp_tune.measured.layers import (
    DTYPES,
    Cut,
    Parts,
    Step,
    expected_traffic,
    make_layer,
    make_parts,
)
from hp_tune.measured.request import JobRequest, LayerShape, StyleCall, check_length

__all__ = ["TOLERANCES", "Verdict", "check", "compare_traffic", "step_traffic"]

TOLERANCES = {"fp64": 1e-9, "fp32": 1e-4, "fp16": 2e-2, "bf16": 6e-2}
"""Largest difference from the unsharded result, over the largest entry of that result. The latter
is computed in fp32, or in fp64, from the same rounded inputs; rounding of the former adds up over
projections, attention and their backward."""

MAX_BATCH = 2


@dataclass(frozen=True)
class Verdict:
    """What a check found, the same on every rank: an empty reason is a pass."""

    outcome: str = "ok"
    reason: str = ""


def check(
    request: JobRequest, style: StyleCall, index: int, mesh: DeviceMesh, device: Device
) -> Verdict:
    """Compare one kind of layer under ``style`` with the unsharded layer, on a short sequence.

    Output and the gradients of the input and of every projection must be those of one device; a
    second step, in which asynchronous styles send ahead, must give them again and send what the
    plan describes.
    """
    seq_len = check_length(request)
    shape = request.layers[index].shortened(seq_len)
    if not shape.is_sparse:
        dtype, exact = request.dtype, "fp64" if request.dtype == "fp64" else "fp32"
    else:  # rounding changes which keys are selected: both sides in one dtype, a fine one if known
        fine = "fp32" if device.type != "npu" and request.dtype != "fp64" else request.dtype
        dtype = exact = fine
    batch = 1 if request.layout == "TND" else min(request.batch, MAX_BATCH)
    wanted = _reference(request, shape, Cut(seq_len, layout=request.layout), batch, dtype, exact,
                        device)  # fmt: skip
    rank, size = mesh.get_local_rank(), mesh.size()
    cut = Cut(seq_len, rank, size, layout=request.layout)
    like = torch.empty(0, dtype=DTYPES[dtype], device=device.device)
    parts = make_parts(request.hidden_size, shape, like, seed=1)
    step = Step(make_layer(parts, request, style, mesh), shape, cut, request.recompute)
    problem, sent = "", {}
    for turn in ("first", "second"):  # the first learns, the second sends ahead
        with traffic() as counted:
            found = _run(step, parts, request, batch, cut, like)
        sent = step_traffic(counted)
        for name, value in found.items():
            if name.startswith("d ") and name != "d input":
                dist.all_reduce(value, group=mesh.get_group())
        problem = problem or _differences(found, wanted, cut, dtype, f"{style.label}, {turn} step")
    if problem:
        return agree("wrong", problem)
    described = expected_traffic(
        shape, request, style, seq_len=seq_len, batch=batch,
        element_size=DTYPES[dtype].itemsize, rank=rank,
    )  # fmt: skip
    return compare_traffic(style, sent, described)


def step_traffic(counted: Any) -> dict[str, tuple[int, int]]:
    """Return ``{kind: (calls, bytes)}`` of what a counter saw, but for agreement on arguments."""
    return {kind: both for kind, both in counted.summary().items() if kind != "preflight"}


def compare_traffic(
    style: StyleCall, sent: Mapping[str, tuple[int, int]], described: Mapping[str, tuple[int, int]]
) -> Verdict:
    """Return ``inactive`` on all ranks if one of them did not send what its plan describes."""
    problem = ""
    if sent != described:
        problem = (
            f"{style.label} must send {_words(described)} in one layer and sent {_words(sent)}"
        )
    return agree("inactive", problem)


def agree(outcome: str, problem: str) -> Verdict:
    """Return the first rank's problem on every rank."""
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for rank, text in enumerate(problems):
        if text:
            return Verdict(outcome, f"rank {rank}: {text}")
    return Verdict()


def _reference(
    request: JobRequest, shape: LayerShape, cut: Cut, batch: int, dtype: str, exact: str,
    device: Device,
) -> dict[str, Tensor]:  # fmt: skip
    """Return output and gradients of one device, for the weights and inputs that ranks have."""
    like = torch.empty(0, dtype=DTYPES[dtype], device=device.device)
    parts = make_parts(request.hidden_size, shape, like, seed=1).to(DTYPES[exact])
    step = Step(make_layer(parts, request, None, None), shape, cut)
    return _run(step, parts, request, batch, cut, like, DTYPES[exact])


def _run(
    step: Step, parts: Parts, request: JobRequest, batch: int, cut: Cut, like: Tensor,
    exact: torch.dtype | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    whole = Cut(cut.seq_len, layout=cut.layout).shape(batch, request.hidden_size)
    generator = torch.Generator(like.device).manual_seed(2)
    x, upstream = (
        cut.take(torch.randn(whole, dtype=like.dtype, device=like.device, generator=generator))
        .to(exact or like.dtype)
        .detach()
        .clone()
        for _ in range(2)
    )
    x.requires_grad_()
    parts.zero_grad()
    out, loss = step.forward(x)
    step.backward(out, loss, upstream)
    found = {"output": out.detach(), "d input": _gradient(x)}
    if loss is not None:
        found["loss"] = loss.detach()
    return found | {f"d {name}": _gradient(p) for name, p in parts.named_parameters()}


def _gradient(leaf: Tensor) -> Tensor:
    """Return a leaf's gradient; none is one of zeros (a layer without its own indexer)."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.detach().clone()


def _differences(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], cut: Cut, dtype: str, where: str
) -> str:
    """Return the first difference beyond the tolerance of ``dtype``, in words, or nothing."""
    tolerance = TOLERANCES[dtype]
    for name, whole in wanted.items():
        expected = cut.take(whole) if name in ("output", "d input") else whole
        scale = max(float(whole.abs().max()), torch.finfo(whole.dtype).tiny)
        error = float((found[name].to(whole.dtype) - expected).abs().max()) / scale
        if not error <= tolerance:  # NaN is a difference too
            return (
                f"{where}: {name} must equal the unsharded one within {tolerance:g} of its largest "
                f"entry ({dtype}) and differs by {error:.2g}"
            )
    return ""


def _words(totals: Mapping[str, tuple[int, int]]) -> str:
    if not totals:
        return "nothing"
    return ", ".join(f"{calls} {kind} of {sent} B" for kind, (calls, sent) in totals.items())
