"""A rank that ends or hangs: the others stop within the timeout and name what they waited in."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_comm import (
    CollectiveError,
    count_tokens,
    exchange_head_tail,
    gather_seq,
    head_to_seq,
    preflight,
    scatter_seq,
    seq_to_head,
    sum_shares,
)
from hp_mesh.testing import ranks

Call = Callable[[Tensor, ProcessGroup], object]
CALLS: dict[str, Call] = {
    "seq_to_head: all_to_all": lambda x, group: seq_to_head(x, group, seq_dim=1, head_dim=2),
    "head_to_seq: all_to_all": lambda x, group: head_to_seq(x, group, seq_dim=1, head_dim=2),
    "gather_seq: all_gather": lambda x, group: gather_seq(x, group, seq_dim=1),
    "scatter_seq: reduce_scatter": lambda x, group: scatter_seq(x, group, seq_dim=1),
    "exchange_head_tail: p2p": exchange_head_tail,
    "sum_shares: all_reduce": sum_shares,
    "count_tokens: all_reduce": lambda x, group: count_tokens(x > 0, group),
    "here: preflight": lambda x, group: preflight(group, "here", {}, call_index=0),
}
ASYNC: dict[str, Call] = {
    "seq_to_head: all_to_all": lambda x, group: seq_to_head(
        x, group, seq_dim=1, head_dim=2, async_op=True
    ).wait(),
    "gather_seq: all_gather": lambda x, group: gather_seq(
        [x, x], group, seq_dim=1, async_op=True
    ).wait(),
}


@pytest.mark.parametrize(
    ("name", "call"),
    [*CALLS.items(), *ASYNC.items()],
    ids=[*CALLS, *(f"{name} async" for name in ASYNC)],
)
def test_a_rank_that_does_not_come_is_named_with_what_it_was_waited_for_in(
    name: str, call: Call
) -> None:
    """The group's timeout ends the wait; the message says call, collective and ranks."""

    def on(rank: int, seconds: float) -> str | None:
        dist.barrier()
        try:
            group = dist.new_group(timeout=timedelta(seconds=seconds))
            dist.barrier(group)
        except RuntimeError:
            return None  # the time is that of making the group, too
        if rank == 1:  # does something else, alive: only the timeout can end the wait for it
            return ""
        with pytest.raises(CollectiveError) as found:
            call(torch.ones(2, 4, 2, 3), group)
        assert found.value.__cause__ is not None
        return str(found.value)

    for seconds in (0.5, 5.0, 50.0):  # until the group can be made on a busy machine
        message, _ = ranks(2).run(on, seconds)
        if message is not None:
            break
    assert message is not None
    assert message.startswith(f"{name} over ranks 0, 1 (this is 0) did not complete: ")
    assert message.endswith("its own log says why")


def _killed_in_backward(rank: int) -> str:
    group = dist.group.WORLD
    x = torch.ones(2, 3, 6, 4, requires_grad=True)
    whole = gather_seq(x, group, seq_dim=1)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    whole.sum().backward()
    return "ended"


def test_a_rank_that_is_killed_ends_the_others_with_the_name_of_the_collective() -> None:
    """Two of three processes were waiting in backward; none of them hangs."""
    errors = ranks(3, backend="processes").errors(_killed_in_backward)
    assert "process of rank 1 ended" in str(errors[1])
    for rank in (0, 2):
        assert re.match(
            rf"gather_seq: reduce_scatter over ranks 0, 1, 2 \(this is {rank}\) did not complete: ",
            str(errors[rank]),
        ), errors[rank]
