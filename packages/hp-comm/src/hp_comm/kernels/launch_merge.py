"""Merging partial attentions, on real tensors; `hp_comm.kernels.arithmetic` defines it."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from hp_comm.kernels import _triton, arithmetic
from hp_comm.kernels.config import launch_of
from hp_comm.kernels.fitting import fitting
from hp_comm.kernels.launch import MOVED, device_name, on
from hp_comm.kernels.plans import Launch, merge_launch

__all__ = ["merge", "merge_backward"]


@lru_cache(maxsize=512)
def _planned(kernel: str, device: str, element_size: int, rows: int, size: int) -> Launch:
    """Return the call for ``rows`` outputs of ``size``."""
    sizes = {"rows": rows, "inner": size, "element_size": element_size}
    launch = launch_of(kernel, device, sizes)
    (one,) = fitting(
        kernel, device, element_size, launch, lambda given: [merge_launch(rows, size, given)]
    )
    return one


def _run(kernel: str, rows: int, size: int, tensors: dict[str, Tensor]) -> None:
    like = next(iter(tensors.values()))
    one = _planned(kernel, device_name(like), like.element_size(), rows, size)
    options = {} if like.device.type == "cpu" else one.options
    with on(like.device):
        getattr(_triton, kernel)[one.grid](**tensors, **one.numbers, **options)


def _is_fit(*tensors: Tensor) -> bool:
    return all(x.dtype in MOVED and x.is_floating_point() and x.numel() for x in tensors)


def merge(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """See `arithmetic.merge`."""
    if not _is_fit(out1, lse1):
        return arithmetic.merge(out1, lse1, out2, lse2)
    given = {"out1": out1, "lse1": lse1, "out2": out2, "lse2": lse2}
    dense = {name: x.contiguous() for name, x in given.items()}
    out, lse = torch.empty_like(dense["out1"]), torch.empty_like(dense["lse1"])
    _run("merge", lse.numel(), out.shape[-1], {**dense, "out": out, "lse": lse})
    return out, lse


def merge_backward(
    out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor, grad: Tensor, grad_lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `arithmetic.merge_backward`."""
    if not _is_fit(out1, lse1):
        return arithmetic.merge_backward(out1, lse1, out2, lse2, grad, grad_lse)
    given = {"out1": out1, "lse1": lse1, "out2": out2, "lse2": lse2}
    dense = {name: x.contiguous() for name, x in given.items()}
    grads = {f"grad{i}": torch.empty_like(dense[f"out{i}"]) for i in (1, 2)}
    grads |= {f"grad_lse{i}": torch.empty_like(dense[f"lse{i}"]) for i in (1, 2)}
    sent = {"grad": grad.contiguous(), "grad_lse": grad_lse.contiguous()}
    _run("merge_backward", lse1.numel(), out1.shape[-1], {**dense, **sent, **grads})
    return grads["grad1"], grads["grad_lse1"], grads["grad2"], grads["grad_lse2"]
