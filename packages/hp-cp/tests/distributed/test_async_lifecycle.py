"""AsyncContextParallel under checkpointing, evaluation, exceptions, copies, and over many steps."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hp_comm import traffic
from hp_cp import AsyncContextParallel, init_device_mesh
from hp_mesh.boundary import boundary_of
from hp_mesh.handoffs import _warned
from hp_mesh.testing import count_collectives, eventually, randn, ranks

from ._compare import Case
from ._handoffs import (
    DIM,
    Attention,
    Batch,
    apply,
    assert_idle,
    assert_overlaps,
    compare_steps,
    cp_mesh,
    disarmed,
    in_flight,
    linear,
)

EACH = [Case(P=2), Case(P=2, degree=1), Case(P=4, degree=2)]


@pytest.fixture(autouse=True)
def _said_anew() -> Iterator[None]:
    _warned.clear()
    yield
    _warned.clear()


class _Blocks(nn.Module):
    """Two blocks, of which a part is recomputed in backward."""

    def __init__(self, case: Case, part: str, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Attention(case), Attention(case)])
        self.backs = nn.ModuleList([linear(case.H * case.D, DIM, seed) for seed in (70, 80)])
        self.part, self.reentrant = part, reentrant

    @property
    def core(self) -> nn.Module:
        return self.blocks[1].core

    def _checkpoint(self, fn: Callable[..., Any], *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return fn(*args)
        return checkpoint(fn, *args, use_reentrant=self.reentrant)

    def forward(self, x: Tensor) -> Tensor:
        for block, back in zip(self.blocks, self.backs, strict=True):

            def attend(*outputs: Tensor, block: Any = block) -> Tensor:
                return block.attend(outputs)

            def project(x: Tensor, block: Any = block) -> tuple[Tensor, ...]:
                return tuple(block.project(x))

            def whole(x: Tensor, block: Any = block, back: Any = back) -> Tensor:
                return x + back(block(x).flatten(-2)).tanh()

            match self.part:
                case "attention":
                    out = self._checkpoint(attend, *project(x))
                case "projection":
                    out = attend(*self._checkpoint(project, x))
                case "both":
                    out = self._checkpoint(block, x)
                case "block":
                    x = self._checkpoint(whole, x)
                    continue
                case _:
                    out = block(x)
            x = x + back(out.flatten(-2)).tanh()
        return x.unsqueeze(2)


PARTS = [
    *[(EACH[0], part) for part in ("attention", "projection", "both", "block")],
    (EACH[1], "attention"),
    (EACH[1], "both"),
    (EACH[2], "both"),
]


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize(("case", "part"), PARTS, ids=str)
def test_recomputation_gives_the_same_numbers(case: Case, part: str, reentrant: bool) -> None:
    """Behaviour 30, U4, U5, B19: an evaluation in between; alike on all ranks; nothing is left.

    The reentrant kind hides the graph of what it recomputes: projections in it without their
    attention have no gradient when they return, so their outputs go at the boundary.
    """
    case = case.but(H=4, HK=2)
    lost = part == "projection" and reentrant

    def on(rank: int) -> list[Any]:
        def place(model: Any) -> Any:
            for block in model.blocks:
                apply(block, case)
            return model

        def run(model: Any, batch: Batch) -> list[Tensor]:
            out = model(batch.xs[0])
            with torch.no_grad():
                again = model.eval()(batch.xs[0])
            (model.train()(batch.xs[0]) + out).mul(batch.ups[0][:, :, :1, :1]).sum().backward()
            return [out, again]

        with traffic() as sent:
            seen = compare_steps(
                rank,
                case,
                run,
                build=lambda: _Blocks(case, part, reentrant),
                place=place,
                shapes=[[(2, 8)]] * 3,
            )
        for block in seen.model.blocks:
            boundary = boundary_of(block.core)
            boundary.flush()  # a recomputed projection may have been the last thing that ran
            if lost:
                assert disarmed(boundary) == "".join(boundary.handoffs)
            else:
                assert_overlaps(boundary)
        return [(record.kind, record.bytes_sent) for record in sent.records]

    with pytest.warns(RuntimeWarning, match="not a view") if lost else nullcontext():
        first, *others = ranks(case.P).run(on)
    assert all(other == first for other in others)


def test_recomputed_projections_alone_stop_sending_for_nobody() -> None:
    """Nobody waits for them in backward; after a few steps the traffic is that of no recompute."""
    case = Case(P=2)

    def on(rank: int) -> None:
        model = apply(Attention(case), case)
        sent = []
        for _ in range(12):
            x = randn(2, 4, DIM, seed=rank, requires_grad=True)
            outputs = checkpoint(lambda x: tuple(model.project(x)), x, use_reentrant=False)
            with count_collectives() as counted:
                model.attend(outputs).sum().backward()
                sent.append(counted.count("all_to_all"))
        assert max(sent[1:]) > sent[-1] == 5  # out, and four back
        assert_overlaps(boundary_of(model.core))

    ranks(2).run(on)


@pytest.mark.parametrize("case", EACH, ids=str)
def test_evaluation_between_steps_leaves_nothing(case: Case) -> None:
    """Behaviour 31: no_grad overlaps as well; the graph of a training step is not disturbed."""

    def on(rank: int) -> None:
        def run(model: Any, batch: Batch) -> list[Tensor]:
            out = model(batch.xs[0])
            with torch.no_grad():
                other = model(2 * batch.xs[0])
                half = model.attend(model.project(batch.xs[0]))
            with torch.no_grad():  # attention alone without a graph
                pass
            y = model.project(batch.xs[0])
            with torch.no_grad():
                mixed = model.attend(y)
            out.backward(batch.ups[0])
            return [out, other, half, mixed]

        seen = compare_steps(rank, case, run)
        assert_overlaps(seen.boundary)

    ranks(case.P).run(on)


def test_inference_mode_is_synchronous_and_says_so() -> None:
    """Its tensors count no changes in place; training goes on ahead after it."""
    case = Case(P=2)

    def on(rank: int) -> None:
        model = apply(Attention(case), case)
        x = randn(2, 4, DIM, seed=rank)
        expected = model(x)
        for _ in range(2):
            with torch.inference_mode(), count_collectives() as counted:
                assert torch.equal(model(x), expected)
                assert counted.summary() == {"all_to_all": 2}
            with count_collectives() as counted:
                model(x)
            assert counted.summary() == {"all_to_all": 4}
        assert_overlaps(boundary_of(model.core))

    with pytest.warns(RuntimeWarning, match="inference_mode does not count") as record:
        ranks(2).run(on)
    assert len(record) == 3  # q, k and v


def test_one_abandoned_forward_is_finished_by_the_next() -> None:
    """Behaviour 31: the outputs are dropped before attention; no warning, and overlap goes on."""
    case = Case(P=2)

    def on(rank: int) -> None:
        model = apply(Attention(case), case)
        boundary = boundary_of(model.core)
        x = randn(2, 4, DIM, seed=rank)
        expected = model(x)
        model.project(x)
        assert in_flight(boundary) == "qkv"
        assert torch.equal(model(x), expected)
        assert_overlaps(boundary)
        for _ in range(16):
            model(x)
        kept = model.project(x)  # held by somebody, and used when it is too late
        for _ in range(12):
            assert torch.equal(model(x), expected)
        assert_overlaps(boundary)
        assert torch.equal(model.attend(kept), expected)
        assert disarmed(boundary) == ""

    ranks(2).run(on)


def test_forwards_abandoned_again_and_again_are_given_up() -> None:
    """Traffic for nobody ends after a few, and one warning per tensor says so."""
    case = Case(P=2)

    def on(rank: int) -> None:
        model = apply(Attention(case), case)
        x = randn(2, 4, DIM, seed=rank)
        expected = model(x)
        sent = []
        for _ in range(12):
            with count_collectives() as counted:
                model.project(x)
            sent.append(counted.count())
        assert sent[0] == 3 and sent[-1] == 0
        boundary = boundary_of(model.core)
        assert disarmed(boundary) == "qkv"
        assert_idle(boundary)
        assert torch.equal(model(x), expected)

    with pytest.warns(RuntimeWarning, match="does not reach the module every time") as record:
        ranks(2).run(on)
    assert len(record) == 3


def test_an_exception_inside_attention_leaves_nothing_behind() -> None:
    """U5: caught on all ranks; the next good call is right and overlaps."""
    case = Case(P=2)

    def on(rank: int) -> None:
        fail = [False]

        def place(model: Any) -> Any:
            inner = model.core.forward

            def forward(*args: Any) -> Tensor:
                if fail[0]:
                    raise KeyError("inside")
                return inner(*args)

            model.core.forward = forward
            return apply(model, case)

        def run(model: Any, batch: Batch) -> list[Tensor]:
            if boundary_of(model.core) is not None:
                fail[0] = True
                with pytest.raises(KeyError, match="inside"):
                    model(batch.xs[0])
                fail[0] = False
            out = model(batch.xs[0])
            out.backward(batch.ups[0])
            return [out]

        assert_overlaps(compare_steps(rank, case, run, place=place).boundary)

    ranks(2).run(on)


def test_a_deep_copy_has_handoffs_of_its_own() -> None:
    """Both models are right and overlap; what one has under way is not the other's business."""
    case = Case(P=2)

    def on(rank: int) -> None:
        model = apply(Attention(case), case)
        model(randn(2, 4, DIM, seed=rank))
        twin = copy.deepcopy(model)
        ours, theirs = boundary_of(model.core), boundary_of(twin.core)
        assert ours is not theirs
        assert ours.mesh is theirs.mesh
        assert len(twin.q_proj._forward_hooks) == 1
        outputs = model.project(randn(2, 4, DIM, seed=rank))
        assert in_flight(ours) == "qkv" and in_flight(theirs) == ""
        model.attend(outputs)
        for one in (model, twin):
            compare_steps(rank, case, applied=one)
            assert_overlaps(boundary_of(one.core))
        AsyncContextParallel().remove(twin.core)
        assert not twin.q_proj._forward_hooks
        assert len(model.q_proj._forward_hooks) == 1
        assert_overlaps(compare_steps(rank, case, applied=model).boundary)
        alone = copy.deepcopy(model.core)  # without its projections: synchronous
        q, k, v = (y.view(2, 4, -1, 6) for y in model.project(randn(2, 4, DIM, seed=rank)))
        assert torch.equal(alone(q, k, v), model.core(q, k, v))

    ranks(2).run(on)


def test_pickling_says_why_not() -> None:
    """A boundary holds process groups; a projection holds its boundary."""

    def on(rank: int) -> None:
        model = apply(Attention(Case(P=2)), Case(P=2))
        for module in (model.core, model.q_proj):
            with pytest.raises(TypeError, match="remove"):
                pickle.dumps(module)

    ranks(2).run(on)


def test_remove_gives_the_modules_back() -> None:
    """Behaviour 7: no hook is left anywhere, work under way is finished; applying again works."""
    case = Case(P=2)

    def on(rank: int) -> None:
        model = Attention(case)
        style = AsyncContextParallel()
        for _ in range(2):
            style.apply(model.core, cp_mesh(2), model.q_proj, model.k_proj, model.v_proj)
            model(randn(2, 4, DIM))
            outputs = model.project(randn(2, 4, DIM))
            boundary = boundary_of(model.core)
            assert in_flight(boundary) == "qkv"
            assert style.remove(model.core) is model.core
            assert_idle(boundary)
            for module in model.modules():
                assert not module._forward_hooks and not module._forward_pre_hooks
            assert torch.equal(model.attend(outputs), Attention(case)(randn(2, 4, DIM)))

    ranks(2).run(on)


@pytest.mark.parametrize("flush", [True, False], ids=["flushed", "not-flushed"])
def test_a_process_group_may_end_with_work_outstanding(flush: bool) -> None:
    """`flush` finishes it first; without, what the ranks have sent still arrives. No warning."""

    def on(rank: int) -> None:
        # a mesh of two axes: the group of a lone one is the default group, which others need
        root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        model = apply(Attention(Case(P=2)), Case(P=2), root["cp"])
        boundary = boundary_of(model.core)
        model(randn(2, 4, DIM))
        model.project(randn(2, 4, DIM))
        assert in_flight(boundary) == "qkv"
        if flush:
            boundary.style.flush(model.core)
            assert in_flight(boundary) == ""
        dist.barrier()
        dist.destroy_process_group(root["cp"].get_group())
        left = weakref.ref(model)
        del model, boundary  # nothing waits for the garbage collector
        assert left() is None

    ranks(4).run(on)


def _live_tensors() -> int:
    gc.collect()
    return sum(1 for x in gc.get_objects() if type(x) is Tensor)


@pytest.mark.parametrize(("case", "steps"), [(EACH[0], 1000), (EACH[1], 90)], ids=str)
def test_a_thousand_steps_keep_nothing(
    case: Case, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensor, handle or queue entry more at the end than after 30 steps."""
    monkeypatch.setenv("HP_PREFLIGHT", "first")

    def on(rank: int) -> list[int]:
        model = apply(Attention(case), case)
        boundary = boundary_of(model.core)
        x = randn(1, 1, DIM, seed=rank, requires_grad=True)
        dead: list[weakref.ref[Tensor]] = []
        counts = []
        for step in range(steps):
            model.zero_grad()
            x.grad = None
            y = model.project(x)
            out = model.attend(y)
            (out.sum() + sum(one.sum() for one in y)).backward()
            dead += [weakref.ref(one) for one in (*y, out)]
            del y, out
            if step % 10 == 0:
                with torch.no_grad():
                    model(x)
            if step % 60 == 7:
                model.project(x)  # abandoned now and then
            if step in (29, steps - 1):
                model(x)
                assert eventually(lambda dead=dead: all(ref() is None for ref in dead))
                assert_idle(boundary)
                dist.barrier()
                if rank == 0:  # gloo's threads may hold some for a moment
                    eventually(lambda: not counts or _live_tensors() <= counts[0])
                    counts.append(_live_tensors())
                dist.barrier()
        assert_overlaps(boundary)
        for handoff in boundary.handoffs.values():
            assert all(len(lane.sent) <= 16 for lane in handoff.lanes.values())
            assert all(item.handle is None for lane in handoff.lanes.values() for item in lane.sent)
        return counts

    before, after = ranks(2).run(on)[0]
    assert after <= before
