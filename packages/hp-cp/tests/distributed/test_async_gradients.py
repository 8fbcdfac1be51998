"""Gradients of handed-off outputs travel on the tensor edge: every consumer and hook is served."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hp_cp import AsyncContextParallel
from hp_mesh.boundary import boundary_of
from hp_mesh.testing import assert_close, count_collectives, randn, ranks

from ._compare import Case
from ._cores import Sdpa
from ._handoffs import (
    DIM,
    Attention,
    Batch,
    Run,
    apply,
    assert_idle,
    assert_overlaps,
    compare_steps,
    cp_mesh,
    disarmed,
    in_flight,
    linear,
)

EACH = [Case(P=2, layout="BNSD"), Case(P=2, degree=1), Case(P=4, degree=2)]


def _second_consumer(model: Any, batch: Batch) -> list[Tensor]:
    outputs = model.project(batch.xs[0])
    out = model.attend(outputs)
    ((out * batch.ups[0]).sum() + sum(3 * y.sum() for y in outputs)).backward()
    return [out]


def _grad_of_outputs(model: Any, batch: Batch) -> list[Tensor]:
    outputs = model.project(batch.xs[0])
    out = model.attend(outputs)
    grads = torch.autograd.grad(out, outputs, batch.ups[0], retain_graph=True)
    out.backward(batch.ups[0])
    # laid out as the output, so that the ranks' parts can be compared
    return [out, *(_as_output(g, model.case) for g in grads)]


def _as_output(y: Tensor, case: Case) -> Tensor:
    x = y.unflatten(-1, (-1, case.D))
    return x.transpose(1, 2) if case.layout == "BNSD" else x


def _retained(model: Any, batch: Batch) -> list[Tensor]:
    outputs = model.project(batch.xs[0])
    seen: list[Tensor] = []
    for y in outputs:
        y.retain_grad()
        y.register_hook(seen.append)
    out = model.attend(outputs)
    out.backward(batch.ups[0])
    assert len(seen) == 3
    return [out, *(_as_output(g, model.case) for g in [*(y.grad for y in outputs), *seen])]


def _scaled_by_a_hook(model: Any, batch: Batch) -> list[Tensor]:
    outputs = model.project(batch.xs[0])
    for y in outputs:
        y.register_hook(lambda grad: -2 * grad)
    out = model.attend(outputs)
    out.backward(batch.ups[0])
    return [out]


def _projection_only(model: Any, batch: Batch) -> list[Tensor]:
    """The attention's output is computed and not used."""
    outputs = model.project(batch.xs[0])
    out = model.attend(outputs)
    sum(y.pow(2).sum() for y in outputs).backward()
    return [out.detach()]


def _one_needed(model: Any, batch: Batch) -> list[Tensor]:
    out = model(batch.xs[0])
    (grad,) = torch.autograd.grad(out, [model.k_proj.weight], batch.ups[0])
    model.k_proj.weight.grad = grad
    return [out]


def _twice_backward(model: Any, batch: Batch) -> list[Tensor]:
    out = model(batch.xs[0])
    out.backward(batch.ups[0], retain_graph=True)
    out.backward(2 * batch.ups[0])
    return [out]


def _frozen_k(model: Any, batch: Batch) -> list[Tensor]:
    """Only q and v lead to something that needs a gradient."""
    model.k_proj.requires_grad_(False)
    x, up = batch.xs[0], batch.ups[0]
    k = model.k_proj(x.detach())
    out = model.attend([model.q_proj(x), k, model.v_proj(x)])
    out.backward(up)
    return [out]


RUNS = [
    _second_consumer,
    _grad_of_outputs,
    _retained,
    _scaled_by_a_hook,
    _projection_only,
    _one_needed,
    _twice_backward,
    _frozen_k,
]


def _over(runs: Sequence[Run], hybrid: Sequence[Run]) -> list[Any]:
    """Ulysses and Colossal take every run, Hybrid on its four ranks takes a few."""
    pairs = [(case, run) for case in EACH[:2] for run in runs]
    pairs += [(EACH[2], run) for run in hybrid]
    return [
        pytest.param(case, run, id=f"{case}-{getattr(run, '__name__', '')[1:]}")
        for case, run in pairs
    ]


@pytest.mark.parametrize(("case", "run"), _over(RUNS, [_second_consumer, _retained]))
def test_every_user_of_a_projection_output_gets_its_gradient(case: Case, run: Run) -> None:
    """Behaviour 29, U1-U3: second consumers, autograd.grad, retain_grad, hooks, no attention."""

    def on(rank: int) -> None:
        assert_overlaps(compare_steps(rank, case, run, shapes=[[(2, 8)]] * 3).boundary)

    ranks(case.P).run(on)


def _ffbb(model: Any, batch: Batch) -> list[Tensor]:
    outs = [model(x) for x in batch.xs]
    for out, up in zip(outs, batch.ups, strict=True):
        out.backward(up)
    return outs


def _ffbb_reversed(model: Any, batch: Batch) -> list[Tensor]:
    outs = [model(x) for x in batch.xs]
    for out, up in zip(reversed(outs), reversed(batch.ups), strict=True):
        out.backward(up)
    return outs


def _one_forward_one_backward(model: Any, batch: Batch) -> list[Tensor]:
    """F F B F B B, as the steady state of 1F1B."""
    x, up = batch.xs, batch.ups
    outs = [model(x[0]), model(x[1])]
    outs[0].backward(up[0])
    outs.append(model(x[2]))
    outs[1].backward(up[1])
    outs[2].backward(up[2])
    return outs


def _interleaved(model: Any, batch: Batch) -> list[Tensor]:
    """All projections first; attention in order; backward of the first between."""
    y = [model.project(x) for x in batch.xs]
    first = model.attend(y[0])
    first.backward(batch.ups[0])
    rest = [model.attend(one) for one in y[1:]]
    for out, up in zip(rest, batch.ups[1:], strict=True):
        out.backward(up)
    return [first, *rest]


def _out_of_order(model: Any, batch: Batch) -> list[Tensor]:
    """Attention takes the youngest projections first."""
    y = [model.project(x) for x in batch.xs]
    outs = [model.attend(one) for one in reversed(y)][::-1]
    for out, up in zip(outs, batch.ups, strict=True):
        out.backward(up)
    return outs


def _one_loss(model: Any, batch: Batch) -> list[Tensor]:
    outs = [model(x) for x in batch.xs]
    sum((out * up).sum() for out, up in zip(outs, batch.ups, strict=True)).backward()
    return outs


SCHEDULES = [
    _ffbb,
    _ffbb_reversed,
    _one_forward_one_backward,
    _interleaved,
    _out_of_order,
    _one_loss,
]


@pytest.mark.parametrize(("case", "run"), _over(SCHEDULES, [_interleaved, _ffbb]))
def test_several_micro_batches_may_be_in_flight(case: Case, run: Run) -> None:
    """Behaviour 27: work is keyed by the tensor that was produced, so no order mixes it up."""

    def on(rank: int) -> None:
        sizes = [[(2, 8), (1, 16), (2, 4)]] * 3
        seen = compare_steps(rank, case, run, shapes=sizes)
        assert_overlaps(seen.boundary)
        per_call = {"ulysses": 8, "colossal": 4, "hybrid": 12}[str(case).partition("-")[0]]
        assert [sum(step.values()) for step in seen.traffic[1:]] == [3 * per_call] * 2

    ranks(case.P).run(on)


class _Hooked(nn.Module):
    """The view that is handed to the core has a hook."""

    def __init__(self, case: Case, retain: bool) -> None:
        super().__init__()
        self.inner = Attention(case, self._hook)
        self.q_proj, self.k_proj = self.inner.q_proj, self.inner.k_proj
        self.v_proj, self.core = self.inner.v_proj, self.inner.core
        self.retain, self.views = retain, []

    def _hook(self, name: str, x: Tensor) -> Tensor:
        if name == "q" and len(self.views) > 1:
            x.retain_grad() if self.retain else x.register_hook(lambda grad: 3 * grad)
        self.views.append(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("retain", [False, True], ids=["hook", "retain_grad"])
def test_a_hook_on_the_view_itself_falls_back(retain: bool) -> None:
    """It would see nothing: so q goes synchronously, said once; k and v go on ahead."""
    case = Case(P=2)
    from hp_mesh.handoffs import _warned

    _warned.clear()

    def on(rank: int) -> None:
        def run(model: Any, batch: Batch) -> list[Tensor]:
            out = model(batch.xs[0])
            out.backward(batch.ups[0])
            view = model.views[-3]
            return [out, *([view.grad] if view.retains_grad else [])]

        seen = compare_steps(rank, case, run, build=lambda: _Hooked(case, retain))
        assert disarmed(seen.boundary) == "q"
        assert_idle(seen.boundary)

    with pytest.warns(RuntimeWarning, match="q handed off by Linear.*not a view") as said:
        ranks(2).run(on)
    assert len(said) == 1


class _TwoLayers(nn.Module):
    """Two layers, each with projections of its own except the shared one of k."""

    def __init__(self, case: Case, share: Callable[[nn.Module, nn.Module], None]) -> None:
        super().__init__()
        self.first, self.second = Attention(case), Attention(case)
        self.between = linear(case.H * case.D, DIM, 70)
        share(self.first, self.second)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x).flatten(-2)))

    @property
    def core(self) -> nn.Module:
        return self.second.core


def _share_k(first: Any, second: Any) -> None:
    second.k_proj = first.k_proj


def _place_both(case: Case) -> Callable[[Any], Any]:
    def place(model: Any) -> Any:
        apply(model.first, case)
        apply(model.second, case)
        return model

    return place


def test_one_projection_in_two_layers_is_right_and_stops_sending_twice() -> None:
    """Each call would be launched for both cores; that ends, is said once, and q, v go on."""
    case = Case(P=2)
    from hp_mesh.handoffs import _warned

    _warned.clear()

    def on(rank: int) -> None:
        seen = compare_steps(
            rank,
            case,
            build=lambda: _TwoLayers(case, _share_k),
            place=_place_both(case),
            shapes=[[(1, 8)]] * 9,
        )
        for layer in (seen.model.first, seen.model.second):
            assert disarmed(boundary_of(layer.core)) == "k"
            assert_idle(boundary_of(layer.core))
        # q and v ahead, k at the boundary: as many exchanges as with all three ahead, no more bytes
        assert seen.traffic[-1] == {"all_to_all": 16}
        assert seen.bytes[-1] == min(seen.bytes) < seen.bytes[1]

    with pytest.warns(RuntimeWarning, match="k handed off by Linear: what was sent ahead") as said:
        ranks(2).run(on)
    assert len(said) == 1


def test_one_output_may_feed_two_cores_or_one_core_twice() -> None:
    """K and V of one layer used by a second core, and the same q, k, v used twice (MTP)."""
    case = Case(P=2)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.other = Attention(case), Sdpa(case.layout, causal=False)
            self.core = self.first.core

        def forward(self, x: Tensor) -> Tensor:
            y = self.first.project(x)
            q, k, v = (one.view(*one.shape[:2], -1, case.D) for one in y)
            return self.core(q, k, v) + 2 * self.other(q, k, v) + 5 * self.core(q, k, v)

    def place(model: Any) -> Any:
        projections = {f"{n}_proj": getattr(model.first, f"{n}_proj") for n in "qkv"}
        AsyncContextParallel().apply(model.core, cp_mesh(2), **projections)
        AsyncContextParallel().apply(model.other, cp_mesh(2), **projections)
        return model

    def on(rank: int) -> None:
        seen = compare_steps(rank, case, build=Model, place=place)
        assert_overlaps(seen.boundary)
        assert_overlaps(boundary_of(seen.model.other))
        # two cores claim three each; the second call of the first core packs its own
        assert seen.traffic[1:] == [{"all_to_all": 8 + 8 + 4}] * 2

    ranks(2).run(on)


def test_the_same_layer_may_run_several_times() -> None:
    """Weights shared over depth: one core, one boundary, calls told apart by their tensors."""
    case = Case(P=2)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Attention(case)
            self.back = linear(case.H * case.D, DIM, 70)
            self.core = self.layer.core

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                out = self.layer(x)
                x = x + self.back(out.flatten(-2)).tanh()
            return out

    def place(model: Any) -> Any:
        apply(model.layer, case)
        return model

    def on(rank: int) -> None:
        assert_overlaps(compare_steps(rank, case, build=Model, place=place).boundary)

    ranks(2).run(on)


def test_backward_through_projections_whose_attention_never_ran() -> None:
    """U3: an auxiliary loss on the outputs alone; their exchange is finished and forgotten."""
    case = Case(P=2)

    def on(rank: int) -> None:
        model = apply(Attention(case), case)
        model(randn(2, 4, DIM, seed=rank)).sum().backward()
        for _ in range(2):
            model.zero_grad()
            x = randn(2, 4, DIM, seed=rank, requires_grad=True)
            outputs = model.project(x)
            assert in_flight(boundary_of(model.core)) == "qkv"
            sum(y.sum() for y in outputs).backward()
            expected = sum(getattr(model, f"{n}_proj").weight.sum(0) for n in "qkv")
            assert_close(x.grad, expected.expand(2, 4, DIM), kind="grad")
            del outputs
        with count_collectives() as counted:
            model(randn(2, 4, DIM, seed=rank)).sum().backward()
        assert counted.summary() == {"all_to_all": 8}
        assert_overlaps(boundary_of(model.core))

    ranks(2).run(on)


def test_an_output_that_starts_to_require_grad_late_is_not_sent_without_one() -> None:
    """``y.requires_grad_()`` after a frozen projection: launched work would have no gradient."""
    case = Case(P=2, degree=1)
    from hp_mesh.handoffs import _warned

    _warned.clear()

    def on(rank: int) -> None:
        model = apply(Attention(case), case).requires_grad_(False)
        gradients = []
        for late in (False, True, True):
            q, k, v = model.project(randn(2, 4, DIM, seed=rank))
            if late:
                k.requires_grad_()
            out = model.attend([q, k, v])
            if late:
                out.sum().backward()
                gradients.append(k.grad)
        assert gradients[0] is not None and gradients[0].abs().sum() > 0
        assert torch.equal(gradients[0], gradients[1])

    with pytest.warns(RuntimeWarning, match="k handed off by Linear"):
        ranks(2).run(on)
