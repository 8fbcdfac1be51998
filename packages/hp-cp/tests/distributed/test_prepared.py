"""PreparedAttention: QK-norm and rotary done by the boundary, in every mode, sync or ahead."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hp_cp import AsyncContextParallel, ContextParallel, Handoff, HeadWork, PreparedAttention
from hp_mesh.testing import randn, ranks

from ._compare import Case
from ._cores import Sdpa
from ._handoffs import DIM, compare_steps, linear

MODES = {
    "ulysses": Case(P=2),
    "ulysses-BNSD": Case(P=4, layout="BNSD"),
    "ulysses-KV-repeated": Case(P=4, H=8, HK=2),
    "colossal": Case(P=2, degree=1, layout="BNSD"),
    "colossal-P3": Case(P=3, degree=1),
    "hybrid": Case(P=4, degree=2, layout="BNSD"),
}


class Attention(nn.Module):
    """Projections, QK-norm and rotary that the core is told of, and the core."""

    def __init__(self, case: Case, *, norm: bool = True) -> None:
        super().__init__()
        self.case = case
        for seed, (name, heads) in enumerate((("q", case.H), ("k", case.HK), ("v", case.HK))):
            self.add_module(f"{name}_proj", linear(DIM, heads * case.D, 10 * seed))
            self.add_module(f"{name}_handoff", Handoff())
        self.scales = nn.ParameterList(
            [1 + randn(case.D, seed=50 + i) / 5 for i in range(2)] if norm else []
        )
        self.rows = slice(None)
        self.core = PreparedAttention(Sdpa(case.layout, head_size=case.D))

    def works(self) -> list[HeadWork]:
        """What is to be done to q and k, on the rows that this rank has."""
        angle = randn(1, self.case.S, 1, self.case.D // 2, seed=40)[:, self.rows]
        if self.case.layout == "BNSD":
            angle = angle.transpose(1, 2)
        scales = list(self.scales) or [None, None]
        return [HeadWork(scale, 1e-5, angle.cos(), angle.sin()) for scale in scales]

    def heads(self, name: str, x: Tensor) -> Tensor:
        y = getattr(self, f"{name}_proj")(x).unflatten(-1, (-1, self.case.D))
        return y.transpose(1, 2) if self.case.layout == "BNSD" else y

    def forward(self, x: Tensor) -> Tensor:
        q_work, k_work = self.works()
        q = self.q_handoff(self.heads("q", x), q_work)
        k = self.k_handoff(self.heads("k", x), work=k_work)
        v = self.v_handoff(self.heads("v", x))
        return self.core(q, k, v, q_work=q_work, k_work=k_work)


def _place(case: Case, rank: int, style: ContextParallel, *, ahead: bool) -> Any:
    """Put ``style`` on the core and give the model its rank's rows."""

    def place(model: Any) -> Any:
        length = case.S // case.P
        model.rows = slice(rank * length, (rank + 1) * length)
        handoffs = {f"{n}_proj": getattr(model, f"{n}_handoff") for n in "qkv"} if ahead else {}
        style.apply(model.core, case.mesh(), **handoffs)
        return model

    return place


def _compare(rank: int, case: Case, style: ContextParallel, *, ahead: bool, norm: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing falls back
        return compare_steps(
            rank,
            case,
            build=lambda: Attention(case, norm=norm),
            place=_place(case, rank, style, ahead=ahead),
        )


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "rotary-only"])
@pytest.mark.parametrize("name", MODES)
def test_the_boundary_does_what_the_module_would_have_done(name: str, norm: bool) -> None:
    """Outputs and every gradient, the norms' weights included, equal one device."""
    case = MODES[name]

    def on(rank: int) -> list[dict[str, int]]:
        style = ContextParallel(case.seq_dim, case.head_dim, case.degree)
        seen = _compare(rank, case, style, ahead=False, norm=norm)
        return list(seen.traffic)

    plain = {"ulysses": 4, "hybrid": 4, "colossal": 0}
    for steps in ranks(case.P).run(on):
        for step in steps:
            assert step.get("all_to_all", 0) == plain[name.split("-")[0]]


@pytest.mark.parametrize("name", MODES)
def test_a_rotated_tensor_is_sent_ahead_of_its_rotation(name: str) -> None:
    """Handed off with its work, each projection's output is sent at once; nothing falls back."""
    case = MODES[name]

    def on(rank: int) -> list[dict[str, int]]:
        style = AsyncContextParallel(case.seq_dim, case.head_dim, case.degree)
        seen = _compare(rank, case, style, ahead=True, norm=True)
        assert all(not one.disarmed and one.learned for one in seen.boundary.handoffs.values())
        return list(seen.traffic)

    for steps in ranks(case.P).run(on):
        for step in steps[1:]:  # the first one learns
            if case.degree == 1:
                assert step["all_gather"] == 2 and step["reduce_scatter"] == 2
            else:
                assert step["all_to_all"] == 8


@pytest.mark.parametrize(
    ("case", "options"),
    [
        (Case(P=2, degree=1), {"load_balance": True}),
        (Case(P=3, degree=1, layout="BNSD"), {"keep_kv": False}),
        (Case(P=4, degree=2), {"keep_kv": False}),
        (Case(P=2), {"head_groups": 2}),
        (Case(P=2, degree=1, layout="BNSD"), {"head_groups": 4, "keep_kv": False}),
    ],
    ids=str,
)
def test_it_composes_with_what_else_a_style_can_do(case: Case, options: dict[str, Any]) -> None:
    """Load balance, K and V gathered again in backward, head groups."""

    def on(rank: int) -> None:
        of = AsyncContextParallel if "head_groups" in options else ContextParallel
        style = of(case.seq_dim, case.head_dim, case.degree, **options)
        _compare(rank, case, style, ahead=False, norm=True)

    ranks(case.P).run(on)


@pytest.mark.parametrize("case", [MODES["colossal"], MODES["hybrid"]], ids=str)
def test_keys_sent_ahead_prepared_are_gathered_again_prepared(case: Case) -> None:
    """keep_kv=False keeps the prepared rows of k, not those that were handed off."""

    def on(rank: int) -> None:
        style = AsyncContextParallel(case.seq_dim, case.head_dim, case.degree, keep_kv=False)
        _compare(rank, case, style, ahead=True, norm=True)

    ranks(case.P).run(on)


def test_other_work_than_was_handed_off_is_never_taken_for_it() -> None:
    """The core's work decides: what was sent with another is dropped, and one warning says so."""
    case = MODES["ulysses"]

    class Changing(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q_work, k_work = self.works()
            other = HeadWork(None, 1e-5, q_work.sin, q_work.cos)
            q = self.q_handoff(self.heads("q", x), q_work)
            k, v = self.heads("k", x), self.v_handoff(self.heads("v", x))
            return self.core(q, self.k_handoff(k, k_work), v, q_work=other, k_work=k_work)

    def on(rank: int) -> None:
        style = AsyncContextParallel(case.seq_dim, case.head_dim, case.degree)
        compare_steps(
            rank,
            case,
            build=lambda: Changing(case),
            place=_place(case, rank, style, ahead=True),
        )

    with pytest.warns(RuntimeWarning, match="called with other work than it came with"):
        ranks(case.P).run(on)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda w: HeadWork(w.weight[:3], 1e-5, w.cos, w.sin),
            r"weight \(3,\) must be of the size",
        ),
        (
            lambda w: HeadWork(w.weight, 1e-5, w.cos.repeat(1, 2, 1, 1), w.sin.repeat(1, 2, 1, 1)),
            "must have the dims of x",
        ),
    ],
    ids=["weight", "rows-of-the-whole-sequence"],
)
def test_work_that_does_not_fit_is_one_error_on_every_rank(change: Any, words: str) -> None:
    """Global instead of local tables, for example: q_work is named, and nothing is sent."""
    case = MODES["ulysses"]

    def on(rank: int) -> None:
        model = _place(case, rank, ContextParallel(), ahead=False)(Attention(case))
        x = randn(case.B, case.S // case.P, DIM)
        works = model.works()
        model.works = lambda: [change(works[0]), works[1]]
        with pytest.raises(ValueError, match=f"ContextParallel: q_work: .*{words}"):
            model(x)

    ranks(case.P).run(on)


def test_ranks_that_would_do_different_work_are_told() -> None:
    """One rank without the norm: the preflight names the work, on every rank."""
    case = MODES["ulysses"]

    def on(rank: int) -> None:
        model = _place(case, rank, ContextParallel(), ahead=False)(Attention(case, norm=rank == 0))
        with pytest.raises(ValueError, match="work on q, k, v"):
            model(randn(case.B, case.S // case.P, DIM))

    ranks(case.P).run(on)


def test_a_module_of_ones_own_may_have_such_a_keyword() -> None:
    """Only a HeadWork is taken; anything else named q_work stays the module's."""

    class Core(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, q_work: str = "") -> Tensor:
            assert q_work == "mine"
            return q * 1

    def on(rank: int) -> None:
        core = ContextParallel().apply(Core(), MODES["ulysses"].mesh())
        x = torch.ones(1, 3, 4, 2)
        assert torch.equal(core(x, x, x, q_work="mine"), x)

    ranks(2).run(on)


def test_one_device_refuses_what_a_style_would_refuse() -> None:
    """A model that is wrong is not right until it is sharded."""
    core = PreparedAttention(Sdpa())
    x = randn(1, 4, 2, 6)
    with pytest.raises(ValueError, match=r"PreparedAttention: weight \(5,\) must be of the size"):
        core(x, x, x, q_work=HeadWork(torch.ones(5).double()))
    with pytest.raises(TypeError, match="must be a HeadWork or None"):
        core(x, x, x, q_work=torch.ones(6))


def test_ranks_of_which_one_trains_the_norm_are_told() -> None:
    """With q, k and v frozen, the rank with a trained weight would send gradients alone."""
    case = MODES["ulysses"]

    def on(rank: int) -> None:
        model = _place(case, rank, ContextParallel(), ahead=False)(Attention(case))
        model.requires_grad_(False)
        model.scales[0].requires_grad_(rank == 0)
        with pytest.raises(ValueError, match="work on q, k, v"):
            model(randn(case.B, case.S // case.P, DIM))

    ranks(case.P).run(on)
