"""What `Plan.describe` predicts is what the ranks send, kind by kind and byte by byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from hp_cp import ContextParallel, init_device_mesh, make_plan
from hp_mesh.testing import count_collectives, ranks

KINDS = ("all_to_all", "all_gather", "reduce_scatter", "p2p", "all_reduce", "broadcast")


class Core(nn.Module):
    """Causal SDPA on BSHD, V heads of another size than K's."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend; ``[B, S, H, D]`` in, ``[B, S, H, Dv]`` out."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return out.transpose(1, 2)


def _traffic(
    rank: int, cp_size: int, arguments: dict[str, Any], kv_heads: int
) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]]:
    B, L, H, D, Dv = 2, 6, 12, 5, 3
    mesh = init_device_mesh("cpu", (cp_size,), mesh_dim_names=("cp",))
    core = ContextParallel(**arguments).apply(Core(), mesh)
    q, k, v = (
        torch.randn(B, L, heads, size, dtype=torch.float64, requires_grad=True)
        for heads, size in ((H, D), (kv_heads, D), (kv_heads, Dv))
    )
    with count_collectives() as counted:
        core(q, k, v).sum().backward()
    described = make_plan(cp_size, **arguments).describe(
        num_heads=H, num_kv_heads=kv_heads, seq_len=L * cp_size, head_size=D, v_head_size=Dv,
        batch=B, element_size=8, rank=rank,
    )  # fmt: skip
    sent = {kind: (counted.count(kind), counted.bytes(kind)) for kind in KINDS}
    return {kind: both for kind, both in sent.items() if both[0]}, described.totals()


@pytest.mark.parametrize("kv_heads", [12, 6, 4, 1])
@pytest.mark.parametrize(
    ("cp_size", "arguments"),
    [
        (4, {"ulysses_degree": None}),
        (4, {"ulysses_degree": 2}),
        (4, {"ulysses_degree": 1}),
        (4, {"ulysses_degree": 1, "load_balance": True}),
        (3, {"ulysses_degree": None}),
        (3, {"ulysses_degree": 1, "load_balance": True}),
    ],
    ids=["ulysses-P4", "hybrid-P4", "colossal-P4", "balanced-P4", "ulysses-P3", "balanced-P3"],
)
def test_every_rank_sends_what_its_plan_describes(
    cp_size: int, arguments: dict[str, Any], kv_heads: int
) -> None:
    """Ratio 1.00 on every rank: MHA, even and uneven GQA, MQA; forward and backward."""
    for sent, described in ranks(cp_size).run(_traffic, cp_size, arguments, kv_heads):
        assert sent == described
