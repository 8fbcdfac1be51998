"""k and v of another sequence than q, both sharded: cross attention in every mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hp_cp import AsyncContextParallel, ContextParallel
from hp_mesh.boundary import boundary_of
from hp_mesh.testing import assert_close, count_collectives, randn, ranks

from ._compare import Case, compare_under_tensor_parallel, reference
from ._cores import Eager, Sdpa

KEYS = 36
CASES = [
    Case(P=2, DV=4),
    Case(P=3, HK=3),
    Case(P=2, degree=1, DV=4, layout="BNSD"),
    Case(P=3, degree=1, H=7, HK=7),
    Case(P=4, degree=2, DV=4),
]


def _whole(case: Case, keys: int) -> list[Tensor]:
    q = case.qkv()[0]
    return [q, *case.but(S=keys).qkv()[1:]]


def _sent(case: Case, keys: int) -> dict[str, tuple[int, int]]:
    """Count forward and backward: elements of 8 bytes, k and v of so many rows."""
    B, P, u = case.B, case.P, case.P if case.degree is None else case.degree
    rows_q, rows_k = B * case.S // P, B * keys // P
    # what crosses the Ulysses group: 1 - 1/u of q, k, v and of the output
    heads_kv = max(case.HK, u) if u > 1 else case.HK
    out = rows_q * case.H * case.DV
    each = rows_q * case.H * case.D + rows_k * heads_kv * (case.D + case.DV) + out
    sent = {}
    if u < P:
        local = rows_k * heads_kv * (case.D + case.DV)  # of u ranks' rows 1/u of the heads
        sent["all_gather"] = (2, 8 * local * (P // u - 1))  # k, v
        sent["reduce_scatter"] = sent["all_gather"]
    if u > 1:
        sent["all_to_all"] = (4, 2 * 8 * each * (u - 1) // u)
    return sent


def _compare(rank: int, case: Case, core: Any, keys: int, mask: Tensor | None = None) -> None:
    whole = _whole(case, keys)
    extra = [] if mask is None else [mask]
    expected, grads = reference(core(case.layout), [*whole, *extra], case.upstream())
    module = case.style(cross_attention=True).apply(core(case.layout), case.mesh())
    local = [case.local(x, rank).clone().requires_grad_() for x in whole]
    with count_collectives() as counted:
        out = module(*local, *extra)
        out.backward(case.local(case.upstream(), rank))
    assert_close(out, case.local(expected, rank))
    for name, x, full in zip("qkv", local, grads, strict=False):
        assert full is not None
        assert_close(x.grad, case.local(full, rank), kind="grad", name=f"d{name}")
    seen = {kind: (counted.count(kind), counted.bytes(kind)) for kind in counted.summary()}
    assert seen == _sent(case, keys) == case.predicted(rank, kv_seq_len=keys)


@pytest.mark.parametrize("keys", [KEYS, 12], ids=["more", "fewer"])
@pytest.mark.parametrize("core", [Sdpa, Eager])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_keys_of_another_sequence(case: Case, core: type[nn.Module], keys: int) -> None:
    """Output and every gradient, and the bytes; fewer and more keys than queries, V's own size."""

    def build(layout: str) -> nn.Module:
        return core(layout, causal=False)

    ranks(case.P).run(_compare, case, build, keys)


@pytest.mark.parametrize("core", [Sdpa, Eager])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_mask_of_queries_and_keys_is_cut_to_the_rank(case: Case, core: type[nn.Module]) -> None:
    """``[Sq, Sk]``, built for one device."""
    mask = randn(case.S, KEYS, seed=5) > -0.5
    mask[:, 0] = True
    ranks(case.P).run(_compare, case, core, KEYS, mask)


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[4]], ids=str)
def test_causal_means_what_torch_means_by_it(case: Case) -> None:
    """Row i sees keys up to i, whatever their number."""
    ranks(case.P).run(_compare, case, Sdpa, KEYS)


@pytest.mark.parametrize("degree", [None, 1], ids=["ulysses", "colossal"])
def test_projections_send_ahead_as_in_self_attention(degree: int | None) -> None:
    """Three steps of a layer whose memory has its own length; nothing is given up."""
    case = Case(P=2, degree=degree)

    def layer() -> Any:
        return nn.ModuleDict(
            {
                name: nn.Linear(72 if name == "q" else 24, 72 if name == "q" else 24)
                for name in "qkv"
            }
        ).double()

    def call(model: Any, core: nn.Module, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = (model[n](x if n == "q" else memory).unflatten(-1, (-1, 6)) for n in "qkv")
        return core(q, k, v)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        weights = layer().state_dict()
    x, memory = randn(2, 24, 72, seed=1), randn(2, KEYS, 24, seed=2)
    whole = layer()
    whole.load_state_dict(weights)
    expected = call(whole, Sdpa(causal=False), x, memory)
    expected.square().sum().backward()

    def run(rank: int) -> None:
        model, core = layer(), Sdpa(causal=False)
        model.load_state_dict(weights)
        style = AsyncContextParallel(ulysses_degree=degree, cross_attention=True)
        style.apply(core, case.mesh(), model["q"], model["k"], model["v"])
        for _ in range(3):
            model.zero_grad()
            out = call(model, core, case.local(x, rank), case.local(memory, rank))
            assert_close(out, case.local(expected, rank))
            out.square().sum().backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                torch.distributed.all_reduce(parameter.grad)
                full = whole.get_parameter(name).grad
                assert_close(parameter.grad, full, kind="grad", name=name)
        handoffs = boundary_of(core).handoffs.values()
        assert not any(one.disarmed for one in handoffs)

    ranks(2).run(run)


@pytest.mark.parametrize("order", [("cp", "tp"), ("tp", "cp")], ids="-".join)
@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[4]], ids=str)
def test_it_composes_with_tp(case: Case, order: tuple[str, str]) -> None:
    """Heads cut by TP, V's head size its own, another number of keys."""
    case = case.but(H=8, HK=4)
    options: dict[str, Any] = {"whole": _whole(case, KEYS), "order": order, "cross_attention": True}

    def core() -> nn.Module:
        return Sdpa(case.layout, causal=False)

    ranks(case.P * 2).run(compare_under_tensor_parallel, case, core, 2, **options)


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_keys_without_gradients_cost_nothing_in_backward(case: Case) -> None:
    """A frozen memory: q's gradient is right, and of k and v nothing is sent back."""
    whole = _whole(case, KEYS)
    leaf = whole[0].clone().requires_grad_()
    Sdpa(case.layout, causal=False)(leaf, *whole[1:]).backward(case.upstream())

    def run(rank: int) -> None:
        module = case.style(cross_attention=True).apply(
            Sdpa(case.layout, causal=False), case.mesh()
        )
        q, k, v = (case.local(x, rank) for x in whole)
        q = q.clone().requires_grad_()
        out = module(q, k, v)
        with count_collectives() as counted:
            out.backward(case.local(case.upstream(), rank))
        assert leaf.grad is not None
        assert_close(q.grad, case.local(leaf.grad, rank), kind="grad")
        # Ulysses: the output's gradient, then that of q alone
        sizes = (case.D + case.DV) * 8 * case.B * case.S // case.P * case.H
        ulysses = {"all_to_all": 2} if case.degree is None else {}
        assert counted.summary() == ulysses
        assert counted.bytes() == (sizes * (case.P - 1) // case.P if ulysses else 0)

    ranks(case.P).run(run)


def test_it_is_asked_for_and_refused_beside_what_counts_on_one_sequence() -> None:
    """Without the option other lengths stay an error; k and v must always agree."""
    for options in (
        {"load_balance": True},
        {"balance_hybrid": True, "ulysses_degree": 2},
        {"kv_chunks": 2},
        {"sliding_window": 5},
    ):
        with pytest.raises(ValueError, match=rf"must not come with {next(iter(options))}"):
            ContextParallel(**{"ulysses_degree": 1, "cross_attention": True, **options})
    with pytest.raises(ValueError, match="must not come with head_groups"):
        AsyncContextParallel(cross_attention=True, head_groups=2)
    with pytest.raises(ValueError, match="must be True or False"):
        ContextParallel(cross_attention=1)  # type: ignore[arg-type]
    case = Case(P=2)

    def run(rank: int) -> str:
        module = case.style(cross_attention=True).apply(Sdpa(), case.mesh())
        q, k, v = (case.local(x, rank) for x in case.qkv())
        with pytest.raises(ValueError, match=r"k and v .* must have one length") as caught:
            module(q, k[:, :6], v)
        with pytest.raises(ValueError, match="local sequence length of k and v must be the same"):
            module(q, *(x[:, : 6 + rank] for x in (k, v)))
        return str(caught.value)

    first, second = ranks(2).run(run)
    assert first == second
