"""keep_kv=False: several passes, second derivatives, checkpoints, changes in place, failures."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hp_cp import attention_window
from hp_cp.kv_refetch import GatheredKV
from hp_mesh._torch import top_saved_tensor_hooks
from hp_mesh.testing import assert_close, count_collectives, randn, ranks

from ._compare import Case, compare, reference
from ._cores import Sdpa

EACH = [
    Case(P=2, degree=1),
    Case(P=3, degree=1, load_balance=True),
    Case(P=4, degree=2),
    Case(P=4, degree=2, HK=3),
    Case(P=4, degree=2, HK=6, head_groups=3),
]
SOME = [EACH[0], EACH[2]]


def _module(case: Case, core: nn.Module, **options: Any) -> nn.Module:
    return case.style(keep_kv=False, **options).apply(core, case.mesh())


def _leaves(case: Case, rank: int) -> list[Tensor]:
    return [case.local(x, rank).clone().requires_grad_() for x in case.qkv()]


class LocalEager(nn.Module):
    """Attention on plain BNSD tensors in differentiable ops, told its rows by the window."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        window = attention_window()
        first, keys = (0, k.shape[2]) if window is None else (window.query_start, window.key_length)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) * x.new_ones(()) for x in (k, v))
        hidden = torch.arange(first, first + q.shape[2])[:, None] < torch.arange(keys)
        scores = (q @ k.transpose(-1, -2)).masked_fill(hidden, float("-inf"))
        return scores.softmax(-1) @ v


class Cubed(nn.Module):
    """Saves k and v themselves, whose second derivatives do not vanish."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k * k * k, v * v
        out: Tensor = LocalEager()(q, k, v)
        return out


@pytest.mark.parametrize("order", ["FFBB", "FBFB", "FFFB"])
@pytest.mark.parametrize("case", EACH, ids=str)
def test_several_calls_may_be_in_flight(case: Case, order: str) -> None:
    """Each backward gathers what its own forward had, last in first out or not."""

    def run(rank: int) -> None:
        module = _module(case, Sdpa())
        waiting: list[tuple[int, list[Tensor], Tensor]] = []
        numbers = itertools.count()
        for step in order:
            if step == "F":
                scale = 1 + next(numbers)
                leaves = [case.local(x * scale, rank).requires_grad_() for x in case.qkv()]
                waiting.append((scale, leaves, module(*leaves)))
                continue
            scale, leaves, out = waiting.pop(0)
            expected, grads = reference(Sdpa(), [x * scale for x in case.qkv()], case.upstream())
            with count_collectives() as counted:
                out.backward(case.local(case.upstream(), rank))
            assert_close(out, case.local(expected, rank))
            for x, full in zip(leaves, grads, strict=True):
                assert full is not None
                assert_close(x.grad, case.local(full, rank), kind="grad")
            assert counted.count("all_gather") == 2 * case.head_groups

    ranks(case.P).run(run)


@pytest.mark.parametrize("case", EACH, ids=str)
def test_a_retained_graph_gathers_each_time(case: Case) -> None:
    """Two backward passes of one graph: twice the gradient, two gathers each."""

    def run(rank: int) -> None:
        _, grads = reference(Sdpa(), case.qkv(), case.upstream())
        leaves = _leaves(case, rank)
        out = _module(case, Sdpa())(*leaves)
        for times in (1, 2):
            with count_collectives() as counted:
                out.backward(case.local(case.upstream(), rank), retain_graph=times == 1)
            assert counted.count("all_gather") == 2 * case.head_groups
            for x, full in zip(leaves, grads, strict=True):
                assert full is not None
                assert_close(x.grad, times * case.local(full, rank), kind="grad")

    ranks(case.P).run(run)


@pytest.mark.parametrize("wanted", ["q", "k", "qv"])
@pytest.mark.parametrize("case", EACH, ids=str)
def test_some_gradients_only(case: Case, wanted: str) -> None:
    """``autograd.grad`` of some of q, k, v: all ranks gather, and the numbers are right."""

    def run(rank: int) -> None:
        _, grads = reference(Sdpa(), case.qkv(), case.upstream())
        leaves = dict(zip("qkv", _leaves(case, rank), strict=True))
        out = _module(case, Sdpa())(*leaves.values())
        with count_collectives() as counted:
            found = torch.autograd.grad(
                out, [leaves[name] for name in wanted], case.local(case.upstream(), rank)
            )
        assert counted.count("all_gather") == 2 * case.head_groups
        for name, grad in zip(wanted, found, strict=True):
            full = grads["qkv".index(name)]
            assert full is not None
            assert_close(grad, case.local(full, rank), kind="grad")

    ranks(case.P).run(run)


@pytest.mark.parametrize("needs", ["q", "kv", "v"])
@pytest.mark.parametrize("case", SOME, ids=str)
def test_inputs_that_need_no_gradient(case: Case, needs: str) -> None:
    """Frozen q, k or v: K and V are released with what there is of their gradients."""

    def run(rank: int) -> None:
        _, grads = reference(Sdpa(), case.qkv(), case.upstream())
        leaves = [case.local(x, rank).clone() for x in case.qkv()]
        for name, x in zip("qkv", leaves, strict=True):
            x.requires_grad_(name in needs)
        out = _module(case, Sdpa())(*leaves)
        with count_collectives() as counted:
            out.backward(case.local(case.upstream(), rank))
        assert counted.count("all_gather") == 2
        for name, x, full in zip("qkv", leaves, grads, strict=True):
            assert full is not None
            if name in needs:
                assert_close(x.grad, case.local(full, rank), kind="grad")

    ranks(case.P).run(run)


@pytest.mark.parametrize("case", [*SOME, EACH[3]], ids=str)
def test_second_derivatives(case: Case) -> None:
    """The gradient of a function of all first gradients, against one device."""
    case = case.but(layout="BNSD")
    weights = [randn(*x.shape, seed=20 + i) for i, x in enumerate(case.qkv())]

    def penalty(out: Tensor, leaves: list[Tensor], up: Tensor, ws: list[Tensor]) -> None:
        first = torch.autograd.grad(out, leaves, up, create_graph=True)
        torch.stack([(g * w).sum() for g, w in zip(first, ws, strict=True)]).sum().backward()

    def run(rank: int) -> None:
        whole = [x.clone().requires_grad_() for x in case.qkv()]
        penalty(Cubed()(*whole), whole, case.upstream(), weights)
        leaves = _leaves(case, rank)
        out = _module(case, Cubed(), use_local_input=True)(*leaves)
        local_weights = [case.local(w, rank) for w in weights]
        penalty(out, leaves, case.local(case.upstream(), rank), local_weights)
        for x, full in zip(leaves, whole, strict=True):
            assert full.grad is not None
            assert_close(x.grad, case.local(full.grad, rank), kind="grad")

    ranks(case.P).run(run)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not"])
@pytest.mark.parametrize("case", EACH, ids=str)
def test_checkpointing_frees_k_and_v_by_itself(case: Case, reentrant: bool) -> None:
    """One gather in forward, one in the recomputation, and none more."""

    def run(rank: int) -> None:
        expected, grads = reference(Sdpa(), case.qkv(), case.upstream())
        module, leaves = _module(case, Sdpa()), _leaves(case, rank)
        with count_collectives() as counted:
            out = checkpoint(module, *leaves, use_reentrant=reentrant)
            out.backward(case.local(case.upstream(), rank))
        assert counted.count("all_gather") == 4 * case.head_groups
        assert_close(out, case.local(expected, rank))
        for x, full in zip(leaves, grads, strict=True):
            assert full is not None
            assert_close(x.grad, case.local(full, rank), kind="grad")

    ranks(case.P).run(run)


def test_hooks_of_others_are_not_bypassed() -> None:
    """Under ``save_on_cpu`` or a counting pair, everything saved goes through that pair."""

    def run(rank: int) -> None:
        case, packed = EACH[0], list[int]()

        def pack(x: Tensor) -> Tensor:
            packed.append(x.numel())
            return x

        counting = saved_tensors_hooks(pack, lambda x: x)
        for around in (save_on_cpu(), counting):
            with around:
                compare(rank, case, Sdpa, keep_kv=False, check_traffic=False)
        assert packed.count(case.B * case.S * case.HK * case.D) >= 2, "k and v among them"

    ranks(2).run(run)


@pytest.mark.parametrize("case", EACH, ids=str)
def test_without_a_graph_nothing_is_hooked(case: Case) -> None:
    """no_grad: the core sees no hooks, and K and V are gathered once."""

    class Core(Sdpa):
        def forward(self, *args: Any) -> Tensor:
            assert (top_saved_tensor_hooks() is not None) == torch.is_grad_enabled()
            return super().forward(*args)

    def run(rank: int) -> None:
        expected, _ = reference(Sdpa(), case.qkv(), case.upstream())
        module = _module(case, Core())
        for grads in (False, True):
            with torch.set_grad_enabled(grads), count_collectives() as counted:
                out = module(*_leaves(case, rank))
            assert top_saved_tensor_hooks() is None
            assert_close(out, case.local(expected, rank))
            assert counted.count("all_gather") == 2 * case.head_groups

    ranks(case.P).run(run)


class Fragile(Sdpa):
    """Raises in one of its calls, after it has saved something."""

    error: BaseException | None = None
    calls = 0

    def forward(self, *args: Any) -> Tensor:
        out = super().forward(*args)
        self.calls -= 1
        if self.error is not None and self.calls == 0:
            raise self.error
        return out


@pytest.mark.parametrize(
    ("case", "call", "error"),
    [
        (EACH[0], 1, RuntimeError),
        (EACH[0], 1, KeyboardInterrupt),
        (EACH[1], 1, KeyboardInterrupt),
        (EACH[1], 2, RuntimeError),
        (EACH[1], 2, KeyboardInterrupt),
        (EACH[4], 1, RuntimeError),
        (EACH[4], 2, RuntimeError),
        (EACH[4], 2, KeyboardInterrupt),
    ],
    ids=str,
)
def test_an_exception_inside_takes_the_hooks_away(
    case: Case, call: int, error: type[BaseException]
) -> None:
    """In any call of the module; an interrupt, which skips torch's hooks, until the next save."""

    def run(rank: int) -> None:
        core = Fragile()
        core.error, core.calls = error("on purpose"), call
        module, leaves = _module(case, core), _leaves(case, rank)
        with pytest.raises(error, match="on purpose"):
            module(*leaves)
        x = torch.ones(2, requires_grad=True)
        y = x * x
        assert top_saved_tensor_hooks() is None
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2, 2]
        core.error = None
        compare(rank, case, Sdpa, applied=module, keep_kv=False)

    ranks(case.P).run(run)


def test_hooks_that_others_leave_for_later_stay() -> None:
    """A pre-hook that pushes a pair, whose forward hook pops it after the boundary has closed."""

    def run(rank: int) -> None:
        case, seen = EACH[0], list[object]()
        module = _module(case, Sdpa())
        others = saved_tensors_hooks(lambda x: x.detach(), lambda x: x)
        module.register_forward_pre_hook(lambda *_: others.__enter__())

        def after(*_: object) -> None:
            top = top_saved_tensor_hooks()
            assert top is not None
            seen.append(top[0] is others.pack_hook)
            others.__exit__()

        module.register_forward_hook(after)
        compare(rank, case, Sdpa, applied=module, keep_kv=False)
        assert seen == [True]
        assert top_saved_tensor_hooks() is None

    ranks(2).run(run)


class Doubling(nn.Module):
    """Uses k, changes it in place, uses it again; likewise v, with its own hands on."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            k.mul_(2)
        v.detach().add_(1)
        out: Tensor = self.core(q, k, v)
        return out


@pytest.mark.parametrize("local", [False, True], ids=["DTensor", "plain"])
@pytest.mark.parametrize("case", [EACH[0], EACH[2], EACH[4]], ids=str)
def test_k_and_v_that_the_module_changes_in_place_are_kept(case: Case, local: bool) -> None:
    """What was gathered is not what attention used; the gradients are still those of one device."""

    def run(rank: int) -> None:
        clone = lambda core, *xs: core(*(x.clone() for x in xs))  # noqa: E731
        expected, grads = reference(Doubling(Sdpa()), case.qkv(), case.upstream(), clone)
        leaves = _leaves(case, rank)
        out = _module(case, Doubling(Sdpa()), use_local_input=local)(*leaves)
        out.backward(case.local(case.upstream(), rank))
        assert_close(out, case.local(expected, rank))
        for x, full in zip(leaves, grads, strict=True):
            assert full is not None
            assert_close(x.grad, case.local(full, rank), kind="grad")

    ranks(case.P).run(run)


def test_other_tensors_changed_in_place_are_still_found_out() -> None:
    """Torch does not look at versions where there are hooks; ours do."""

    class Careless(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            weights = (q @ k.transpose(-1, -2)).softmax(-1)
            out = weights @ v
            weights.mul_(2)
            return out

    def run(rank: int) -> None:
        for local in (False, True):
            case = Case(P=2, degree=1, HK=12, layout="BNSD")
            out = _module(case, Careless(), use_local_input=local)(*_leaves(case, rank))
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()

    ranks(2).run(run)


def test_a_shard_changed_in_place_before_backward_is_refused() -> None:
    """It would be gathered as it is now. In Hybrid it has been sent away, and may change."""

    def run(rank: int) -> str:
        message = ""
        for case in (Case(P=4, degree=2), Case(P=4, degree=1)):
            shards = [x * 1 for x in _leaves(case, rank)]
            out = _module(case, Sdpa())(*shards)
            shards[1].detach().zero_()
            if case.degree == 2:
                out.sum().backward()
                continue
            with pytest.raises(RuntimeError, match="keep_kv") as caught:
                out.sum().backward()
            message = str(caught.value)
        return message

    (message,) = set(ranks(4).run(run))
    assert "k and v (versions [1, 0]) must be as they were in forward (versions [0, 0])" in message


def test_reading_the_graph_outside_of_backward_is_refused() -> None:
    """It would gather on the ranks that look, and hang there."""

    def run(rank: int) -> None:
        class Product(nn.Module):
            def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return q * k.narrow(1, 0, q.shape[1])

        case = Case(P=2, degree=1, HK=12)
        out = _module(case, Product(), use_local_input=True)(*_leaves(case, rank))
        node: Any = out.grad_fn
        with pytest.raises(RuntimeError, match="must be read by backward"):
            _ = node._saved_other
        out.sum().backward()

    ranks(2).run(run)


def test_a_backward_that_fails_leaves_nothing_in_flight() -> None:
    """A hook raises between the start of the gather and its use; the next step is right."""

    def run(rank: int) -> None:
        case = Case(P=4, degree=2)

        class Hooked(Sdpa):
            def forward(self, *args: Any) -> Tensor:
                out = super().forward(*args)
                if self.training:
                    out.register_hook(self.fail)
                return out

            def fail(self, grad: Tensor) -> None:
                raise RuntimeError("on purpose")

        core = Hooked()
        module = _module(case, core)
        out = module(*_leaves(case, rank))
        with pytest.raises(RuntimeError, match="on purpose"):
            out.backward(case.local(case.upstream(), rank))
        del out
        core.eval()
        compare(rank, case, Sdpa, applied=module, keep_kv=False)

    ranks(4).run(run)


@pytest.mark.parametrize("case", EACH, ids=str)
def test_nothing_is_left_of_a_step(case: Case) -> None:
    """Without the cycle collector: shards go with backward, even while the output is held."""

    def run(rank: int) -> None:
        module = _module(case, Sdpa())
        made = list[weakref.ref[GatheredKV]]()
        original = GatheredKV.__init__

        def watched(self: GatheredKV, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if args[1] is group:
                made.append(weakref.ref(self))

        boundary: Any = module._forward_pre_hooks[next(iter(module._forward_pre_hooks))]
        group = boundary.boundary.colossal_group
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:  # the class is shared by the ranks
                patch.setattr(GatheredKV, "__init__", watched)
            torch.distributed.barrier()
            outs = [module(*_leaves(case, rank)) for _ in range(2)]
            torch.distributed.barrier()
        if rank == 0:
            assert len(made) == 2 * case.head_groups
            assert all(one() is not None for one in made)
        outs.pop()  # never goes backward
        if rank == 0:
            assert sum(one() is not None for one in made) == case.head_groups
        outs[0].backward(case.local(case.upstream(), rank))
        if rank == 0:
            assert not any(one() is not None for one in made)

    gc.collect()
    gc.disable()
    try:
        ranks(case.P).run(run)
    finally:
        gc.enable()


def _backward_in_another_thread(rank: int, case: Case) -> None:
    _, grads = reference(Sdpa(), case.qkv(), case.upstream())
    leaves = _leaves(case, rank)
    out = _module(case, Sdpa())(*leaves)
    thread = threading.Thread(target=out.backward, args=[case.local(case.upstream(), rank)])
    thread.start()
    thread.join()
    for x, full in zip(leaves, grads, strict=True):
        assert full is not None
        assert_close(x.grad, case.local(full, rank), kind="grad")


@pytest.mark.parametrize("case", [EACH[0], EACH[0].but(head_groups=2)], ids=str)
def test_backward_may_run_in_a_thread_of_its_own(case: Case) -> None:
    """As it does on accelerators."""
    ranks(case.P, backend="processes").run(_backward_in_another_thread, case)
