"""AsyncContextParallel is never silently bypassed: exact, one warning, no double traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hp_cp import AsyncContextParallel, ContextParallel, Handoff
from hp_cp.async_boundary import AsyncBoundary
from hp_mesh.boundary import boundary_of
from hp_mesh.handoffs import _warned
from hp_mesh.testing import count_collectives, randn, ranks

from ._compare import Case
from ._cores import Sdpa
from ._handoffs import (
    DIM,
    Attention,
    Between,
    apply,
    assert_idle,
    assert_overlaps,
    compare_steps,
    cp_mesh,
    disarmed,
    linear,
)


@pytest.fixture(autouse=True)
def _said_anew() -> Iterator[None]:
    _warned.clear()
    yield
    _warned.clear()


class _Reverse(torch.autograd.Function):
    """A view in data, but not in gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


def _rotary(x: Tensor) -> Tensor:
    return 0.6 * x + 0.8 * x.roll(1, -1)


def _in_place_without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(2)
    return x


def _in_place_on_data(x: Tensor) -> Tensor:
    x.data.mul_(2)
    return x


TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "rotary": _rotary,
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True),
    "in-place": lambda x: x.mul_(2),
    "in-place-no-grad": _in_place_without_grad,
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.contiguous(),
    "cast": lambda x: x.float().double(),
    "gradient-reversal": _Reverse.apply,
    "zeroed": lambda x: torch.zeros_like(x),
}


_CUTS = [TRANSFORMS[name] for name in ("detach", "data", "zeroed")]


def _from_call(first: int, name: str, change: Callable[[Tensor], Tensor]) -> Between:
    """Return a transform of ``name`` that starts with call ``first``."""
    calls = 0

    def between(which: str, x: Tensor) -> Tensor:
        nonlocal calls
        if which != name:
            return x
        calls += 1
        return change(x) if calls > first else x

    return between


def _check(case: Case, name: str, change: Callable[[Tensor], Tensor], first: int) -> None:
    def on(rank: int) -> None:
        seen = compare_steps(
            rank,
            case,
            build=lambda: Attention(case, _from_call(first, name, change)),
            shapes=[[(2, 8)]] * 5,
        )
        assert disarmed(seen.boundary) == name
        assert_idle(seen.boundary)
        # one tensor at the boundary, the others ahead
        usual = {"ulysses": 8, "colossal": 4, "hybrid": 12}[str(case).partition("-")[0]]
        if change in _CUTS:  # no gradient goes back
            usual -= 1
        assert [sum(step.values()) for step in seen.traffic[3:]] == [usual] * 2
        assert seen.bytes[3] == seen.bytes[4] <= seen.bytes[0]

    said = f"{name} handed off by Linear: what reaches the module .*Handoff"
    with pytest.warns(RuntimeWarning, match=said) as record:
        ranks(case.P).run(on)
    assert len(record) == 1


@pytest.mark.parametrize("first", [0, 2], ids=["always", "slipped-in"])
@pytest.mark.parametrize("change", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_change_between_projection_and_core_is_seen(
    change: Callable[[Tensor], Tensor], first: int
) -> None:
    """Behaviour 32: exact, said once by name, disarmed; no more bytes than a sync step."""
    _check(Case(P=2, layout="BNSD"), "q", change, first)


@pytest.mark.parametrize("first", [0, 2], ids=["always", "slipped-in"])
@pytest.mark.parametrize("case", [Case(P=2, degree=1), Case(P=4, degree=2)], ids=str)
def test_a_change_is_seen_in_the_other_modes(case: Case, first: int) -> None:
    """Colossal and Hybrid, on k."""
    _check(case, "k", _rotary, first)


def test_a_change_through_data_is_seen_in_the_first_call() -> None:
    """``.data`` counts no version, so the first call compares contents as well."""
    _check(Case(P=2), "v", _in_place_on_data, 0)


def test_another_view_of_the_output_is_learned_anew() -> None:
    """A model that changes its view (not its values) loses one exchange, and goes on ahead."""
    case = Case(P=2, H=8, HK=4)

    def on(rank: int) -> None:
        model = apply(Attention(case), case)
        x = randn(2, 4, DIM, seed=rank)
        sent = []
        for head_size in (6, 6, 12, 12, 12):
            with count_collectives() as counted:
                model.core(*(y.view(2, 4, -1, head_size) for y in model.project(x)))
            sent.append(counted.count())
        assert sent == [2, 4, 5, 4, 4]
        assert_overlaps(boundary_of(model.core))

    ranks(2).run(on)


def test_a_part_of_the_output_is_not_the_output() -> None:
    """Fewer heads than were produced: only whole outputs are sent ahead."""
    case = Case(P=2)

    def on(rank: int) -> None:
        model = apply(Attention(case), case)
        for heads in (12, 12, 4, 4):
            q, k, v = (y.view(2, 4, -1, 6) for y in model.project(randn(2, 4, DIM, seed=rank)))
            model.core(q[:, :, :heads], k, v)
        assert disarmed(boundary_of(model.core)) == "q"

    with pytest.warns(RuntimeWarning, match="q handed off by Linear: what reaches the module"):
        ranks(2).run(on)


class _Rotated(Attention):
    """Rotary, norm and a copy stand between; q and k are handed off behind them."""

    def __init__(self, case: Case) -> None:
        super().__init__(case, self._ready)
        self.q_ready, self.k_ready = Handoff(), Handoff()

    def _ready(self, name: str, x: Tensor) -> Tensor:
        if name == "v":
            return x
        x = _rotary(x / x.norm(dim=-1, keepdim=True)).contiguous()
        return getattr(self, f"{name}_ready")(x)


@pytest.mark.parametrize("layout", ["BSHD", "BNSD"])
@pytest.mark.parametrize("degree", [None, 1])
def test_a_handoff_module_marks_the_right_place(degree: int | None, layout: str) -> None:
    """Behind rotary and norm q and k are final, and travel while v is still computed."""
    case = Case(P=2, degree=degree, layout=layout)

    def place(model: Any) -> Any:
        AsyncContextParallel(case.seq_dim, case.head_dim, degree).apply(
            model.core,
            cp_mesh(2),
            q_proj=model.q_ready,
            k_proj=model.k_ready,
            v_proj=model.v_proj,
        )
        return model

    def on(rank: int) -> None:
        seen = compare_steps(rank, case, build=lambda: _Rotated(case), place=place)
        assert_overlaps(seen.boundary)
        assert sum(seen.traffic[-1].values()) == (4 if degree == 1 else 8)

    ranks(2).run(on)


@pytest.mark.parametrize("leave", ["q_proj", "k_proj", "v_proj", "all", "balance"])
def test_without_a_projection_or_with_load_balance_it_is_context_parallel(leave: str) -> None:
    """Behaviour 27: the numbers and traffic of the sync style; the reason is said once."""
    balance = leave == "balance"
    case = Case(P=2, degree=1 if balance else None, load_balance=balance)

    def on(rank: int) -> None:
        def place(model: Any) -> Any:
            for _ in range(3):
                given = {f"{n}_proj": getattr(model, f"{n}_proj") for n in "qkv"}
                given = {} if leave == "all" else {k: v for k, v in given.items() if k != leave}
                core = model.core if not boundary_of(model.core) else Sdpa()
                style = AsyncContextParallel(ulysses_degree=case.degree, load_balance=balance)
                assert style.apply(core, cp_mesh(2), **given) is core
            assert all(not m._forward_hooks for m in (model.q_proj, model.k_proj, model.v_proj))
            return model

        def sync(model: Any) -> Any:
            ContextParallel(ulysses_degree=case.degree, load_balance=balance).apply(
                model.core, cp_mesh(2)
            )
            return model

        def build() -> Attention:
            return Attention(case)

        ours = compare_steps(rank, case, build=build, place=place)
        theirs = compare_steps(rank, case, build=build, place=sync)
        assert (ours.traffic, ours.bytes) == (theirs.traffic, theirs.bytes)

    reason = {"all": "q_proj, k_proj, v_proj not given", "balance": "load_balance=True"}
    with pytest.warns(RuntimeWarning, match=reason.get(leave, f"{leave} not given")) as record:
        ranks(2).run(on)
    assert len(record) == 1


def test_one_rank_has_nothing_to_exchange() -> None:
    """cp_size 1: the module as it is, handoffs or not."""
    case = Case(P=1)

    def on(rank: int) -> None:
        assert compare_steps(rank, case).traffic == [{}, {}, {}]

    ranks(1).run(on)


def _refused(message: str, place: Callable[[Any], Any]) -> None:
    def on(rank: int) -> None:
        model = Attention(Case(P=2))
        with pytest.raises(ValueError, match=message):
            place(model)
        assert boundary_of(model.core) is None
        assert not model.q_proj._forward_hooks

    ranks(2).run(on)


def test_one_module_for_two_of_three_is_refused() -> None:
    """U3: q_proj is k_proj, k_proj is v_proj, and a fused module without its sizes."""
    style = AsyncContextParallel()
    for names in ("qqv", "qkk", "qkq", "qqq"):

        def place(model: Any, names: str = names) -> None:
            given = [getattr(model, f"{n}_proj") for n in names]
            style.apply(model.core, cp_mesh(2), *given)

        _refused(r"q_proj, k_proj and v_proj must be 3 modules.*qkv_split=", place)


def test_sizes_of_a_fused_projection_with_three_projections_are_refused() -> None:
    """``qkv_split`` and three modules contradict each other."""
    _refused(
        r"qkv_split .* must come with one fused", lambda m: apply(m, Case(P=2), qkv_split=[1] * 3)
    )
    for bad in ((1, 2), (0, 1, 1), (1, 1, -1), "abc"):
        with pytest.raises(ValueError, match=r"qkv_split .* must be the three sizes"):
            AsyncContextParallel(qkv_split=bad)  # type: ignore[arg-type]


def test_a_second_application_to_one_core_is_refused_and_adds_no_hook() -> None:
    """One core shared by two layers' projections: the second application says what is there."""

    def on(rank: int) -> None:
        first, second = Attention(Case(P=2)), Attention(Case(P=2))
        apply(first, Case(P=2))
        second.core = first.core
        with pytest.raises(ValueError, match="already has AsyncContextParallel applied"):
            apply(second, Case(P=2))
        assert not second.q_proj._forward_hooks
        assert len(first.q_proj._forward_hooks) == 1

    ranks(2).run(on)


class _Returns(nn.Module):
    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.form = linear(DIM, 72, 1), form

    def forward(self, x: Tensor) -> Any:
        return self.form(self.layer(x))


def test_an_output_beside_none_is_handed_off() -> None:
    """Linear layers that return ``(output, bias)`` with the bias added."""
    case = Case(P=2, HK=12)

    class Model(Attention):
        def project(self, x: Tensor) -> list[Tensor]:
            return [one[0] for one in super().project(x)]

    def build() -> Attention:
        model = Model(case)
        model.q_proj = _Returns(lambda y: (y, None))
        model.k_proj = _Returns(lambda y: [y])
        model.v_proj = _Returns(lambda y: (y,))
        return model

    def on(rank: int) -> None:
        assert_overlaps(compare_steps(rank, case, build=build).boundary)

    ranks(2).run(on)


def test_an_output_of_two_tensors_or_of_another_size_is_said_once() -> None:
    """There is nothing to hand off; k and v go on ahead."""
    case = Case(P=2, HK=12)

    class Model(Attention):
        def project(self, x: Tensor) -> list[Tensor]:
            q, k, v = super().project(x)
            return [q[0], k, v]

    def build() -> Attention:
        model = Model(case)
        model.q_proj = _Returns(lambda y: (y, y.detach()))
        return model

    def on(rank: int) -> None:
        seen = compare_steps(rank, case, build=build)
        assert disarmed(seen.boundary) == "q"

    with pytest.warns(RuntimeWarning, match="q handed off by _Returns: its output is a tuple"):
        ranks(2).run(on)

    def fused(rank: int) -> None:
        layer, core = linear(DIM, 72, 1), Sdpa()
        AsyncContextParallel(qkv_split=(24, 24, 25)).apply(core, cp_mesh(2), layer, layer, layer)
        q, k, v = layer(randn(2, 4, DIM)).view(2, 4, 12, 6).chunk(3, 2)
        core(q, k, v)
        assert disarmed(boundary_of(core)) == "qkv"

    with pytest.warns(RuntimeWarning, match=r"is not the sum of \(24, 24, 25\)") as record:
        ranks(2).run(fused)
    assert len(record) == 3


def test_projections_that_lead_elsewhere_are_named() -> None:
    """Bad input: modules of another layer, which run and arrive elsewhere or never run."""

    def on(rank: int) -> None:
        model, other = Attention(Case(P=2)), Attention(Case(P=2))
        given = {f"{n}_proj": getattr(other, f"{n}_proj") for n in "qkv"}
        AsyncContextParallel().apply(model.core, cp_mesh(2), **given)
        x = randn(2, 4, DIM, seed=rank)
        for _ in range(3):
            model(x)
        boundary = boundary_of(model.core)
        assert isinstance(boundary, AsyncBoundary)
        outputs = other.project(x)
        model(x)
        assert disarmed(boundary) == "qkv"
        del outputs

    with pytest.warns(RuntimeWarning) as record:
        ranks(2).run(on)
    said = sorted(str(one.message) for one in record)
    assert len(said) == 6
    for name, (first, second) in zip("kqv", zip(said[::2], said[1::2], strict=True), strict=True):
        assert f"{name} handed off by Linear: that module has not run" in first
        assert f"{name} handed off by Linear: what reaches the module is another tensor" in second


def _launch_order(rank: int) -> None:
    model = apply(Attention(Case(P=2)), Case(P=2))
    x = randn(2, 4, DIM)
    model(x)
    first, second = (model.q_proj, model.k_proj) if rank == 0 else (model.k_proj, model.q_proj)
    first(x)
    second(x)


def _lengths(rank: int) -> None:
    model = apply(Attention(Case(P=2)), Case(P=2))
    model(randn(2, 4, DIM))
    model(randn(2, 4 + rank, DIM))


def _batches(rank: int) -> None:
    model = apply(Attention(Case(P=2, degree=1)), Case(P=2, degree=1))
    model(randn(2, 4, DIM))
    model(randn(2 + rank, 4, DIM))


def _frozen_on_one_rank(rank: int) -> None:
    model = apply(Attention(Case(P=2)), Case(P=2))
    model(randn(2, 4, DIM))
    model.q_proj.requires_grad_(rank == 0)
    model(randn(2, 4, DIM))


def _changed_on_one_rank(rank: int) -> None:
    between = _from_call(1, "q", _rotary) if rank else None
    model = apply(Attention(Case(P=2), between), Case(P=2))
    for _ in range(2):
        model(randn(2, 4, DIM))


DISAGREEMENTS = [
    pytest.param(
        _launch_order,
        r"call must be the same.*q handed off by Linear on rank 0 and .*k handed off by .* rank 1",
        id="order",
    ),
    pytest.param(
        _lengths,
        r"q handed off by Linear: local sequence length .*4 on rank 0 and 5 on .*pad_sequence",
        id="length",
    ),
    pytest.param(_batches, r"k handed off by Linear: shape without its sequence dim", id="batch"),
    pytest.param(
        _frozen_on_one_rank,
        r"q handed off by Linear: requires_grad .*True on rank 0",
        id="requires-grad",
    ),
    pytest.param(_changed_on_one_rank, r"handoffs must be the same on all ranks", id="one-gave-up"),
]


@pytest.mark.filterwarnings("ignore:AsyncContextParallel. q handed off")
@pytest.mark.parametrize(("fn", "message"), DISAGREEMENTS)
def test_ranks_that_disagree_get_one_error_and_do_not_hang(
    fn: Callable[[int], None], message: str
) -> None:
    """Bad input: found before data moves, with rank, module and tensor; ranks are usable after."""
    errors = ranks(2).errors(fn)
    assert [type(error) for error in errors] == [ValueError] * 2
    assert str(errors[0]) == str(errors[1])
    with pytest.raises(ValueError, match=message):
        raise errors[0]  # type: ignore[misc]


def test_a_bad_call_finishes_what_was_sent_ahead() -> None:
    """All ranks get the boundary's error; nothing is left on the wire, and the next call works."""

    def on(rank: int) -> None:
        case = Case(P=2)
        model = apply(Attention(case), case)
        x = randn(2, 4, DIM, seed=rank)
        good = model(x)
        for _ in range(4):
            q, k, v = model.project(x)
            with pytest.raises(ValueError, match="must have one length"):
                model.core(q.view(2, 4, 12, 6), k.view(2, 4, 4, 6), v.view(4, 2, 4, 6))
            assert_idle(boundary_of(model.core))
        with count_collectives() as counted:
            assert torch.equal(model(x), good)
        assert counted.summary() == {"all_to_all": 4}

    ranks(2).run(on)
