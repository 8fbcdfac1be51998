"""What the styles cost a processor beside collectives: steps of a layer with next to no tokens.

Where ranks run on processors, hooks, autograd and the wrapping of tensors take the time of the same
cores. A step of every configuration is measured, and `hp_tune.profile.fitting` finds what one
collective and one tensor at a boundary add.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hp_cp.plan import Plan, make_plan
from hp_mesh.mesh import init_device_mesh
from hp_tune.cost.layer import crossings
from hp_tune.measured.layers import Cut, Step, make_layer, make_parts
from hp_tune.measured.request import JobRequest, LayerShape, style_call
from hp_tune.profile.timing import Clock, Piece
from hp_tune.searching.space import enumerate_space
from hp_tune.workload import Config, Workload

__all__ = ["measure_host"]

HEAD_SIZE = 4
CALLS = 3


def measure_host(clock: Clock, *, rounds: int) -> list[dict[str, Any]]:
    """Return a row per configuration of all ranks.

    Each has ``cpu_ms`` of a step, the mean over ranks; ``sent``, the collectives of it as ``[kind,
    size, stride, calls]``; and ``crossings``, tensors that pass a boundary.
    """
    world = dist.get_world_size()
    if world == 1:
        return []
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    pieces: dict[str, Piece] = {}
    rows: list[dict[str, Any]] = []
    for config in enumerate_space(world)[0]:
        try:
            plan = make_plan(
                world,
                config.ulysses_degree,
                config.load_balance,
                balance_hybrid=config.balance_hybrid,
            )
        except ValueError:
            continue  # what the styles do not have
        label = config.label(world)
        step = _step(config, mesh)
        for _ in range(3):  # asynchronous styles learn in their first steps
            step()
        pieces[label] = Piece(step, CALLS)
        rows.append(
            {"name": label, "sent": _sent(plan, config), "crossings": 2 * crossings(config)}
        )
    found = clock.measure(pieces, rounds)
    return [{**row, "cpu_ms": found[row["name"]].cpu_ms / world} for row in rows]


def _sizes(world: int) -> dict[str, int]:
    return {"heads": 2 * world, "seq_len": 2 * world}


def _sent(plan: Plan, config: Config) -> list[list[Any]]:
    sizes = _sizes(plan.cp_size)
    described = plan.describe(
        num_heads=sizes["heads"],
        num_kv_heads=sizes["heads"],
        seq_len=sizes["seq_len"],
        head_size=HEAD_SIZE,
        overlap=config.overlap,
    )
    found = []
    for row in described.collectives:
        group = described.groups[row.axis]
        found.append([row.kind, len(group), group[1] - group[0], row.count])
    return found


def _step(config: Config, mesh: Any) -> Callable[[], object]:
    world = mesh.size()
    sizes = _sizes(world)
    workload = Workload(seq_len=sizes["seq_len"], cp_size=world, dtype="fp32")
    shape = LayerShape(
        kind="full",
        count=1,
        num_heads=sizes["heads"],
        num_kv_heads=sizes["heads"],
        head_size=HEAD_SIZE,
        v_head_size=HEAD_SIZE,
    )
    style = style_call(config, workload)
    asked = JobRequest(
        hidden_size=8,
        layers=(shape,),
        styles=(style,),
        seq_len=sizes["seq_len"],
        cp_size=world,
        tp_size=1,
        batch=1,
        dtype="fp32",
        layout="BSHD",
        causal=True,
        recompute=False,
    )
    parts = make_parts(asked.hidden_size, shape, torch.empty(0), seed=1)
    layer = make_layer(parts, asked, style, mesh)
    step = Step(layer, shape, Cut(asked.seq_len, mesh.get_local_rank(), world))
    generator = torch.Generator().manual_seed(mesh.get_local_rank())  # ranks hold other rows
    rows = (1, asked.seq_len // world, asked.hidden_size)
    x = torch.randn(rows, generator=generator, requires_grad=True)
    upstream: Tensor = torch.randn(rows, generator=generator)

    def run() -> None:
        x.grad = None
        out, loss = step.forward(x)
        step.backward(out, loss, upstream)

    return run
