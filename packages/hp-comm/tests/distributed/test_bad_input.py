"""Every primitive says what is wrong, on every rank, before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hp_comm import (
    count_tokens,
    exchange_head_tail,
    gather_seq,
    global_loss,
    head_to_seq,
    seq_to_head,
)
from hp_mesh.testing import count_collectives, randn, ranks

S2H, H2S = {"seq_dim": 1, "head_dim": 2}, {"seq_dim": 1, "head_dim": 2}
# fmt: off
BAD: dict[str, tuple[Any, tuple[int, ...], dict[str, Any], str]] = {
    "dim-out-of-range": (seq_to_head, (2, 6, 4, 3), {"seq_dim": 4, "head_dim": 2},
        r"seq_to_head: seq_dim \(4\) must be a dim of x \(\(2, 6, 4, 3\)\)"),
    "dim-bool": (seq_to_head, (2, 6, 4, 3), {"seq_dim": True, "head_dim": 2},
        r"seq_dim \(True\) must be an integer"),
    "same-dim": (head_to_seq, (2, 6, 4, 3), {"seq_dim": 1, "head_dim": -3},
        r"head_to_seq: seq_dim \(1\) must not be the same dim as head_dim \(-3\)"),
    "heads-do-not-divide": (seq_to_head, (2, 6, 3, 3), S2H,
        r"number of heads \(dim 2 of x \(2, 6, 3, 3\), 3\) must be divisible by the group size"),
    "rows-do-not-divide": (head_to_seq, (2, 7, 2, 3), H2S,
        r"sequence length \(dim 1 of x, 7\) must be divisible by the group size .*pass lengths="),
    "lengths-too-few": (seq_to_head, (2, 6, 4, 3), S2H | {"lengths": [6]},
        r"lengths \(1 entries\) must have one entry per rank of the group \(2\)"),
    "lengths-not-mine": (gather_seq, (2, 6, 3), {"seq_dim": 1, "lengths": [5, 5]},
        r"gather_seq: lengths\[[01]\] \(5\) must be this rank's length on dim 1 of x \(6\)"),
    "lengths-negative": (gather_seq, (2, 6, 3), {"seq_dim": 1, "lengths": [-6, 6]},
        r"lengths \(-6\) must hold integers of at least 0"),
    "lengths-sum": (head_to_seq, (2, 6, 2, 3), H2S | {"lengths": [2, 3]},
        r"lengths \(2, 3\) must sum to the sequence length \(dim 1 of x, 6\), not to 5"),
    "heads-too-few": (seq_to_head, (2, 6, 4, 3), S2H | {"heads": [[0, 1, 2, 3]]},
        r"heads \(1 entries\) must have one entry per rank of the group \(2\)"),
    "heads-unknown": (seq_to_head, (2, 6, 4, 3), S2H | {"heads": [[0, 1], [2, 4]]},
        r"heads \(4\) must be positions on dim 2 of x, which has 4 heads"),
    "heads-negative": (seq_to_head, (2, 6, 4, 3), S2H | {"heads": [[0, 1], [-1]]},
        r"heads \(-1\) must be positions"),
    "heads-flat": (seq_to_head, (2, 6, 4, 3), S2H | {"heads": [0, 1]},
        r"heads \(0\) must list, per rank"),
    "heads-twice": (head_to_seq, (2, 6, 2, 3), H2S | {"heads": [[0, 1], [1, 2]]},
        r"heads \(0, 1, 1, 2\) must hold each of the 4 heads once"),
    "heads-not-mine": (head_to_seq, (2, 6, 2, 3), H2S | {"heads": [[0], [1]]},
        r"heads\[[01]\] \(1 heads\) must be as many as dim 2 of x has \(2\)"),
}
# fmt: on


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_bad_input_is_refused_on_every_rank_before_a_collective(name: str, async_op: bool) -> None:
    """The message has the argument and both values; the next good call works."""
    call, shape, arguments, words = BAD[name]

    def on(rank: int) -> None:
        with count_collectives() as counted, pytest.raises(ValueError, match=words):
            call(randn(*shape), dist.group.WORLD, async_op=async_op, **arguments)
        assert counted.records == []
        gather_seq(randn(2, 3), dist.group.WORLD, seq_dim=0)

    ranks(2).run(on)


def test_what_is_no_tensor_is_a_type_error() -> None:
    """Also inside a sequence; an empty sequence is refused too."""

    def on(rank: int) -> None:
        with pytest.raises(TypeError, match=r"gather_seq: x \(NoneType\) must be a tensor"):
            gather_seq((randn(2, 3), None), dist.group.WORLD, seq_dim=0)
        with pytest.raises(ValueError, match=r"gather_seq: x \(empty sequence\)"):
            gather_seq((), dist.group.WORLD, seq_dim=0)
        with pytest.raises(TypeError, match=r"gather_seq: x \(int\) must be a tensor or a seq"):
            gather_seq(3, dist.group.WORLD, seq_dim=0)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match=r"count_tokens: weights \(int\) must be a tensor or"):
            count_tokens([randn(3) > 0, 3], dist.group.WORLD)  # type: ignore[list-item]
        with pytest.raises(ValueError, match=r"count_tokens: weights \(empty sequence\)"):
            count_tokens([], dist.group.WORLD)

    ranks(2).run(on)


def test_one_table_for_several_tensors_is_told_apart() -> None:
    """heads= is one table per tensor when x is a sequence."""

    def on(rank: int) -> None:
        xs = (randn(2, 6, 4, 3), randn(2, 6, 4, 3), randn(2, 6, 4, 3))
        with pytest.raises(ValueError, match=r"heads \(2 tables\) must have one table, or None"):
            seq_to_head(xs, dist.group.WORLD, **S2H, heads=[[0, 1], [2, 3]])

    ranks(2).run(on)


def test_a_rank_outside_the_group_is_told_so() -> None:
    """Not an error deep inside the backend, nor a count of its own tokens for that of all."""

    def on(rank: int) -> None:
        group = dist.new_group([0])
        if rank == 1:
            with pytest.raises(ValueError, match="must contain this rank"):
                exchange_head_tail(torch.zeros(2), group)
            with pytest.raises(ValueError, match=r"count_tokens: group .* must contain this rank"):
                count_tokens(torch.ones(2, dtype=torch.bool), group)

    ranks(2).run(on)


def test_a_mesh_is_told_apart_from_its_group() -> None:
    """torch would answer that the mesh is not registered and a group should be created."""

    def on(rank: int) -> None:
        mesh: Any = DeviceMesh("cpu", [0, 1])
        message = r"group \(DeviceMesh\) must be its group; pass mesh.get_group\(\)"
        with pytest.raises(TypeError, match="global_loss: " + message):
            global_loss(randn(3), mesh)
        with pytest.raises(TypeError, match="count_tokens: " + message):
            count_tokens(randn(3) > 0, mesh)
        with pytest.raises(TypeError, match="gather_seq: " + message):
            gather_seq(randn(2, 3), mesh, seq_dim=0)
        with pytest.raises(TypeError, match=r"global_loss: losses \(list\) must be a tensor"):
            global_loss([randn(3)], mesh.get_group())  # type: ignore[arg-type]

    ranks(2).run(on)
