"""The inputs of a case, and what one process computes from them without any parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hp_mesh.testing import randn
from peers.cases import Case
from peers.kernel import attention

__all__ = ["Expected", "Shard", "differences", "shard", "write_oracle"]

TOLERANCE = 1e-4
"""Largest difference allowed, over the largest value of the tensor; fp32 on both sides."""

NAMES = ("output", "dQ", "dK", "dV")


@dataclass
class Shard:
    """This rank's rows: q, k, v as leaves that want gradients, and the output's gradient."""

    inputs: tuple[Tensor, Tensor, Tensor]
    upstream: Tensor

    def clear(self) -> None:
        """Drop the gradients."""
        for x in self.inputs:
            x.grad = None


@dataclass
class Expected:
    """Output, dQ, dK, dV of the whole sequence, ``[B, S, H, D]``."""

    tensors: tuple[Tensor, ...]


def whole(case: Case) -> list[Tensor]:
    """Return q, k, v and the output's gradient of the whole sequence."""
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    return [
        randn(case.batch, case.seq, h, case.head_size, seed=i, dtype=torch.float32)
        for i, h in enumerate(heads)
    ]


def shard(case: Case, rank: int) -> Shard:
    """Return the rows of ``rank``, contiguous."""
    q, k, v, upstream = (x.chunk(case.ranks, 1)[rank].clone() for x in whole(case))
    return Shard((q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), upstream)


def write_oracle(rank: int, case: Case, file: Path) -> None:
    """Compute the oracle on rank 0 and write it to ``file``; a pool calls it on all ranks."""
    if rank:
        return
    *inputs, upstream = whole(case)
    for x in inputs:
        x.requires_grad_()
    output = attention(*inputs, causal=case.causal)
    torch.autograd.backward(output, upstream)
    tensors = [output.detach().contiguous(), *(x.grad for x in inputs)]
    torch.save(tensors, file)


def differences(case: Case, rank: int, got: Shard, output: Tensor, file: Path) -> dict[str, float]:
    """Return by how much output and gradients are off, relative to the largest value expected."""
    expected = torch.load(file)
    found = [output.detach(), *(x.grad for x in got.inputs)]
    off = {}
    for name, mine, full in zip(NAMES, found, expected, strict=True):
        right = full.chunk(case.ranks, 1)[rank]
        if mine is None or mine.shape != right.shape:
            off[name] = float("inf")
        else:
            worst = (mine.float() - right).abs().max() / full.abs().max()
            off[name] = float(worst.nan_to_num(float("inf")))
    return off
