"""Checks of the collectives that every rank runs on its own device; see `test_collectives_npu`.

Each check knows the whole tensor (`hp_mesh.testing.randn` gives all ranks the same numbers), runs
the collective on this rank's part, and compares with a cut of the whole on CPU.
"""

from __future__ import annotations

import datetime
import importlib
import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_comm import (
    count_tokens,
    exchange_head_tail,
    gather_seq,
    global_loss,
    head_to_seq,
    preflight,
    seq_to_head,
    unshard_sequence,
)
from hp_mesh.testing import assert_close, randn
from hp_mesh.window import mirror_rank

__all__ = ["CHECKS", "FLOATS", "MOVED", "run_all", "work"]

B, S, D = 2, 6, 24
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
MOVED = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.float8_e4m3fn)


class Rank:
    """One rank: where it stands, its device, and the parts of whole tensors that are its own."""

    def __init__(self, device: torch.device) -> None:
        found = dist.group.WORLD
        assert found is not None, "the group was made"
        self.group: ProcessGroup = found
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device
        self.heads = 3 * self.size

    def lengths(self) -> list[int]:
        """Return unequal lengths, none for rank 1."""
        return [0 if rank == 1 else 2 + 3 * rank for rank in range(self.size)]

    def whole(self, *shape: int, seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return the same numbers on all ranks, on CPU, in ``dtype``."""
        x = randn(*shape, seed=seed)
        return (100 * x).to(torch.int64).to(dtype) if _is_small(dtype) else x.to(dtype)

    def leaf(self, x: Tensor) -> Tensor:
        """Return a part on this rank's device; one with strides, as models hand over."""
        strided = x.transpose(0, -1).contiguous().transpose(0, -1)
        return strided.to(self.device).requires_grad_(x.dtype in FLOATS)

    def parts(self, x: Tensor, lengths: Sequence[int] | None, dim: int = 1) -> Sequence[Tensor]:
        return x.chunk(self.size, dim) if lengths is None else x.split(list(lengths), dim)


def _is_small(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point or dtype.itemsize == 1


def _same(actual: Tensor, expected: Tensor, what: str) -> None:
    """Assert equal bits: nothing was computed, only moved."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, what
    a, e = actual.detach().cpu().contiguous(), expected.detach().contiguous()
    assert torch.equal(a.view(torch.uint8), e.view(torch.uint8)), f"{what}: bits differ"


def seq_and_head(me: Rank, dtype: torch.dtype, uneven: bool) -> None:
    """All-to-all to heads and back; the gradient is the mirrored all-to-all."""
    lengths = me.lengths() if uneven else None
    total = sum(lengths) if lengths else S * me.size
    whole, up = (me.whole(B, total, me.heads, D, seed=i, dtype=dtype) for i in (1, 2))
    x = me.leaf(me.parts(whole, lengths)[me.rank])
    for async_op in (False, True):
        out = seq_to_head(x, me.group, seq_dim=1, head_dim=2, lengths=lengths, async_op=async_op)
        out = out if isinstance(out, Tensor) else out.wait()
        _same(out, whole.chunk(me.size, 2)[me.rank], "heads")
        back = head_to_seq(out, me.group, seq_dim=1, head_dim=2, lengths=lengths, async_op=async_op)
        back = back if isinstance(back, Tensor) else back.wait()
        _same(back, x.detach().cpu(), "there and back")
        if x.requires_grad:
            (grad,) = torch.autograd.grad(
                out, x, up.chunk(me.size, 2)[me.rank].to(me.device), retain_graph=True
            )
            _same(grad, me.parts(up, lengths)[me.rank], "gradient")


def shared_heads(me: Rank, dtype: torch.dtype, uneven: bool) -> None:
    """KV heads that go to several ranks; their gradients are summed at the owner."""
    heads = [sorted({rank // 2, (rank + 1) // 2}) for rank in range(me.size)]
    whole = me.whole(B, S * me.size, me.size, D, dtype=dtype)
    x = me.leaf(whole.chunk(me.size, 1)[me.rank])
    out = seq_to_head(x, me.group, seq_dim=1, head_dim=2, heads=heads)
    _same(out, whole[:, :, heads[me.rank]], "heads")
    if x.requires_grad:
        out.backward(torch.ones_like(out))
        copies = torch.tensor([sum(h in one for one in heads) for h in range(me.size)])
        assert x.grad is not None
        _same(x.grad, copies.to(dtype)[:, None].expand(x.shape), "gradient")


def gather(me: Rank, dtype: torch.dtype, uneven: bool) -> None:
    """All-gather; the gradient is a reduce-scatter: the sum over ranks, never divided."""
    lengths = me.lengths() if uneven else None
    total = sum(lengths) if lengths else S * me.size
    whole = me.whole(B, total, 3, D, dtype=dtype)
    x = me.leaf(me.parts(whole, lengths)[me.rank])
    ups = [me.whole(B, total, 3, D, seed=10 + rank, dtype=dtype) for rank in range(me.size)]
    for async_op in (False, True):
        out = gather_seq(x, me.group, seq_dim=1, lengths=lengths, async_op=async_op)
        out = out if isinstance(out, Tensor) else out.wait()
        _same(out, whole, "whole sequence")
        if x.requires_grad:
            (grad,) = torch.autograd.grad(out, x, ups[me.rank].to(me.device))
            summed = torch.stack([up.double() for up in ups]).sum(0).to(dtype)
            assert_close(grad.cpu(), me.parts(summed, lengths)[me.rank], kind="grad")


def swap(me: Rank, dtype: torch.dtype, uneven: bool) -> None:
    """One send and one receive with the mirror rank; the gradient is the same swap."""
    tensors, ups = (
        [me.whole(B, S, 3, D, seed=seed + rank, dtype=dtype) for rank in range(me.size)]
        for seed in (1, 50)
    )
    mirror = mirror_rank(me.rank, me.size)
    x = me.leaf(tensors[me.rank])
    for async_op in (False, True):
        out = exchange_head_tail(x, me.group, async_op=async_op)
        out = out if isinstance(out, Tensor) else out.wait()
        _same(out, tensors[mirror], "the mirror's")
        if x.requires_grad:
            (grad,) = torch.autograd.grad(out, x, ups[me.rank].to(me.device))
            _same(grad, ups[mirror], "gradient")


def several_in_flight(me: Rank, dtype: torch.dtype, uneven: bool) -> None:
    """q, k and v sent one after the other, work in between, waited for in another order."""
    wholes = [me.whole(B, S * me.size, me.heads, D, seed=i, dtype=dtype) for i in range(3)]
    parts = [me.leaf(x.chunk(me.size, 1)[me.rank]) for x in wholes]
    handles = [seq_to_head(x, me.group, seq_dim=1, head_dim=2, async_op=True) for x in parts]
    torch.ones(64, 64, device=me.device).mm(torch.ones(64, 64, device=me.device))
    for i in (2, 0, 1):
        _same(handles[i].wait(), wholes[i].chunk(me.size, 2)[me.rank], f"tensor {i}")
    together = seq_to_head(parts, me.group, seq_dim=1, head_dim=2)
    for out, whole in zip(together, wholes, strict=True):
        _same(out, whole.chunk(me.size, 2)[me.rank], "one exchange for three")


def losses(me: Rank, dtype: torch.dtype, uneven: bool) -> None:
    """The mean over all tokens of all ranks, and how many there are."""
    whole = me.whole(B, S * me.size, dtype=dtype)
    mask = randn(B, S * me.size, seed=2) > 0.3
    x = me.leaf(whole.chunk(me.size, 1)[me.rank])
    mine = mask.chunk(me.size, 1)[me.rank].to(me.device)
    assert int(count_tokens(mine, me.group)) == int(mask.sum())
    loss = global_loss(x, me.group, weights=mine, gradient_divisor=1)
    expected = (whole.double() * mask).sum() / mask.sum()
    assert_close(loss.cpu(), expected.to(loss.dtype), kind="loss")
    loss.backward()
    assert x.grad is not None
    want = (mask / mask.sum()).chunk(me.size, 1)[me.rank].to(dtype)
    assert_close(x.grad.cpu(), want, kind="grad")


def sequences(me: Rank, dtype: torch.dtype, uneven: bool) -> None:
    """The whole sequence on every rank, of unequal parts where asked."""
    lengths = me.lengths() if uneven else None
    whole = me.whole(B, sum(lengths) if lengths else S * me.size, D, dtype=dtype)
    x = me.leaf(me.parts(whole, lengths)[me.rank])
    _same(unshard_sequence(x, me.group, seq_dim=1, lengths=lengths), whole, "whole sequence")


def disagreement(me: Rank, dtype: torch.dtype, uneven: bool) -> None:
    """Ranks with different shapes raise the same error before any data moves, then go on."""
    os.environ["HP_PREFLIGHT"] = "always"
    preflight(me.group, "check", {"shape": [2, 6]}, call_index=0)
    for _ in range(2):
        with pytest.raises(ValueError, match="shape must be the same on all ranks") as error:
            preflight(me.group, "check", {"shape": [2, 6 + me.rank]}, call_index=0)
        texts: list[Any] = [None] * me.size
        dist.all_gather_object(texts, str(error.value))
        assert len(set(texts)) == 1, texts


CHECKS: dict[str, tuple[Callable[[Rank, torch.dtype, bool], None], Sequence[torch.dtype], bool]] = {
    "seq_to_head and head_to_seq": (seq_and_head, MOVED, True),
    "shared heads": (shared_heads, MOVED, False),
    "gather_seq and its reduce-scatter": (gather, MOVED, True),
    "exchange_head_tail": (swap, MOVED, False),
    "several in flight": (several_in_flight, FLOATS, False),
    "losses and token counts": (losses, FLOATS, False),
    "unshard_sequence": (sequences, FLOATS, True),
    "preflight": (disagreement, (torch.float32,), False),
}
"""What runs, in which dtypes, and whether with unequal parts, too."""


def run_all(device: torch.device) -> dict[str, str]:
    """Run every check on this rank; return the traceback of each that failed, by its id.

    Ranks agree on the failures, so that all of them go on with the next check.
    """
    me, failed = Rank(device), {}
    for name, (check, dtypes, has_uneven) in CHECKS.items():
        for dtype in dtypes:
            for uneven in (False, True)[: 1 + has_uneven]:
                problem = ""
                try:
                    check(me, dtype, uneven)
                except Exception:  # told to every rank below, and a failed test of the parent
                    problem = f"rank {me.rank}:\n{traceback.format_exc()}"
                problems: list[Any] = [None] * me.size
                dist.all_gather_object(problems, problem)
                if any(problems):
                    failed[identifier(name, dtype, uneven)] = "\n".join(filter(None, problems))
    return failed


def identifier(name: str, dtype: torch.dtype, uneven: bool) -> str:
    kind = str(dtype).removeprefix("torch.")
    return f"{name}-{kind}-{'uneven' if uneven else 'even'}"


def work(rank: int, size: int, store: str, backend: str, kind: str, results: Any) -> None:
    """Be one rank: make the group on this rank's device, run the checks, leave what failed."""
    if kind == "npu":
        importlib.import_module("torch_npu")
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, rank)
    if kind != "cpu":
        torch.get_device_module(kind).set_device(device)
    # objects travel as tensors of the group's device
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=120),
    )
    try:
        failed = run_all(device)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        results.put(failed)
