"""Load balance: a rank computes its own head and its mirror's tail; order outside is natural."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from torch import Tensor, nn

from hp_cp import attention_window
from hp_mesh.testing import assert_close, count_collectives, ranks

from ._compare import BALANCED, Case, compare
from ._cores import Eager, Sdpa

TWO = Case(P=2, degree=1, load_balance=True)
FOUR = Case(P=4, degree=1, load_balance=True)


@pytest.mark.parametrize("P", [1, 2, 3, 4, 5])
def test_each_rank_computes_its_head_and_the_mirrors_tail(P: int) -> None:
    """Behaviours 19, 20: chunks {2r, 2(P-1-r)+1}, two calls, equal causal pairs on all ranks."""

    def on(rank: int) -> int:
        case = Case(P=P, degree=1, load_balance=True, S=8 * P, H=2, HK=2)
        starts = []
        pairs = 0

        class Probe(Sdpa):
            def forward(self, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
                nonlocal pairs
                window = attention_window()
                assert window is not None and window.query_length == 4
                assert q.shape[1] == 4 * P and k.shape[1] == 8 * P
                starts.append(window.query_start // 4)
                pairs += sum(range(window.query_start + 1, window.query_end + 1))
                return super().forward(q, k, v)

        local = [case.local(x, rank) for x in case.qkv()]
        case.style().apply(Probe(), case.mesh())(*local)
        assert starts == [2 * rank, 2 * (P - 1 - rank) + 1]
        return pairs

    pairs = ranks(P).run(on)
    assert len(set(pairs)) == 1
    assert sum(pairs) == 8 * P * (8 * P + 1) // 2


@pytest.mark.parametrize("core", [Sdpa, Eager])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("case", [*BALANCED, FOUR.but(S=8)], ids=lambda c: f"P{c.P}-S{c.S}")
def test_balanced_equals_unbalanced_whatever_the_mask(
    case: Case, causal: bool, core: type[nn.Module]
) -> None:
    """B06: causal or not, chunks of one token, and the middle rank of 3, its own mirror."""
    ranks(case.P).run(compare, case, lambda: core(causal=causal))


def test_the_middle_rank_sends_nothing_to_itself() -> None:
    """Behaviour 21: on 3 ranks, rank 1 keeps both halves: no point-to-point at all."""

    def on(rank: int) -> None:
        case = Case(P=3, degree=1, load_balance=True)
        sent = compare(rank, case, Sdpa)
        assert sent.counted.count("p2p") == (0 if rank == 1 else 4)

    ranks(3).run(on)


def test_one_rank_is_bit_equal_to_the_bare_halves() -> None:
    """Behaviour 6: load balance on one rank sends nothing and joins the two halves."""

    def on(rank: int) -> None:
        case = Case(P=1, degree=1, load_balance=True)
        q, k, v = case.qkv()
        with count_collectives() as counted:
            out = case.style().apply(Sdpa(causal=False), case.mesh())(q, k, v)
        assert_close(out, Sdpa(causal=False)(q, k, v))
        assert not counted.records

    ranks(1).run(on)


def test_qkv_by_keyword_are_balanced_too() -> None:
    """Behaviour 21: all of them or some."""

    def call(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return module(value=v, query=q, key=k)

    names = ("query", "key", "value")
    ranks(4).run(compare, FOUR, Sdpa, call=call, qkv_kwarg_names=names)
    mixed = lambda m, q, k, v: m(q, k, value=v)  # noqa: E731
    ranks(2).run(compare, TWO, Sdpa, call=mixed, qkv_kwarg_names=names)


class Pair(NamedTuple):
    out: Tensor
    twice: Tensor
    note: str


class Two(Sdpa):
    """Returns a namedtuple of two tensors that both have rows, and something else."""

    def forward(self, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        out = super().forward(q, k, v)
        return Pair(out, 2 * out, "kept")


def test_declared_outputs_are_joined_and_keep_their_type() -> None:
    """Behaviours 21, 26: a namedtuple with two tensors that have the sequence."""

    def on(rank: int) -> None:
        whole = [x.requires_grad_() for x in FOUR.qkv()]
        expected = Two()(*whole)
        (expected.out + expected.twice).backward(FOUR.upstream())
        local = [FOUR.local(x.detach(), rank).clone().requires_grad_() for x in whole]
        result = FOUR.style(outputs=(0, 1)).apply(Two(), FOUR.mesh())(*local)
        assert type(result) is Pair and result.note == "kept"
        assert_close(result.out, FOUR.local(expected.out, rank))
        assert_close(result.twice, FOUR.local(expected.twice, rank))
        (result.out + result.twice).backward(FOUR.local(FOUR.upstream(), rank))
        for x, y in zip(local, whole, strict=True):
            assert y.grad is not None
            assert_close(x.grad, FOUR.local(y.grad, rank), kind="grad")

    ranks(4).run(on)


def test_an_undeclared_second_tensor_is_refused() -> None:
    """It would hold the rows of one half; the message says what to declare."""

    def on(rank: int) -> None:
        module = TWO.style().apply(Two(), TWO.mesh())
        with pytest.raises(TypeError, match="outputs="):
            module(*(TWO.local(x, rank) for x in TWO.qkv()))
        compare(rank, TWO, Sdpa)

    ranks(2).run(on)


def test_a_causal_mask_sized_from_q_is_refused_with_the_reason() -> None:
    """Design 3.1: q is half of the sequence in head-tail order, so such a mask has wrong rows."""

    def on(rank: int) -> None:
        module = TWO.style().apply(Eager(mask_from="q"), TWO.mesh())
        with pytest.raises(ValueError, match="take its length from k"):
            module(*(TWO.local(x, rank) for x in TWO.qkv()))
        compare(rank, TWO, Eager)

    ranks(2).run(on)


@pytest.mark.parametrize("failing", [1, 2], ids=["first-call", "second-call"])
def test_an_exception_in_either_call_leaves_nothing_behind(failing: int) -> None:
    """Behaviour 21, U6: the next call, balanced or not, is right."""

    def on(rank: int) -> None:
        class Fails(Sdpa):
            calls = 0

            def forward(self, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
                self.calls += 1
                if self.calls == failing:
                    raise RuntimeError("on purpose")
                return super().forward(q, k, v)

        module = TWO.style().apply(Fails(), TWO.mesh())
        with pytest.raises(RuntimeError, match="on purpose"):
            module(*(TWO.local(x, rank) for x in TWO.qkv()))
        assert attention_window() is None
        compare(rank, TWO, Sdpa, applied=module)
        compare(rank, TWO.but(load_balance=False), Sdpa)

    ranks(2).run(on)


def test_an_odd_local_length_is_refused_and_no_token_dropped() -> None:
    """Behaviour 21: 10 tokens on 2 ranks are 5 and 5; the next good length is 12."""

    def on(rank: int) -> None:
        case = TWO.but(S=10)
        module = case.style().apply(Sdpa(), case.mesh())
        with pytest.raises(ValueError, match="pad the sequence to 12 with pad_sequence"):
            module(*(case.local(x, rank) for x in case.qkv()))
        compare(rank, TWO, Sdpa, applied=module)

    ranks(2).run(on)


def test_gradient_checkpointing_balances_again() -> None:
    """Recompute runs both halves again and gives the same gradients."""
    from torch.utils.checkpoint import checkpoint

    def call(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return checkpoint(module, q, k, v, use_reentrant=False)

    ranks(4).run(compare, FOUR, Sdpa, call=call, check_traffic=False)
