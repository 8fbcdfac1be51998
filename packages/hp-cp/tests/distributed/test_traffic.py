"""What is sent and what is held: the plan's prediction, both counters, and the peak of memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hp_cp import make_plan
from hp_mesh.testing import count_collectives, largest_allocation, least_peak, poison_empty, ranks

from ._compare import EACH, MODES, Case, compare
from ._cores import Eager, Sdpa

SHARED = [
    Case(P=4, H=32, HK=8),
    Case(P=4, H=8, HK=2),
    Case(P=4, H=12, HK=1),
    Case(P=4, degree=2, H=8, HK=1),
    Case(P=4, degree=1, H=9, HK=3, DV=10),
    Case(P=3, DV=2),
    Case(P=4, degree=2, DV=10),
    Case(P=3, degree=1, load_balance=True, DV=10),
    Case(P=4, dtype=torch.float32),
]


@pytest.mark.parametrize("case", SHARED, ids=lambda c: f"{c}-D{c.D}:{c.DV}-{c.dtype}")
def test_bytes_are_what_the_plan_says(case: Case) -> None:
    """Both counters equal `Plan.describe` by kind, for shared heads, other V sizes and dtypes."""
    ranks(case.P).run(compare, case, Sdpa)


@pytest.mark.parametrize("case", MODES, ids=str)
def test_forward_and_backward_send_in_the_order_of_the_plan(case: Case) -> None:
    """Kind by kind as `describe` lists them, each on a group of the size it names."""

    def on(rank: int) -> None:
        sent = compare(rank, case, Sdpa)
        plan = make_plan(case.P, case.degree, case.load_balance).describe(
            num_heads=case.H,
            num_kv_heads=case.HK,
            seq_len=case.S,
            head_size=case.D,
            batch=case.B,
            element_size=8,
            rank=rank,
        )
        seen = [r for r in sent.counted.records if r.kind != "preflight"]
        planned = plan.collectives
        assert sorted((r.kind, r.bytes_sent) for r in seen) == sorted(
            (row.kind, row.bytes_sent) for row in planned
        )
        for kind, axis in (("all_to_all", "ulysses"), ("all_gather", "colossal")):
            for record in seen:
                if record.kind == kind:
                    assert record.ranks == plan.groups[axis]
        # q, k, v go out first and the output comes back last
        forward = [row.kind for row in planned if row.phase == "forward"]
        if not case.load_balance:
            assert [r.kind for r in seen[: len(forward)]] == forward

    ranks(case.P).run(on)


def test_behaviour_46_in_numbers() -> None:
    """cp 4, 32:8 heads: Ulysses sends 60*L*D elements in, Colossal receives 48*L*D."""

    def on(rank: int) -> None:
        for degree, elements in ((None, 60), (1, 48)):
            case = Case(P=4, degree=degree, B=1, H=32, HK=8)
            module = case.style().apply(Sdpa(), case.mesh())
            with torch.no_grad(), count_collectives() as counted:
                module(*(case.local(x, rank) for x in case.qkv()))
            expected = {"all_to_all": 2} if degree is None else {"all_gather": 2}
            assert counted.summary() == expected  # q, k, v share one all-to-all
            assert counted.bytes() == elements * case.S // 4 * case.D * 8

    ranks(4).run(on)


@pytest.mark.parametrize("case", EACH, ids=str)
def test_a_frozen_prefix_of_evaluation_sends_forward_only(case: Case) -> None:
    """Under ``no_grad`` each kind runs as often as the plan's forward, and nothing more."""

    def on(rank: int) -> None:
        module = case.style().apply(Sdpa(), case.mesh())
        plan = make_plan(case.P, case.degree, case.load_balance).describe(
            num_heads=12, num_kv_heads=4, seq_len=24, head_size=6, batch=2, element_size=8
        )
        with torch.no_grad(), count_collectives() as counted:
            module(*(case.local(x, rank) for x in case.qkv()))
        for kind in ("all_to_all", "all_gather", "reduce_scatter", "p2p"):
            assert counted.count(kind) == plan.count(kind, "forward")

    ranks(case.P).run(on)


class Keeps(nn.Module):
    """Returns q: whatever memory is used is the boundary's."""

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return q


@pytest.mark.parametrize("P", [2, 4])
def test_ulysses_holds_at_most_twice_what_it_exchanges(P: int) -> None:
    """Peak extra memory beside the inputs, forward: send and receive buffers and nothing else."""

    def on(rank: int) -> None:
        case = Case(P=P, S=96, H=12, HK=12, D=16, DV=16)
        local = [case.local(x, rank).contiguous() for x in case.qkv()]
        module = case.style().apply(Keeps(), case.mesh())
        exchanged = sum(x.nbytes for x in local)
        slack = 2 * 1024 * P  # the headers of the preflight
        predicted = make_plan(P).describe(
            num_heads=12, num_kv_heads=12, seq_len=96, head_size=16, batch=2, element_size=8
        )
        limit = min(2 * exchanged, predicted.peak_extra_bytes) + slack
        with torch.no_grad():
            peak = least_peak(lambda: module(*local), limit)
        assert peak <= 2 * exchanged + slack, (peak, exchanged)
        assert peak <= predicted.peak_extra_bytes + slack

    ranks(P).run(on)


@pytest.mark.parametrize("case", [Case(P=3, degree=1), Case(P=4, degree=2)], ids=str)
def test_a_gather_holds_what_the_plan_says(case: Case) -> None:
    """Colossal and Hybrid: the prediction is not below the peak of forward, and not far above."""
    case = case.but(S=96, D=16, DV=16)

    def on(rank: int) -> None:
        local = [case.local(x, rank).contiguous() for x in case.qkv()]
        module = case.style().apply(Keeps(), case.mesh())
        predicted = make_plan(case.P, case.degree).describe(
            num_heads=12, num_kv_heads=4, seq_len=96, head_size=16, batch=2, element_size=8
        )
        slack = 2 * 1024 * case.P  # the headers of the preflight
        with torch.no_grad():
            peak = least_peak(lambda: module(*local), predicted.peak_extra_bytes + slack)
        assert peak - slack <= predicted.peak_extra_bytes <= 1.25 * peak, (peak, predicted)

    ranks(case.P).run(on)


class Gives(torch.autograd.Function):
    """Hands back gradients that exist already, so that backward's memory is the boundary's."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.gradients = tuple(x.detach().clone() for x in (q, k, v))
        return q.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.gradients


class GivesGradients(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return Gives.apply(q, k, v)  # type: ignore[no-untyped-call]


def test_backward_of_ulysses_holds_at_most_twice_what_it_exchanges() -> None:
    """The gradients of q, k and v packed and received; the arrived ones are the leaves' own."""

    def on(rank: int) -> None:
        case = Case(P=2, S=96, H=12, HK=12, D=16, DV=16)
        local = [case.local(x, rank).clone().requires_grad_() for x in case.qkv()]
        module = case.style(use_local_input=True).apply(GivesGradients(), case.mesh())
        out = module(*local)
        upstream = torch.ones_like(out)
        exchanged = sum(x.nbytes for x in local)
        peak = least_peak(
            lambda: torch.autograd.grad(out, local, upstream, retain_graph=True), 2 * exchanged
        )
        assert peak <= 2 * exchanged, (peak, exchanged)

    ranks(2).run(on)


@pytest.mark.parametrize("core", [Sdpa, Eager])
@pytest.mark.parametrize("case", EACH, ids=str)
def test_no_uninitialised_memory_is_read(case: Case, core: type[nn.Module]) -> None:
    """Receive buffers filled with NaN before they are used leave no trace."""

    def on(rank: int) -> None:
        with poison_empty():
            compare(rank, case, core)

    ranks(case.P).run(on)


@pytest.mark.parametrize("case", EACH[1:], ids=str)
def test_gathered_keys_stay_within_the_plans_bound(case: Case) -> None:
    """`Description.peak_extra_bytes` bounds what Colossal, Hybrid and load balance hold."""

    def on(rank: int) -> None:
        own = case.but(S=96, D=16, DV=16)
        local = [own.local(x, rank).contiguous() for x in own.qkv()]
        module = own.style().apply(Keeps(), own.mesh())
        plan = make_plan(own.P, own.degree, own.load_balance).describe(
            num_heads=12, num_kv_heads=4, seq_len=96, head_size=16, batch=2, element_size=8
        )
        slack = 2 * 1024 * own.P
        with torch.no_grad():
            peak = least_peak(lambda: module(*local), plan.peak_extra_bytes + slack)
        assert peak <= plan.peak_extra_bytes + slack, (peak, plan.peak_extra_bytes)

    ranks(case.P).run(on)


@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize("DV", [6, 10])
@pytest.mark.parametrize("case", EACH[1:], ids=str)
def test_causal_attention_allocates_no_scores(case: Case, DV: int, dropout_p: float) -> None:
    """Nothing of size L x S, forward or backward, also where torch's own would (dropout, Dv)."""
    S = 2048

    def on(rank: int) -> None:
        own = case.but(B=1, S=S, H=2, HK=2, DV=DV)
        local = [own.local(x, rank).clone().requires_grad_() for x in own.qkv()]
        module = own.style().apply(Sdpa(dropout_p=dropout_p), own.mesh())
        with largest_allocation() as memory:
            module(*local).backward(own.local(own.upstream(), rank))
        rows = S // own.P // (2 if own.load_balance else 1)
        assert memory.largest < rows * S * 8, memory.largest_op

    ranks(case.P).run(on)
