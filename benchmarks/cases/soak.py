"""Thousands of steps of training on 4 gloo ranks: nothing may grow.

A model whose four layers are under four styles (async Ulysses behind handoffs, Hybrid, balanced
Colossal that gathers again in backward, groups of heads) trains with AdamW in float64, with what
training does besides: gradient accumulation, checkpointed steps, evaluation between steps, lengths
that change, and a forward whose backward never comes. After 20 steps its parameters must be those
of the same training in one process. Then memory, threads, open files (each process group holds
sockets) and live tensors are read at a quarter of the steps and at their end. ``--rounds 5`` is
2,000 steps.
"""

from __future__ import annotations

import gc
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hp_cp import AsyncContextParallel, ContextParallel, Handoff, init_device_mesh
from hp_mesh.testing import ranks

RANKS, BATCH, WIDTH, HEADS, KV_HEADS, SIZE = 4, 2, 24, 8, 4, 3
LENGTHS = (40, 24, 56)
STEPS_PER_ROUND = 400
COMPARED = 20
"""Steps after which the parameters are held against those of one process."""
GROWTH_MIB = 4.0
"""What the resident memory may differ by: pages of the allocator, not of a leak that has a rate."""


class Attention(nn.Module):
    """Grouped causal attention of ``[B, S, H, D]`` with marked handoffs."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * SIZE)
        self.k = nn.Linear(WIDTH, KV_HEADS * SIZE)
        self.v = nn.Linear(WIDTH, KV_HEADS * SIZE)
        self.out = nn.Linear(HEADS * SIZE, WIDTH)
        self.q_ready, self.k_ready, self.v_ready = Handoff(), Handoff(), Handoff()
        self.core = Core()

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, S, WIDTH]``."""
        q, k, v = (
            ready(project(x).unflatten(-1, (-1, SIZE)))
            for ready, project in (
                (self.q_ready, self.q), (self.k_ready, self.k), (self.v_ready, self.v)
            )
        )  # fmt: skip
        out: Tensor = x + self.out(self.core(q, k, v).flatten(2))
        return out


class Core(nn.Module):
    """What a style is applied to."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend ``[B, S, H, D]``."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)


def build() -> nn.Sequential:
    """Return the model, the same on every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*(Attention() for _ in range(4))).double()


def apply(model: nn.Sequential) -> None:
    """Put a different style on each layer."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    first, second, third, fourth = model
    AsyncContextParallel().apply(
        first.core, mesh, q_proj=first.q_ready, k_proj=first.k_ready, v_proj=first.v_ready
    )
    ContextParallel(ulysses_degree=2).apply(second.core, mesh)
    ContextParallel(ulysses_degree=1, load_balance=True, keep_kv=False).apply(third.core, mesh)
    AsyncContextParallel(ulysses_degree=1, head_groups=2).apply(fourth.core, mesh)


def batch(step: int, part: int) -> Tensor:
    """Return the whole input of a micro-batch, the same on all ranks; lengths come in turns."""
    generator = torch.Generator().manual_seed(1000 * step + part)
    length = LENGTHS[step % len(LENGTHS)]
    return torch.randn(BATCH, length, WIDTH, generator=generator, dtype=torch.float64)


def run(rounds: int) -> list[dict[str, Any]]:
    """Return one row: what grew between a quarter of the steps and their end."""
    pool = ranks(RANKS, backend="processes")
    steps = STEPS_PER_ROUND * rounds
    rows = pool.run(train, steps, timeout=6.0 * steps)
    pool.close()
    worst = {key: max(row[key] for row in rows) for key in rows[0]}
    checked = (
        worst["error after 20 steps"] < 1e-8
        and worst["MiB grown"] <= GROWTH_MIB
        and max(worst[key] for key in ("threads grown", "files grown", "tensors grown")) <= 0
    )
    return [{"case": f"{steps} steps on {RANKS} ranks", **worst, "checked": checked}]


def train(rank: int, steps: int) -> dict[str, float]:
    """Train on this rank; return what grew here."""
    torch.set_num_threads(1)
    model, alone = build(), build()
    apply(model)
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, alone))
    error, before = float("nan"), dict[str, float]()
    for step in range(steps):
        update(model, optimizer, step, rank)
        if step < COMPARED:
            update(alone, other, step, None)
        if step == COMPARED - 1:
            pairs = zip(model.parameters(), alone.parameters(), strict=True)
            error = max(float((a - b).detach().abs().max()) for a, b in pairs)
            del alone, other
        if step + 1 == max(steps // 4, COMPARED):
            before = used()
    after = used()
    grown = {f"{name} grown": after[name] - before[name] for name in after}
    return {"error after 20 steps": error, "MiB at the end": after["MiB"], **grown}


def update(
    model: nn.Sequential, optimizer: torch.optim.Optimizer, step: int, rank: int | None
) -> None:
    """Do one step with two micro-batches; ``rank`` None: on the whole sequence, in one process."""
    optimizer.zero_grad()
    with warnings.catch_warnings(action="error"):
        for part in range(2):
            x = batch(step, part)
            x = x if rank is None else x.chunk(RANKS, 1)[rank]
            again = step % 3 == 1
            y = checkpoint(model, x, use_reentrant=False) if again else model(x)
            (y.square().sum() / x.numel() / (1 if rank is None else RANKS)).backward()
        if rank is not None and step % 10 == 0:
            with torch.no_grad():
                model(x)
        if rank is not None and step % 50 == 7:
            model(x)  # whose backward never comes
    if rank is not None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
    optimizer.step()


def used() -> dict[str, float]:
    """Return what this process holds; all ranks come here at the same step."""
    dist.barrier()
    gc.collect()
    process = Path("/proc/self")
    resident = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "MiB": resident / 2**20,
        "threads": len(list((process / "task").iterdir())),
        "files": len(list((process / "fd").iterdir())),
        # the type, since `isinstance` asks lazy module attributes for their class, which warns
        "tensors": sum(issubclass(type(found), Tensor) for found in gc.get_objects()),
    }
