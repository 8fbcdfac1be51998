"""The collectives of hp_comm: their operators, dtypes and reductions are ones that HCCL has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_comm import (
    _torch,
    count_tokens,
    exchange_head_tail,
    gather_seq,
    global_loss,
    head_to_seq,
    preflight,
    seq_to_head,
    unshard_sequence,
)

from . import hccl
from .fakes import npu, tensor, torch_npu, world
from .recording import Call, Recording, recorded

P, B, S, H, D = 4, 2, 6, 12, 64
PACKAGE = Path(torch_npu.__file__).parent
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
UNEVEN = [6, 3, 0, 5]

Move = Callable[[Tensor, ProcessGroup, int], Tensor]
MOVES: dict[str, tuple[Move, set[str]]] = {
    "seq to head": (
        lambda x, group, rank: seq_to_head(x, group, seq_dim=1, head_dim=2),
        {"c10d::alltoall_base_"},
    ),
    "seq to head, shared heads": (
        lambda x, group, rank: seq_to_head(
            x, group, seq_dim=1, head_dim=2, heads=[[0, 1], [1, 2], [3], [11]]
        ),
        {"c10d::alltoall_base_"},
    ),
    "seq to head, uneven": (
        lambda x, group, rank: seq_to_head(
            x[:, : UNEVEN[rank]], group, seq_dim=1, head_dim=2, lengths=UNEVEN
        ),
        {"c10d::alltoall_base_"},
    ),
    "head to seq": (
        lambda x, group, rank: head_to_seq(x.view(B, P * 3, 6, D), group, seq_dim=1, head_dim=2),
        {"c10d::alltoall_base_"},
    ),
    "gather": (
        lambda x, group, rank: gather_seq(x, group, seq_dim=1),
        {"c10d::_allgather_base_", "c10d::_reduce_scatter_base_"},
    ),
    "gather, uneven": (
        lambda x, group, rank: gather_seq(x[:, : UNEVEN[rank]], group, seq_dim=1, lengths=UNEVEN),
        {"c10d::_allgather_base_", "c10d::_reduce_scatter_base_"},
    ),
    "swap": (
        lambda x, group, rank: exchange_head_tail(x, group),
        {"c10d::send", "c10d::recv_"},
    ),
    "asynchronous": (
        lambda x, group, rank: seq_to_head(x, group, seq_dim=1, head_dim=2, async_op=True).wait(),
        {"c10d::alltoall_base_"},
    ),
}


@pytest.fixture(params=range(P), ids=lambda rank: f"rank{rank}")
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    with world(request.param, P), npu():
        yield request.param


@pytest.fixture(autouse=True)
def reduced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Note the reductions where torch is called: past that, they cannot be read."""
    seen: list[Any] = []

    def noting(collective: Any) -> Any:
        def call(*args: Any, op: Any, **named: Any) -> Any:
            seen.append(op)
            return collective(*args, op=op, **named)

        return call

    monkeypatch.setattr("hp_comm._torch._reduce_scatter", noting(_torch._reduce_scatter))
    monkeypatch.setattr("torch.distributed.all_reduce", noting(dist.all_reduce))
    return seen


def group() -> ProcessGroup:
    found = dist.group.WORLD
    assert found is not None, "the world was made"
    return found


def buffers(call: Call) -> list[Tensor]:
    return list(call.tensors())


def check_all(seen: Recording) -> set[str]:
    """Hold every collective to HCCL; return the names of those that ran."""
    allowed, implemented = hccl.dtypes(PACKAGE), hccl.methods(PACKAGE)
    ran = set()
    for call in seen.dispatched:
        if not call.operator.startswith("c10d::"):
            continue
        ran.add(call.operator)
        function, method = hccl.METHODS[call.operator]
        assert method in implemented, f"{call.operator} needs {method}"
        for x in buffers(call):
            name = str(x.dtype).removeprefix("torch.")
            assert name in allowed[function], f"{call.operator} of {name}"
            assert x.is_contiguous() and x.device.type == "npu", call.operator
    return ran


def test_hccl_has_the_sum_and_no_average() -> None:
    """Why gradients are summed on the wire and divided, where they are, by hand."""
    assert hccl.reductions(PACKAGE) == {"SUM", "PRODUCT", "MAX", "MIN"}
    assert hccl.dtypes(PACKAGE).keys() >= {function for function, _ in hccl.METHODS.values()}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", MOVES)
def test_moves_and_their_gradients_send_what_hccl_takes(
    name: str, dtype: torch.dtype, rank: int, reduced: list[Any]
) -> None:
    """Operators, dtypes, dense buffers; SUM is the only reduction."""
    move, expected = MOVES[name]
    x = tensor(B, S, H, D, dtype=dtype)
    with recorded("hp_comm") as seen:
        out = move(x, group(), rank)
        out.sum().backward()
    assert check_all(seen) == expected
    assert set(reduced) <= {dist.ReduceOp.SUM}
    assert bool(reduced) == ("c10d::_reduce_scatter_base_" in expected)
    assert out.dtype == dtype and out.device.type == "npu"
    assert x.grad is not None and x.grad.shape == x.shape and x.grad.dtype == dtype


def test_integers_and_8_bit_floats_are_moved_as_bytes_that_hccl_knows(rank: int) -> None:
    """Document lengths, masks, top-k indices; quantised activations as uint8."""
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.float8_e4m3fn):
        x = tensor(B, S, H, D, dtype=dtype, grad=False)
        with recorded("hp_comm") as seen:
            for move, _ in MOVES.values():
                assert move(x, group(), rank).dtype == dtype
        check_all(seen)
        sent = {t.dtype for call in seen.dispatched for t in buffers(call)}
        assert sent == {torch.uint8 if dtype.is_floating_point else dtype}


def test_losses_and_counts_are_summed_in_a_dtype_that_hccl_takes(
    rank: int, reduced: list[Any]
) -> None:
    """float32 for losses of any dtype, int64 for counts."""
    mask = tensor(B, S, dtype=torch.bool, grad=False)
    for dtype in FLOATS:
        losses = tensor(B, S, dtype=dtype)
        with recorded("hp_comm.sequence") as seen:
            global_loss(losses, group(), weights=mask).backward()
            count_tokens(mask, group())
        assert check_all(seen) == {"c10d::allreduce_"}
        assert {x.dtype for call in seen.dispatched for x in buffers(call)} == {
            torch.float32,
            torch.int64,
        }
        assert losses.grad is not None and losses.grad.dtype == dtype
    assert set(reduced) == {dist.ReduceOp.SUM}


def test_a_sequence_is_made_whole_with_what_hccl_takes(rank: int) -> None:
    """`unshard_sequence`, both orders, with summed gradients and without."""
    for order in ("contiguous", "head_tail"):
        for sum_gradients in (True, False):
            x = tensor(B, S, D)
            with recorded("hp_comm.sequence") as seen:
                out = unshard_sequence(
                    x, group(), seq_dim=1, order=order, sum_gradients=sum_gradients
                )
                out.sum().backward()
            check_all(seen)
            assert out.shape == (B, P * S, D) and x.grad is not None


def test_the_preflight_is_a_gather_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks compare before data moves; on a group of NPUs alone it travels through HCCL."""
    monkeypatch.setenv("HP_PREFLIGHT", "always")
    sent: list[Any] = []

    def gather(output: Tensor, input: Tensor, group: ProcessGroup, *, async_op: bool) -> None:
        sent.append(input.dtype)
        output.copy_(input.repeat(P))

    monkeypatch.setattr("hp_comm._torch.all_gather", gather)
    with world(1, P):
        preflight(group(), "check", {"shape": [2, 6]}, call_index=0)
    assert sent == [torch.uint8]
    assert "uint8" in hccl.dtypes(PACKAGE)["AllGather"]
