"""Sliding windows on 8 gloo ranks: bytes fetched against a gather, and against the formula.

One row per window, with and without sinks, in Colossal and Hybrid. ``sent`` and ``gathered`` are
bytes that leave all ranks in forward and backward, with ``sliding_window`` and without; ``share``
is their ratio. ``formula`` is what the window alone says: of k and v, the ``w - 1`` rows before
each rank's and the sinks before those, once forward and once back, and in Hybrid the all-to-all
beside it. A row is checked if output and gradients are those of one process, and if the bytes
counted twice, those of `Plan.describe` and the formula are one number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hp_comm import traffic
from hp_cp import ContextParallel, init_device_mesh, make_plan, sliding_window_attention
from hp_mesh.testing import assert_close, count_collectives, randn, ranks

RANKS, BATCH, SEQ, HEADS, KV_HEADS, HEAD_SIZE = 8, 1, 1536, 8, 4, 32
ELEMENT = 8
CASES = [
    (1, 128, 0),
    (1, 128, 4),
    (1, 512, 0),  # two shards and a half back
    (2, 128, 0),
    (2, 128, 4),
]


class Core(nn.Module):
    """Windowed attention as a model writes it, ``[B, S, H, D]``."""

    def __init__(self, window: int, sinks: int) -> None:
        super().__init__()
        self.window, self.sinks = window, sinks

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output, ``[B, S, H, D]``."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = sliding_window_attention(q, k, v, self.window, sink_tokens=self.sinks)
        return out.transpose(1, 2)


def run(rounds: int) -> list[dict[str, Any]]:
    """Return a row for each degree, window and number of sinks; bytes are exact: one round."""
    pool = ranks(RANKS)
    rows = []
    for degree, window, sinks in CASES:
        results = pool.run(measure, degree, window, sinks, timeout=300.0)
        total = {name: sum(one[name] for one in results) for name in ("sent", "gathered")}
        wanted = formula(degree, window, sinks)
        checked = all(one["checked"] for one in results) and total["sent"] == wanted
        mode = "colossal" if degree == 1 else f"hybrid {RANKS // degree}x{degree}"
        rows.append(
            {
                "case": f"{mode}, window {window}, sinks {sinks}",
                **total,
                "formula": wanted,
                "share": round(total["sent"] / total["gathered"], 4),
                "checked": checked,
            }
        )
    return rows


def formula(degree: int, window: int, sinks: int) -> int:
    """Return the bytes that leave all ranks, from the window alone."""
    groups, shard = RANKS // degree, SEQ // (RANKS // degree)
    rows = 0
    for start in range(0, SEQ, shard):
        first = max(0, start - window + 1)
        rows += start - first + min(sinks, first)
    row = BATCH * KV_HEADS * 2 * HEAD_SIZE * ELEMENT  # k and v of all heads
    halo = 2 * rows * row  # forward and backward
    if degree == 1:
        return halo
    # q, k, v to heads and the output back, and the mirror of both: (u - 1) / u of each leaves
    tokens = BATCH * SEQ * HEAD_SIZE * ELEMENT * (degree - 1) // degree
    assert groups * degree == RANKS
    return halo + 2 * tokens * (2 * HEADS + 2 * KV_HEADS)


def measure(rank: int, degree: int, window: int, sinks: int) -> dict[str, Any]:
    """Check and count one rank."""
    torch.set_num_threads(1)
    shapes = [(BATCH, SEQ, h, HEAD_SIZE) for h in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, upstream = (randn(*s, seed=i) for i, s in enumerate(shapes))
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = step(Core(window, sinks), whole, upstream)
    found: dict[str, Any] = {"checked": True}
    halo = {"sliding_window": window, "sink_tokens": sinks}
    for name, options in (("sent", halo), ("gathered", {})):
        core = ContextParallel(ulysses_degree=degree, **options).apply(Core(window, sinks), mesh)
        shards = [x.chunk(RANKS, 1)[rank].clone().requires_grad_() for x in (q, k, v)]
        with traffic() as sent, count_collectives() as seen:
            output = step(core, shards, upstream.chunk(RANKS, 1)[rank])
        assert_close(output, expected.chunk(RANKS, 1)[rank], name="output")
        for one, full in zip(shards, whole, strict=True):
            assert full.grad is not None
            assert_close(one.grad, full.grad.chunk(RANKS, 1)[rank], kind="grad")
        told = make_plan(RANKS, degree).describe(
            num_heads=HEADS, num_kv_heads=KV_HEADS, seq_len=SEQ, head_size=HEAD_SIZE,
            batch=BATCH, element_size=ELEMENT, rank=rank, **options,
        )  # fmt: skip
        summary = {kind: n for kind, n in sent.summary().items() if kind != "preflight"}
        counted = {kind: (seen.count(kind), seen.bytes(kind)) for kind in seen.summary()}
        found["checked"] &= summary == counted == told.totals()
        found[name] = sum(size for _, size in summary.values())
    return found


def step(core: nn.Module, tensors: list[Tensor], upstream: Tensor) -> Tensor:
    """Run forward and backward; return the output."""
    output: Tensor = core(*tensors)
    output.backward(upstream)
    return output.detach()
