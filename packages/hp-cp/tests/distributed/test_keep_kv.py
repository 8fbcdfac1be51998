"""keep_kv=False: K and V are gathered again in backward; numbers, traffic and memory."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hp_cp import ContextParallel, attention_window, make_plan
from hp_mesh._torch import WeakStorage, local_shard
from hp_mesh.testing import (
    assert_close,
    count_collectives,
    eventually,
    everywhere,
    peak_memory,
    randn,
    ranks,
)

from ._compare import Case, compare, compare_under_tensor_parallel, reference
from ._cores import Eager, Sdpa
from ._handoffs import Attention, apply, assert_overlaps, compare_steps

COLOSSAL = [Case(P=2, degree=1), Case(P=3, degree=1, HK=2, DV=4), Case(P=4, degree=1, H=7, HK=7)]
BALANCED = [Case(P=P, degree=1, load_balance=True) for P in (2, 3)]
HYBRID = [Case(P=4, degree=2), Case(P=4, degree=2, HK=1), Case(P=4, degree=2, HK=12, DV=4)]
UNEVEN = [Case(P=4, degree=2, HK=3), Case(P=6, degree=3)]
GROUPED = [
    Case(P=2, degree=1, head_groups=4),
    Case(P=3, degree=1, HK=2, head_groups=2, DV=4),
    Case(P=4, degree=2, HK=6, head_groups=3),
]
EACH = [COLOSSAL[0], BALANCED[0], HYBRID[0], GROUPED[2]]


@pytest.mark.parametrize("core", [Sdpa, Eager])
@pytest.mark.parametrize("case", [*COLOSSAL, *BALANCED, *HYBRID, *UNEVEN, *GROUPED], ids=str)
def test_numbers_are_those_of_one_device_and_traffic_is_the_plan_s(
    case: Case, core: type[Any]
) -> None:
    """Output, gradients; two more gathers in backward (per head group), with the plan's bytes."""
    ranks(case.P).run(compare, case, lambda: core(head_size=case.D), keep_kv=False)


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        *itertools.product([COLOSSAL[0], BALANCED[1]], ["BNSD", "SBHD", "TND", "BSH"]),
        *itertools.product([HYBRID[0], UNEVEN[0]], ["BNSD", "SBHD", "TND"]),
    ],
    ids=str,
)
def test_every_layout_and_any_strides(case: Case, layout: str) -> None:
    """Shards and the output's gradient with the last two dims swapped in memory; one row too."""
    case = case.but(layout=layout, B=1 if layout == "SBHD" else case.B)

    def strided(x: Tensor) -> Tensor:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)

    ranks(case.P).run(
        compare, case, lambda: Sdpa(layout), feed=strided, grad=strided, keep_kv=False
    )


@pytest.mark.parametrize("case", EACH, ids=str)
def test_plain_local_tensors_inside(case: Case) -> None:
    """``use_local_input``: what is saved is a plain view of K or V."""
    ranks(case.P).run(compare, case, Sdpa, use_local_input=True, keep_kv=False)


@pytest.mark.parametrize("case", [COLOSSAL[0], HYBRID[0], UNEVEN[0]], ids=str)
def test_behind_projections_too(case: Case) -> None:
    """AsyncContextParallel: what was sent ahead is gathered again, at the boundary, once."""

    def run(rank: int) -> None:
        seen = compare_steps(
            rank, case, place=lambda model: apply(model, case, keep_kv=False), micro=2
        )
        assert_overlaps(seen.boundary)
        for step in seen.traffic:
            assert step["all_gather"] == 2 * (2 + 2)
            assert step["reduce_scatter"] == 2 * 2

    ranks(case.P).run(run)


@pytest.mark.parametrize("core", [Sdpa, Eager])
@pytest.mark.parametrize("case", [COLOSSAL[0], BALANCED[0], HYBRID[0]], ids=str)
def test_with_tensor_parallel_dtensors(case: Case, core: type[nn.Module]) -> None:
    """Heads on a TP axis, sequence on CP."""
    case = case.but(H=8, HK=4)

    def run(rank: int) -> None:
        sent = compare_under_tensor_parallel(rank, case, core, 2, order=("cp", "tp"), keep_kv=False)
        assert sent.count("all_gather") == 4

    ranks(2 * case.P).run(run)


def _settled(count: Callable[[], int]) -> int:
    """Return the least of several counts; gloo's threads let go of buffers after the wait."""
    least = count()
    for _ in range(10):
        time.sleep(0.002)
        least = min(least, count())
    return least


class Watching(nn.Module):
    """SDPA that remembers, without holding them, the data of the k and v it was handed."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core
        self.seen: list[WeakStorage] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        locals_ = [local_shard(x) if isinstance(x, DTensor) else x for x in (k, v)]
        self.seen += [WeakStorage(x) for x in locals_]
        out: Tensor = self.core(q, k, v)
        return out


class Written(nn.Module):
    """Attention on BNSD in four ops, without a copy of K or V."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        mask = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool).tril()
        return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("core", [lambda: Sdpa("BNSD"), Written], ids=["Sdpa", "Written"])
@pytest.mark.parametrize("case", EACH, ids=str)
def test_k_and_v_are_gone_between_forward_and_backward(case: Case, core: Any) -> None:
    """Alive with keep_kv=True; with False they die with the call, and again within backward."""
    case = case.but(layout="BNSD", HK=12)

    def run(rank: int) -> None:
        for keep_kv in (True, False):
            module = case.style(keep_kv=keep_kv).apply(Watching(core()), case.mesh())
            local = [case.local(x, rank).clone().requires_grad_() for x in case.qkv()]
            out = module(*local)
            assert module.seen
            seen = module.seen
            if keep_kv:
                time.sleep(0.02)  # what is not kept is gone by then, but on a busy machine
                assert not any(one.expired() for one in seen)
            else:
                assert eventually(lambda seen=seen: all(one.expired() for one in seen))
            out.backward(case.local(case.upstream(), rank))

    ranks(case.P).run(run)


@pytest.mark.parametrize("case", [*COLOSSAL[:2], *BALANCED, *HYBRID, UNEVEN[0], *GROUPED], ids=str)
def test_saved_bytes_fall_by_what_the_plan_says(case: Case) -> None:
    """Live bytes after forward, and after a backward that retains the graph."""
    case = case.but(layout="BNSD")

    def saved(rank: int, keep_kv: bool) -> tuple[int, int, int]:
        module = case.style(keep_kv=keep_kv).apply(Sdpa("BNSD", causal=False), case.mesh())
        local = [case.local(x, rank).clone().requires_grad_() for x in case.qkv()]
        up = case.local(case.upstream(), rank).clone()
        with peak_memory() as memory:
            out = module(*local)
            forward = _settled(lambda: memory.live)
            out.backward(up, retain_graph=True)
        for x in local:
            x.grad = None
        after = _settled(lambda: memory.live)
        described = make_plan(case.P, case.degree, case.load_balance).describe(
            num_heads=case.H, num_kv_heads=case.HK, seq_len=case.S, head_size=case.D,
            v_head_size=case.DV, batch=case.B, element_size=8, rank=rank,
            head_groups=case.head_groups, keep_kv=keep_kv,
        )  # fmt: skip
        return forward, after, described.saved_kv_bytes

    def run(rank: int) -> None:
        for _ in range(20):
            (kept, kept_after, planned), (forgot, forgot_after, planned_less) = (
                saved(rank, keep_kv) for keep_kv in (True, False)
            )
            # in Colossal what is left are the inputs, which were there before
            fallen = planned - (planned_less if case.degree != 1 else 0)
            if everywhere(kept - forgot == kept_after - forgot_after == fallen):
                break  # else gloo's threads, on a busy machine, hold on to something for longer
        assert kept - forgot == fallen > 0
        assert kept_after - forgot_after == fallen

    ranks(case.P).run(run)


def test_ranks_that_save_different_things_gather_alike() -> None:
    """The last rank's keys are contiguous already, so only it saves K itself: nobody waits."""

    class Prefix(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            window = attention_window()
            assert window is not None
            k, v = (x[:, :, : window.query_end].contiguous() for x in (k, v))
            rows = torch.arange(window.query_start, window.query_end)
            scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            hidden = rows[:, None] < torch.arange(window.query_end)
            return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v

    def run(rank: int) -> int:
        case = Case(P=3, degree=1, HK=12, layout="BNSD")
        whole = case.qkv()
        expected, grads = reference(Eager("BNSD"), whole, case.upstream())
        module = case.style(use_local_input=True, keep_kv=False).apply(Prefix(), case.mesh())
        local = [case.local(x, rank).clone().requires_grad_() for x in whole]
        with count_collectives() as counted:
            out = module(*local)
            out.backward(case.local(case.upstream(), rank))
        assert_close(out, case.local(expected, rank))
        for x, full in zip(local, grads, strict=True):
            assert full is not None
            assert_close(x.grad, case.local(full, rank), kind="grad")
        return counted.count("all_gather")

    assert ranks(3).run(run) == [4] * 3


def test_hybrid_gathers_behind_the_output_s_exchange() -> None:
    """The gather is started before the all-to-all of the output's gradient, and used after it."""

    def run(rank: int) -> list[str]:
        case = Case(P=4, degree=2)
        module = case.style(keep_kv=False).apply(Sdpa(), case.mesh())
        local = [case.local(x, rank).clone().requires_grad_() for x in case.qkv()]
        out = module(*local)
        with count_collectives() as counted:
            out.backward(case.local(case.upstream(), rank))
        return [record.kind for record in counted.records]

    order = ["all_gather", "all_gather", "all_to_all", "reduce_scatter", "reduce_scatter"]
    assert ranks(4).run(run) == [[*order, "all_to_all"]] * 4


@pytest.mark.parametrize("case", [Case(P=2), Case(P=3, degree=3)], ids=str)
def test_ulysses_refuses_it_when_it_is_applied(case: Case) -> None:
    """Nothing is gathered there; one rank, where nothing is either, takes any setting."""

    def run(rank: int) -> str:
        with pytest.raises(ValueError, match="keep_kv") as caught:
            case.style(keep_kv=False).apply(Sdpa(), case.mesh())
        return str(caught.value)

    assert len(set(ranks(case.P).run(run))) == 1
    with pytest.raises(ValueError, match=r"keep_kv \(1\) must be True or False"):
        ContextParallel(keep_kv=1)  # type: ignore[arg-type]
    ranks(1).run(compare, Case(P=1), Sdpa, keep_kv=False)


def test_ranks_with_different_settings_are_told() -> None:
    """One would wait in a gather that the other never starts."""

    def run(rank: int) -> str:
        case = Case(P=2, degree=1)
        module = case.style(keep_kv=rank == 0).apply(Sdpa(), case.mesh())
        with pytest.raises(ValueError, match="keep_kv=False") as caught:
            module(*(case.local(x, rank) for x in case.qkv()))
        return str(caught.value)

    assert len(set(ranks(2).run(run))) == 1


def test_a_model_with_projections_needs_no_more_than_the_style() -> None:
    """keep_kv on the synchronous style inside a model: parameters' gradients add up."""

    def run(rank: int) -> None:
        case = HYBRID[0]

        def place(model: Any) -> Any:
            case.style(keep_kv=False).apply(model.core, case.mesh())
            return model

        reference_model, model = Attention(case), place(Attention(case))
        x = randn(2, case.S, 10, seed=3)
        reference_model(x).square().sum().backward()
        model(x.chunk(case.P, 1)[rank]).square().sum().backward()
        for p, full in zip(model.parameters(), reference_model.parameters(), strict=True):
            assert p.grad is not None
            dist.all_reduce(p.grad)
            assert_close(p.grad, full.grad, kind="grad")

    ranks(4).run(run)
