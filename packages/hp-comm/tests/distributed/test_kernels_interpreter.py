"""Exchanges between processes with the Triton kernels, interpreted.

Processes, because the interpreter keeps its state in the module. Skipped as in
`tests/unit/test_kernels_interpreter.py`.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton", reason="no triton here; nox -s npu_compile and cuda_compile run it")
# triton reads it when it is imported, so a test cannot set it; the nox sessions do
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernels run on a CPU only under TRITON_INTERPRET=1", allow_module_level=True)

from hp_comm import (
    HeadWork,
    gather_seq,
    head_to_seq,
    merge_head_tail,
    seq_to_head,
    split_head_tail,
)
from hp_comm.kernels import implementation
from hp_mesh.testing import assert_close, randn, ranks

# triton-ascend's interpreter makes numbers of one-element arrays, which numpy will forbid
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")


def _exchange(rank: int) -> None:
    """Go there and back, with and without work, and gather; compare with the reference's bits."""
    os.environ["TRITON_INTERPRET"] = "1"
    group = dist.group.WORLD
    shards = [randn(2, 6, n, 8, seed=10 * rank + n, dtype=torch.float32) for n in (4, 2, 2)]
    scale, angle = randn(8, dtype=torch.float32), randn(1, 1, 6, 4, dtype=torch.float32)
    work = HeadWork(scale, 1e-6, angle.cos(), angle.sin())
    found = []
    for name in ("triton", "reference"):
        os.environ["HP_KERNELS"] = name
        assert implementation(shards[0]).__name__.endswith("launch" if name == "triton" else name)
        xs = [x.clone().requires_grad_() for x in shards]
        weight = scale.clone().requires_grad_()
        own = HeadWork(weight, work.eps, work.cos, work.sin)
        heads = seq_to_head(
            [x.transpose(1, 2) for x in xs], group, seq_dim=2, head_dim=1, work=[own, own, None]
        )
        handle = seq_to_head(xs[0], group, seq_dim=1, head_dim=2, async_op=True)
        back = head_to_seq(heads[0] * 2, group, seq_dim=2, head_dim=1)
        whole = gather_seq(xs[1], group, seq_dim=1)
        natural = gather_seq(xs[2], group, seq_dim=1, order="head_tail")
        halves = split_head_tail(xs[2], group, seq_dim=1)
        merged = merge_head_tail(*(half * half for half in halves), group, seq_dim=1)
        loss = back.square().sum() + sum(h.square().sum() for h in heads[1:])
        loss = loss + handle.wait().square().sum() + (whole * whole.detach()).sum()
        loss = loss + (natural * natural.detach()).sum() + merged.square().sum()
        loss.backward()
        found.append([*heads, back, whole, natural, merged, *(x.grad for x in xs), weight.grad])
    for one, other in zip(*found, strict=True):
        assert_close(one, other, kind="grad")


def test_exchanges_with_interpreted_kernels_equal_the_reference() -> None:
    """Ulysses with QK-norm and rotary, async and sync, there and back; gathers; halves: 2 ranks."""
    pool = ranks(2, backend="processes")
    pool.run(_exchange, timeout=600.0)
    pool.close()
