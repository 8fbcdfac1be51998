"""What a transform hangs on is told apart from what can be sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hp_mesh.transforms import refuse_transforms


class _Sends(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        refuse_transforms("backward", [grad])
        return grad


def test_plain_gradients_pass_and_batched_ones_are_refused() -> None:
    """``is_grads_batched=True`` wraps gradients in a way of its own, older than torch.func."""
    x = torch.ones(3, requires_grad=True)
    out: Tensor = _Sends.apply(x)  # type: ignore[no-untyped-call]
    torch.autograd.grad(out, x, torch.ones(3), retain_graph=True)
    with pytest.raises(ValueError, match="backward: tensors must not be under a transform"):
        torch.autograd.grad(out, x, torch.ones(2, 3), is_grads_batched=True)


def test_what_vmap_wraps_is_refused() -> None:
    """And the tensor itself is not."""
    x = torch.ones(2, 3)
    refuse_transforms("here", [x])
    with pytest.raises(ValueError, match="here: tensors must not be under a transform"):
        torch.vmap(lambda row: refuse_transforms("here", [row]))(x)
