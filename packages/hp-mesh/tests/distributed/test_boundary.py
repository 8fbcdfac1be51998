"""The two hooks: put on once, taken off again, and nothing left behind whatever happens inside."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from hp_mesh import boundary as boundary_module
from hp_mesh import open_views
from hp_mesh._torch import from_local, function_mode_stack
from hp_mesh.boundary import Boundary, BoundaryStyle, Entry, boundary_of
from hp_mesh.mesh import init_device_mesh
from hp_mesh.open_views import attention_window, current_view
from hp_mesh.parallelize import parallelize_module
from hp_mesh.testing import assert_close, randn, ranks
from hp_mesh.view import View
from hp_mesh.window import AttentionWindow

S, D = 12, 5


class Gathered(torch.autograd.Function):
    """All-gather along dim 0 whose backward is the sum over ranks of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return DTensor.from_local(x, mesh, [Shard(0)]).full_tensor()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rank, size = ctx.mesh.get_local_rank(), ctx.mesh.size()
        torch.distributed.all_reduce(grad := grad.clone(), group=ctx.mesh.get_group())
        return grad.chunk(size)[rank], None


class RowsBoundary(Boundary[Entry]):
    """q ``[S/P, D]`` is a shard of rows; the second argument is gathered."""

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        q, k, *rest = args
        rank, size = self.mesh.get_local_rank(), self.mesh.size()
        view = View(
            mesh=self.mesh,
            cp_axes=(0,),
            window=AttentionWindow(rank * len(q), len(q), size * len(q), size * len(q)),
            query_placements=(Shard(0),),
            heads=(0, 1),
            num_heads=1,
            is_local=False,
            is_balanced=False,
            where=self.where,
        )
        q = from_local(q, self.mesh, [Shard(0)])
        k = from_local(
            Gathered.apply(k, self.mesh),
            self.mesh,
            [Replicate()],
            view.partial_grads([Replicate()]),
        )
        return Entry((q, k, *rest), kwargs, view)

    def leave(self, module: nn.Module, entry: Entry, output: Any) -> Any:
        return output.to_local() if isinstance(output, DTensor) else output


class Rows(BoundaryStyle):
    def make_boundary(self, module: nn.Module, device_mesh: DeviceMesh) -> RowsBoundary:
        return RowsBoundary(type(self).__name__, device_mesh)


class Core(nn.Module):
    """Causal attention of rows; ``trouble`` is called in the middle of it."""

    def __init__(self, trouble: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.trouble = trouble

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.T
        if self.trouble is not None:
            self.trouble()
        mask = torch.ones(len(k), len(k), dtype=torch.bool).tril()
        return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ k


def cp_mesh(size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))


def whole() -> tuple[Tensor, Tensor]:
    return randn(S, D, seed=1), randn(S, D, seed=2)


def cut(rank: int, size: int) -> list[Tensor]:
    return [x.chunk(size)[rank].clone().requires_grad_() for x in whole()]


def assert_right(module: nn.Module, rank: int, size: int) -> None:
    """Output and gradients of one call are those of the unsharded core."""
    full = [x.requires_grad_() for x in whole()]
    expected = Core()(*full)
    grad = randn(S, D, seed=3)
    expected.backward(grad)
    mine = cut(rank, size)
    out = module(*mine)
    out.backward(grad.chunk(size)[rank])
    assert_close(out, expected.chunk(size)[rank])
    for x, reference in zip(mine, full, strict=True):
        assert_close(x.grad, reference.grad.chunk(size)[rank], kind="grad")


def assert_nothing_open() -> None:
    assert function_mode_stack() == []
    assert boundary_module._open_calls.calls == []
    assert open_views._stack.views == []
    assert current_view() is None and attention_window() is None


def hook_counts(module: nn.Module) -> tuple[int, ...]:
    return (
        len(module._forward_pre_hooks),
        len(module._forward_pre_hooks_with_kwargs),
        len(module._forward_hooks),
        len(module._forward_hooks_with_kwargs),
        len(module._forward_hooks_always_called),
    )


def on_ranks(fn: Callable[..., Any], size: int = 2) -> list[Any]:
    return ranks(size).run(fn, size)


def test_apply_returns_the_same_module_with_two_hooks_more_and_remove_takes_them_off() -> None:
    def run(rank: int, size: int) -> None:
        core, style = Core(), Rows()
        core.register_forward_pre_hook(lambda module, args: None)
        core.register_forward_hook(lambda module, args, out: None)
        before = hook_counts(core)
        assert style.apply(core, cp_mesh(size)) is core
        assert hook_counts(core) == tuple(n + 1 for n in before)
        assert_right(core, rank, size)
        assert style.remove(core) is core
        assert hook_counts(core) == before and boundary_of(core) is None
        assert_close(core(*whole()), Core()(*whole()))
        with pytest.raises(ValueError, match="Rows: Core has no context-parallel style to remove"):
            style.remove(core)
        style.apply(core, cp_mesh(size))
        assert_right(core, rank, size)

    on_ranks(run)


def test_one_style_serves_many_modules_and_parallelize_module_applies_it() -> None:
    def run(rank: int, size: int) -> None:
        model = nn.Sequential(Core(), Core(), Core())
        parallelize_module(model, cp_mesh(size), {"0": (style := Rows()), "2": style})
        assert [boundary_of(m) is not None for m in model] == [True, False, True]
        for index in (0, 2):
            assert_right(model[index], rank, size)
        assert vars(style).keys() <= {"src_data_rank"}, "a style keeps nothing of a module"

    on_ranks(run)


def test_second_application_is_refused_also_on_a_deep_copy() -> None:
    def run(rank: int, size: int) -> None:
        core = Rows().apply(Core(), cp_mesh(size))
        for module in (core, copy.deepcopy(core)):
            with pytest.raises(
                ValueError, match=r"Rows: Core already has Rows applied.*remove\(\)"
            ):
                Rows().apply(module, cp_mesh(size))
            assert hook_counts(module) == (1,) * 5
        assert_right(core, rank, size)

    on_ranks(run)


def test_removing_from_a_deep_copy_leaves_the_original_and_the_other_way_round() -> None:
    def run(rank: int, size: int) -> None:
        core = Rows().apply(Core(), cp_mesh(size))
        copied, third = copy.deepcopy(core), copy.deepcopy(nn.Sequential(core))
        assert_right(copied, rank, size)
        Rows().remove(copied)
        assert boundary_of(copied) is None and boundary_of(core) is not None
        assert_right(core, rank, size)
        Rows().remove(core)
        assert_right(third[0], rank, size)

    on_ranks(run)


def test_pickle_says_why_not_and_state_dict_works() -> None:
    def run(rank: int, size: int, path: str) -> None:
        core = Rows().apply(Core(), cp_mesh(size))
        for save in (pickle.dumps, lambda module: torch.save(module, f"{path}.{rank}")):
            with pytest.raises(TypeError, match=r"cannot be pickled.*process groups.*state_dict"):
                save(core)
        core.load_state_dict(core.state_dict())
        pickle.dumps(Rows().remove(core))

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        ranks(2).run(run, 2, f"{folder}/module.pt")


class Stop(BaseException):
    """As KeyboardInterrupt: torch's always_call hooks do not run for it."""


def boom(kind: type[BaseException]) -> Callable[..., Any]:
    def trouble(*_: Any) -> None:
        raise kind("boom")

    return trouble


@pytest.mark.parametrize("kind", [RuntimeError, Stop, KeyboardInterrupt])
def test_exception_inside_leaves_nothing_active_and_the_next_call_is_right(
    kind: type[BaseException],
) -> None:
    def run(rank: int, size: int) -> None:
        core = Core(boom(kind))
        Rows().apply(core, cp_mesh(size))
        for _ in range(3):
            with pytest.raises(kind, match="boom"):
                core(*cut(rank, size))
            assert attention_window() is None and current_view() is None
            # a view that is still on the stack is dead: plain and DTensor ops are torch's own
            k = DTensor.from_local(torch.ones(2, 2), cp_mesh(size), [Replicate()])
            with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
                torch.ones(2, 2) + k
            assert k.sum().item() == 4.0
        core.trouble = None
        assert_right(core, rank, size)
        assert_nothing_open()

    on_ranks(run)


@pytest.mark.parametrize("kind", [RuntimeError, Stop])
@pytest.mark.parametrize("where", ["pre-before", "pre-after", "post-before", "post-after"])
def test_exception_in_a_foreign_hook_leaves_nothing_active(
    where: str, kind: type[BaseException]
) -> None:
    def run(rank: int, size: int) -> None:
        core = Core()
        stage, order = where.split("-")
        register = core.register_forward_pre_hook if stage == "pre" else core.register_forward_hook
        if order == "before":
            handle = register(boom(kind))
        Rows().apply(core, cp_mesh(size))
        if order == "after":
            handle = register(boom(kind))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns of hooks that fail while another error is
            with pytest.raises(kind, match="boom"):
                core(*cut(rank, size))
        assert attention_window() is None
        handle.remove()
        assert_right(core, rank, size)
        assert_nothing_open()

    on_ranks(run)


def test_error_in_the_entry_itself_opens_nothing() -> None:
    def run(rank: int, size: int) -> None:
        core = Rows().apply(Core(), cp_mesh(size))
        with pytest.raises(ValueError, match="unpack"):
            core(whole()[0])
        assert_nothing_open()
        assert_right(core, rank, size)

    on_ranks(run)


def test_call_from_an_except_block_is_not_taken_for_a_failed_one() -> None:
    def run(rank: int, size: int) -> None:
        core = Rows().apply(Core(), cp_mesh(size))
        try:
            raise KeyError("handled")
        except KeyError:
            assert_right(core, rank, size)
        assert_nothing_open()

    on_ranks(run)


def test_calls_within_calls_each_have_their_own_view() -> None:
    def run(rank: int, size: int) -> None:
        mesh, seen = cp_mesh(size), []
        inner = Core(lambda: seen.append(attention_window().global_length))
        Rows().apply(inner, mesh)
        outer = Core()

        def nested() -> None:
            seen.append(attention_window().global_length)
            inner(*(x.repeat(2, 1) for x in cut(rank, size)))
            seen.append(attention_window().global_length)
            with pytest.raises(ValueError, match="unpack"):
                inner(whole()[0])
            inner.trouble, kept = boom(Stop), inner.trouble
            with pytest.raises(Stop):
                inner(*cut(rank, size))
            inner.trouble = kept
            seen.append(attention_window().global_length)

        outer.trouble = nested
        Rows().apply(outer, mesh)
        assert_right(outer, rank, size)
        assert seen == [S, 2 * S, S, S]
        assert_nothing_open()

    on_ranks(run)


class Block(nn.Module):
    """A projection, attention under a boundary, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(D, 2 * D, dtype=torch.float64)
        with torch.no_grad():
            self.project.weight.copy_(randn(2 * D, D, seed=4))
            self.project.bias.copy_(randn(2 * D, seed=5))
        self.core = Core()

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.project(x).chunk(2, -1)
        return x + self.core(q, k)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("around", ["core", "block"])
def test_checkpoint_gives_the_same_gradients_and_keeps_nothing(
    around: str, reentrant: bool
) -> None:
    def step(block: Block, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        block.zero_grad()
        x = x.detach().requires_grad_()
        if around == "block":
            out = checkpoint(block, x, use_reentrant=reentrant)
        else:
            q, k = block.project(x).chunk(2, -1)
            out = x + checkpoint(block.core, q, k, use_reentrant=reentrant)
        with torch.no_grad():  # an evaluation between forward and backward
            block(x)
        out.backward(grad)
        return out.detach(), x.grad, block.project.weight.grad, block.project.bias.grad

    def run(rank: int, size: int) -> Any:
        block = Block()
        Rows().apply(block.core, cp_mesh(size))
        for _ in range(5):
            out, dx, dw, db = step(block, whole()[0].chunk(size)[rank], grad.chunk(size)[rank])
            assert_nothing_open()
        return out, dx, dw, db

    grad = randn(S, D, seed=6)
    out, dx, dw, db = step(Block(), whole()[0], grad)
    results = on_ranks(run)
    assert_close(torch.cat([r[0] for r in results]), out)
    assert_close(torch.cat([r[1] for r in results]), dx, kind="grad")
    assert_close(sum(r[2] for r in results), dw, kind="grad")
    assert_close(sum(r[3] for r in results), db, kind="grad")


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpoint_inside_the_boundary_is_refused_with_the_way_out(reentrant: bool) -> None:
    class Inside(Core):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return checkpoint(super().forward, q, k, use_reentrant=reentrant)

    def run(rank: int, size: int) -> None:
        core = Rows().apply(Inside(), cp_mesh(size))
        with pytest.raises(ValueError, match=r"Rows: .*checkpoint.*put the checkpoint around"):
            core(*cut(rank, size))
        assert_nothing_open()
        if not reentrant:
            with torch.no_grad():  # nothing is recomputed
                core(*cut(rank, size))

    on_ranks(run)


def test_no_grad_and_inference_mode_give_the_same_output() -> None:
    def run(rank: int, size: int) -> None:
        core = Rows().apply(Core(), cp_mesh(size))
        expected = Core()(*whole()).chunk(size)[rank]
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                assert_close(core(*(x.detach() for x in cut(rank, size))), expected)
        assert_nothing_open()

    on_ranks(run)


def test_view_of_one_thread_is_not_seen_by_another() -> None:
    """Ranks are threads here: each met its own rows at the same time."""
    meet = threading.Barrier(3)

    def run(rank: int, size: int) -> Any:
        core = Core(lambda: (meet.wait(300), seen.append(attention_window().query_start)))
        seen: list[int] = []
        Rows().apply(core, cp_mesh(size))
        core(*cut(rank, size))
        return seen, threading.get_ident()

    results = on_ranks(run, 3)
    assert [seen for seen, _ in results] == [[0], [4], [8]]
    assert len({ident for _, ident in results}) == 3
    assert attention_window() is None


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_inputs_are_freed_after_the_call(fails: bool) -> None:
    """At once: a cycle would keep activations until the garbage collector comes."""

    def run(rank: int, size: int) -> None:
        core = Core(boom(RuntimeError) if fails else None)
        Rows().apply(core, cp_mesh(size))
        inputs = cut(rank, size)
        alive = [weakref.ref(x) for x in inputs]
        try:
            core(*inputs)
        except RuntimeError:
            assert fails
        del inputs
        if fails:
            gc.collect()  # an exception and its frames are a cycle
        assert [ref() for ref in alive] == [None, None]
        assert sys.exc_info()[1] is None

    on_ranks(run)
