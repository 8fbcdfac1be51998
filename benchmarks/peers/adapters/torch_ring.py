"""torch: the ring template inside its experimental context parallelism.

The public path has no CPU kernel (``aten._scaled_dot_product_flash_attention_for_cpu`` has no
sharding rule there), so the template is given the CPU operator, and its autograd here.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from peers.cases import Case
from peers.contender import Attention, Contender
from peers.kernel import attention_with_lse, attention_with_lse_backward

__all__ = ["CONTENDERS"]


def _forward_block(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    return attention_with_lse(query, key, value, causal=is_causal, scale=scale)


def _backward_block(
    *,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    return attention_with_lse_backward(
        grad_out, query, key, value, out, logsumexp, causal=is_causal, scale=scale
    )


class _Ring(torch.autograd.Function):
    """The template's forward and backward; ``[B, H, S/P, D]``."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup, causal: bool, rotate: str
    ) -> Tensor:
        template = _template(rotate)
        ctx.group, ctx.causal, ctx.rotate, ctx.scale = group, causal, rotate, q.shape[-1] ** -0.5
        out, lse = template._templated_ring_attention(
            group, 2, _forward_block, q, k, v, is_causal=causal, scale=ctx.scale
        )
        ctx.save_for_backward(q, k, v, out, lse)
        output: Tensor = out
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = _template(ctx.rotate)._templated_ring_attention_backward(
            ctx.group,
            2,
            _backward_block,
            grads[0],
            "grad_out",
            q,
            k,
            v,
            out,
            lse,
            ctx.causal,
            scale=ctx.scale,
        )
        return dq, dk, dv, None, None, None


def _template(rotate: str) -> Any:
    """Return the module with its process-wide options set: contiguous rows, ring or gather."""
    module = importlib.import_module(
        "torch.distributed.tensor.experimental._context_parallel._attention"
    )
    module._cp_options.enable_load_balance = False
    module.set_rotate_method(rotate)
    return module


def _build(case: Case, group: ProcessGroup, *, rotate: str) -> Attention:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        output: Tensor = _Ring.apply(  # type: ignore[no-untyped-call]
            q, k, v, group, case.causal, rotate
        )
        return output.transpose(1, 2)

    return run


CONTENDERS = (
    Contender("torch ring template", functools.partial(_build, rotate="alltoall")),
    Contender("torch allgather template", functools.partial(_build, rotate="allgather")),
)
