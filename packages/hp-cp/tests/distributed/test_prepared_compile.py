"""PreparedAttention in a compiled block: QK-norm and rotary are the boundary's, between graphs."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters

from hp_cp import AsyncContextParallel, ContextParallel, HeadWork
from hp_mesh.boundary import boundary_of
from hp_mesh.testing import assert_close, randn, ranks

from ._compare import Case
from ._handoffs import DIM
from .test_prepared import Attention, _place


class Rotated(Attention):
    """Looks its angles up in a table, as models do, instead of drawing them in forward."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        angle = randn(1, case.S, 1, case.D // 2, seed=40)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def works(self) -> list[HeadWork]:
        cos, sin = (table[:, self.rows] for table in (self.cos, self.sin))
        if self.case.layout == "BNSD":
            cos, sin = cos.transpose(1, 2), sin.transpose(1, 2)
        return [HeadWork(scale, 1e-5, cos, sin) for scale in self.scales]


def _step(model: Rotated, x: Tensor, up: Tensor) -> tuple[Tensor, list[Tensor]]:
    x = x.clone().requires_grad_()
    out = model(x)
    return out.detach(), list(torch.autograd.grad(out, [x, *model.parameters()], up))


def _compare(rank: int, backend: str, case: Case, *, ahead: bool) -> dict[str, int]:
    """Compare steps with one device, uncompiled; return what dynamo counted."""
    torch._dynamo.reset()
    counters.clear()
    style = AsyncContextParallel if ahead else ContextParallel
    styled = style(case.seq_dim, case.head_dim, case.degree)
    plain, model = Rotated(case), _place(case, rank, styled, ahead=ahead)(Rotated(case))
    model.compile(backend=backend)
    for step in range(3):
        x, up = randn(case.B, case.S, DIM, seed=step), randn(*case.shape(case.H, case.D), seed=9)
        expected, (dx, *grads) = _step(plain, x, up)
        out, (dx_of_rank, *shares) = _step(model, x.chunk(case.P, 1)[rank], case.local(up, rank))
        assert_close(out, case.local(expected, rank), name=f"step {step}: output")
        assert_close(dx_of_rank, dx.chunk(case.P, 1)[rank], kind="grad", name=f"step {step}: dx")
        for (name, _), share, grad in zip(plain.named_parameters(), shares, grads, strict=True):
            dist.all_reduce(share)
            assert_close(share, grad, kind="grad", name=f"step {step}: d{name}")
    handoffs = boundary_of(model.core).handoffs.values() if ahead else ()
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "disarmed": sum(one.disarmed for one in handoffs),
    }


def _every(rank: int) -> list[dict[str, int]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # dynamo tells what it does not trace
        return [
            _compare(rank, backend, case, ahead=ahead)
            for backend in ("eager", "aot_eager")
            for case in (Case(P=2), Case(P=2, degree=1, layout="BNSD"))
            for ahead in (False, True)
        ]


def test_a_compiled_block_prepares_and_attends_as_one_device_does() -> None:
    """Outputs and every gradient, the norms' weights included; sync and ahead, both modes.

    Under `count_collectives` dynamo would trace nothing: it skips frames while a mode is active.
    """
    pool = ranks(2, backend="processes")
    found = pool.run(_every, timeout=900.0)[0]
    pool.close()
    assert all(one["graphs"] > 0 and not one["disarmed"] for one in found), found
