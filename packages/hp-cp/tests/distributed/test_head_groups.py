"""AsyncContextParallel(head_groups=h): the module runs h times on slices of the heads."""

from __future__ import annotations

import threading
from math import inf
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_comm.moves import Pending
from hp_cp import AsyncContextParallel, make_plan
from hp_mesh.testing import count_collectives, least_peak, randn, ranks

from ._compare import Case, compare, compare_under_tensor_parallel
from ._cores import Eager, Sdpa

GROUPED = [
    Case(P=2, head_groups=2),
    Case(P=2, HK=6, head_groups=3),
    Case(P=4, HK=6, head_groups=3),
    Case(P=4, HK=12, head_groups=3, layout="BNSD"),
    Case(P=4, H=24, HK=12, head_groups=2),  # a rank's 3 heads of a group share 2 unevenly
    Case(P=2, degree=1, head_groups=4),
    Case(P=3, degree=1, HK=2, head_groups=2, DV=4),
    Case(P=4, degree=2, head_groups=2),
    Case(P=4, degree=2, HK=6, head_groups=6, layout="TND"),
    Case(P=1, HK=2, head_groups=2),
]


@pytest.mark.parametrize("case", GROUPED, ids=lambda c: f"{c}-h{c.head_groups}")
@pytest.mark.parametrize("core", [Sdpa, Eager])
def test_head_groups_give_the_numbers_and_bytes_of_one_call(core: Any, case: Case) -> None:
    """Output, gradients and traffic: h times the calls, and the bytes that the plan says."""
    ranks(case.P).run(compare, case, lambda: core(case.layout, head_size=case.D))


@pytest.mark.parametrize("heads", ["all", "one"])
@pytest.mark.parametrize("case", [GROUPED[0], GROUPED[5], GROUPED[7]], ids=str)
def test_a_mask_with_all_heads_is_cut_to_the_group(case: Case, heads: str) -> None:
    """A float mask per head, with its gradient; every group sees its own heads of it, or one."""
    bias = randn(1, case.H if heads == "all" else 1, case.S, case.S, seed=5)
    ranks(case.P).run(
        compare,
        case,
        lambda: Sdpa(case.layout, head_size=case.D),
        extra=[bias],
        call=lambda module, q, k, v, mask: module(q, k, v, attn_mask=mask),
    )


def test_the_next_group_is_on_the_wire_while_one_computes() -> None:
    """Before each call of the module the exchange of the following group has been started."""

    class Spy(nn.Module):
        def __init__(self, counted: count_collectives) -> None:
            super().__init__()
            self.counted, self.started = counted, list[int]()

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.started.append(self.counted.count())
            return q * 1

    def run(rank: int) -> list[int]:
        case = Case(P=2, HK=12, head_groups=3)
        with count_collectives() as counted:
            core = Spy(counted)
            case.style().apply(core, case.mesh())
            core(*(case.local(x, rank) for x in case.qkv()))
        return core.started

    # two exchanges in before the first call; then each call finds one more in and one more out
    assert ranks(2).run(run) == [[2, 4, 5]] * 2


def test_an_exchange_is_waited_for_behind_the_attention_that_hides_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward and backward: the exchange of the next group ends after the attention of this one."""
    events: dict[int, list[str]] = {}

    def log(event: str) -> None:
        events.setdefault(threading.get_ident(), []).append(event)

    finish = Pending.finish

    def logged(self: Pending) -> Any:
        log("wait")
        return finish(self)

    class Work(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor) -> Tensor:
            log("attention")
            return q * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            log("attention")
            return grad * 1

    class Core(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = Work.apply(q)  # type: ignore[no-untyped-call]
            return out

    def run(rank: int) -> tuple[list[str], list[str]]:
        case = Case(P=2, HK=12, head_groups=3)
        core = case.style(use_local_input=True).apply(Core(), case.mesh())
        out = core(*(case.local(x, rank).requires_grad_() for x in case.qkv()))
        forward = events.pop(threading.get_ident())
        out.sum().backward()
        return forward, events.pop(threading.get_ident())

    monkeypatch.setattr(Pending, "finish", logged)
    outputs = ["wait"] * 3
    for forward, backward in ranks(2).run(run):
        assert forward == ["wait", "attention"] * 3 + outputs
        # all outputs' gradients are launched before the first is waited for; the gradients of the
        # last group (q, k, v of group 2) are waited for behind the attention of group 1
        assert backward == ["wait", "attention"] * 2 + ["wait", "wait", "attention"] + outputs[1:]


@pytest.mark.parametrize(
    ("options", "heads", "message"),
    [
        ({"head_groups": 0}, None, r"head_groups \(0\) must be at least 1"),
        ({"head_groups": True}, None, r"head_groups \(True\) must be an integer"),
        (
            {"head_groups": 2, "ulysses_degree": 1, "load_balance": True},
            None,
            r"head_groups \(2\) must be 1 with load_balance=True",
        ),
    ],
)
def test_head_groups_that_cannot_be_are_refused_at_once(
    options: dict[str, Any], heads: None, message: str
) -> None:
    """What a constructor can know."""
    with pytest.raises(ValueError, match=message):
        AsyncContextParallel(**options)


def test_head_groups_that_part_heads_are_refused_on_every_rank() -> None:
    """The error names the numbers and what would do; the next good call works."""

    def run(rank: int) -> str:
        case = Case(P=2, HK=4, head_groups=3)
        core = Sdpa()
        case.style().apply(core, case.mesh())
        with pytest.raises(ValueError, match="head_groups") as caught:
            core(*(case.local(x, rank) for x in case.qkv()))
        good = Case(P=2, HK=6, head_groups=3)
        compare(rank, good, Sdpa, applied=core)
        return str(caught.value)

    first, second = ranks(2).run(run)
    assert first == second
    assert "num_kv_heads (4) of k, v must be divisible by head_groups (3)" in first
    assert "use head_groups=1 or 2" in first


def test_the_exchanges_in_flight_are_those_of_few_heads() -> None:
    """describe(): with 4 groups a quarter of the gathered K and V is held at a time."""
    plan = make_plan(4, 1)
    sizes: dict[str, Any] = {
        "num_heads": 8, "num_kv_heads": 8, "seq_len": 64, "head_size": 16,
    }  # fmt: skip
    one, four = plan.describe(**sizes), plan.describe(**sizes, head_groups=4)

    assert four.resident_kv_bytes * 4 == one.resident_kv_bytes
    assert four.bytes() == one.bytes()
    assert four.count() == 4 * one.count()


def test_a_second_tensor_output_is_refused() -> None:
    """Each call returns a part of every output; only declared ones can be joined."""

    class TwoOutputs(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return q * 1, torch.ones(())

    def run(rank: int) -> None:
        case = Case(P=2, HK=12, head_groups=2)
        core = TwoOutputs()
        case.style().apply(core, case.mesh())
        with pytest.raises(TypeError, match="with head_groups the module is called several times"):
            core(*(case.local(x, rank) for x in case.qkv()))

    ranks(2).run(run)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_exception_in_any_group_leaves_nothing_in_flight(failing: int) -> None:
    """What was sent is waited for, without a warning, and the next good call is right."""

    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core, self.calls, self.broken = Sdpa(), 0, True

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.calls += 1
            if self.broken and self.calls == failing + 1:
                raise RuntimeError("broken on purpose")
            out: Tensor = self.core(q, k, v)
            return out

    def run(rank: int) -> None:
        for case in (Case(P=4, HK=6, head_groups=3), Case(P=4, degree=2, HK=6, head_groups=3)):
            core = Fragile()
            case.style().apply(core, case.mesh())
            with pytest.raises(RuntimeError, match="broken on purpose"):
                core(*(case.local(x, rank).requires_grad_() for x in case.qkv()))
            core.broken = False
            compare(rank, case, Sdpa, applied=core)

    ranks(4).run(run)


@pytest.mark.parametrize("case", [GROUPED[1], GROUPED[5], GROUPED[6]], ids=str)
def test_a_bias_with_all_heads_is_cut_in_eager_attention(case: Case) -> None:
    """ALiBi-like slopes ``[H, 1, 1]`` meet the scores of one group; their gradient is a share."""

    class Biased(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            repeat = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
            scores = q @ k.transpose(-1, -2)
            scores = scores + slopes * torch.arange(k.shape[2], dtype=q.dtype)
            return (scores.softmax(-1) @ v).transpose(1, 2)

    ranks(case.P).run(compare, case, Biased, extra=[randn(case.H, 1, 1, seed=7)])


@pytest.mark.parametrize("where", ["pre", "post"])
@pytest.mark.parametrize("several", [{"head_groups": 2}, {"degree": 1, "load_balance": True}])
def test_a_hook_that_would_see_one_call_of_many_is_refused(
    several: dict[str, Any], where: str
) -> None:
    """A scaling hook inside the boundary would scale a part of the output; outside it is fine."""

    def run(rank: int) -> None:
        case = Case(P=2).but(**several)
        core = Sdpa()
        if where == "post":
            handle = core.register_forward_hook(lambda module, args, out: out * 2)
        case.style().apply(core, case.mesh())
        if where == "pre":
            handle = core.register_forward_pre_hook(lambda module, args: tuple(2 * x for x in args))
        shards = [case.local(x, rank) for x in case.qkv()]
        with pytest.raises(ValueError, match="would run for one call only"):
            core(*shards)
        handle.remove()
        compare(rank, case, Sdpa, applied=core)

    ranks(2).run(run)


def test_an_output_with_its_heads_elsewhere_is_refused() -> None:
    """Colossal cannot read from a DTensor where the heads are; joined elsewhere they are wrong."""

    class Swapped(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return q.transpose(2, 3) * 1

    def run(rank: int) -> str:
        case = Case(P=2, degree=1, D=5, DV=5, head_groups=2)
        core = Swapped()
        case.style().apply(core, case.mesh())
        with pytest.raises(ValueError, match="head group") as caught:
            core(*(case.local(x, rank) for x in case.qkv()))
        case.style(output_head_dim=3).apply(good := Swapped(), case.mesh())
        q = case.qkv()[0]
        out = good(*(case.local(x, rank) for x in case.qkv()))
        assert torch.equal(out, case.local(q.transpose(2, 3), rank))
        return str(caught.value)

    first, second = ranks(2).run(run)
    assert first == second
    assert "must have the group's heads on this rank (6) in dim 2" in first
    assert "output_head_dim" in first


class _Narrow(nn.Module):
    """Returns next to nothing, so that what is alive meanwhile is q, k and v."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q[..., :1] * 1


MEMORY = [
    Case(P=2, S=96, H=16, HK=16, D=24, DV=24),
    Case(P=2, degree=1, S=96, H=8, HK=8, D=24, DV=24),
    Case(P=4, degree=2, S=96, H=16, HK=16, D=24, DV=24),
]


@pytest.mark.parametrize("groups", [4, 8])
@pytest.mark.parametrize("case", MEMORY, ids=str)
def test_without_a_graph_two_groups_are_in_memory_at_a_time(case: Case, groups: int) -> None:
    """Evaluation, and forward under activation checkpointing: the one at work, one on the wire."""

    def peak(rank: int, one: Case, limits: list[float]) -> int:
        core = _Narrow()
        one.style().apply(core, one.mesh())
        shards = [one.local(x, rank).contiguous() for x in one.qkv()]
        with torch.no_grad():
            core(*shards)
            return least_peak(lambda: core(*shards), limits[rank])

    whole = ranks(case.P).run(peak, case, [inf] * case.P)
    limits = [(2 / groups + 0.1) * one for one in whole]
    parts = ranks(case.P).run(peak, case.but(head_groups=groups), limits)
    for part, limit in zip(parts, limits, strict=True):
        assert part <= limit


class _ReadsKV(nn.Module):
    """Saves K and V for backward and returns one number per row and head."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q[..., :1] * (k * v).mean((1, 3), keepdim=True)


@pytest.mark.parametrize("groups", [4, 8])
def test_with_kv_gathered_again_backward_holds_few_groups_as_well(groups: int) -> None:
    """keep_kv=False: forward and backward each hold K and V of the groups at work only."""
    case = MEMORY[1]

    def peak(rank: int, one: Case, limits: list[float]) -> int:
        core = _ReadsKV()
        one.style(keep_kv=False).apply(core, one.mesh())
        shards = [one.local(x, rank).contiguous().requires_grad_() for x in one.qkv()]

        def step() -> None:
            for x in shards:
                x.grad = None
            core(*shards).sum().backward()

        return least_peak(step, limits[rank])

    whole = ranks(case.P).run(peak, case, [inf] * case.P)
    # gradients of the three shards are the caller's, whole on both sides; not the boundary's
    grads = 3 * case.local(case.qkv()[0], 0).nbytes
    limits = [(2 / groups + 0.1) * (one - grads) + grads for one in whole]
    parts = ranks(case.P).run(peak, case.but(head_groups=groups), limits)
    for part, limit in zip(parts, limits, strict=True):
        assert part <= limit


class PerHead(nn.Module):
    """Attention with a bias ``[H, 1, S]``, as the mask of SDPA or added to the scores."""

    def __init__(self, bias: Tensor, *, eager: bool) -> None:
        super().__init__()
        self.bias, self.eager = bias, eager

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if self.eager:
            repeat = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
            out = (q @ k.transpose(-1, -2) * 0.4 + self.bias).softmax(-1) @ v
        else:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=self.bias[None], scale=0.4, enable_gqa=True
            )
        return out.transpose(1, 2)


@pytest.mark.parametrize("eager", [False, True], ids=["sdpa", "eager"])
@pytest.mark.parametrize(
    "case",
    [
        Case(P=2, H=24, HK=8, head_groups=2),
        Case(P=2, degree=1, H=24, HK=12, head_groups=3),
        Case(P=4, degree=2, H=24, HK=8, head_groups=2),
    ],
    ids=str,
)
def test_biases_per_head_find_their_group_under_tp(case: Case, eager: bool) -> None:
    """Each rank of TP has heads of every group: a group's heads lie apart in the model's.

    The bias is given for all heads of the model, and for those of the rank of TP.
    """
    bias = randn(case.H, 1, case.S, seed=5)

    def core() -> nn.Module:
        return PerHead(bias, eager=eager)

    def of_rank(tp: int) -> nn.Module:
        return PerHead(bias.chunk(2)[tp], eager=eager)

    def on(rank: int) -> None:
        compare_under_tensor_parallel(rank, case, core, 2)
        compare_under_tensor_parallel(rank, case, core, 2, on_tp_rank=of_rank)

    ranks(2 * case.P).run(on)
