"""The losses' sum as one node of autograd, and what computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from hp_dsa.ops.arguments import check_indices, check_shape
from hp_dsa.ops.contract import Gradients
from hp_dsa.ops.dispatch import implementation
from hp_dsa.ops.loss_inputs import check_statistics, read_loss_inputs
from hp_mesh.checks import require

__all__ = ["Run", "dense_run", "sparse_run", "summed_loss"]

Run = Callable[[bool], Gradients]
"""``gradients -> (d_query_index, d_key_index, d_weights, or empty tensors, loss)``."""


class _SummedLoss(torch.autograd.Function):
    """The loss, with gradients that were computed along with it: nothing else is kept.

    What the pass over the scores yields is the gradient as well as the sum, so that keeping three
    tensors of the indexer's inputs' size replaces keeping eight inputs and a second pass.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query_index: Tensor,
        key_index: Tensor,
        weights: Tensor,
        run: Run,
        gradients: bool,
    ) -> Tensor:
        *found, loss = run(gradients)
        ctx.save_for_backward(*found)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            (found * upstream).to(found.dtype) if needed else None
            for found, needed in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        ]
        return *scaled, None, None


def summed_loss(run: Run, query_index: Tensor, key_index: Tensor, weights: Tensor) -> Tensor:
    """Return ``[1]``, the loss, recorded by autograd if anything of the indexer asks for it."""
    inputs = (query_index, key_index, weights)
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    applied = _SummedLoss.apply(*inputs, run, gradients)  # type: ignore[no-untyped-call]
    return cast(Tensor, applied)


def sparse_run(where: str, *, sparse_indices: Tensor, sinks: Tensor | None, **given: Any) -> Run:
    """Check the sparse losses' arguments and return what computes them."""
    require(sinks is None, where, "sinks (given) must be None", "no backend supports them")
    inputs = read_loss_inputs(where, **given)
    query, key = inputs.query, inputs.key
    check_shape(where, "key", key, (*key.shape[:-2], 1, query.shape[-1]), "one head like query's")
    check_indices(where, sparse_indices, (*query.shape[:-2], 1), "[.., 1, K] on query's rows")
    check_statistics(inputs)
    return lambda gradients: implementation(query).sparse_kl_loss(inputs, sparse_indices, gradients)


def dense_run(
    where: str, *, softmax_max_index: Tensor, softmax_sum_index: Tensor, **given: Any
) -> Run:
    """Check the dense losses' arguments and return what computes them."""
    inputs = read_loss_inputs(where, **given)
    query, key = inputs.query, inputs.key
    check_shape(where, "key", key, (*key.shape[:-1], query.shape[-1]), "of query's head size")
    check_statistics(
        inputs, softmax_max_index=softmax_max_index, softmax_sum_index=softmax_sum_index
    )
    statistics = (softmax_max_index.detach(), softmax_sum_index.detach())
    return lambda gradients: implementation(query).dense_kl_loss(inputs, statistics, gradients)
