"""What a core may do with q, k and v: write in place, differentiate twice, be compiled."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_mesh.testing import assert_close, randn, ranks

from ._compare import Case, compare
from ._cores import Eager

SMALL = [
    Case(P=2, layout="BNSD"),
    Case(P=2, degree=1, layout="BNSD"),
    Case(P=4, degree=2, layout="BNSD"),
    Case(P=2, HK=12, head_groups=2, layout="BNSD"),
    Case(P=2, HK=12, degree=1, head_groups=2, layout="BNSD"),
]
every = pytest.mark.parametrize("case", SMALL, ids=lambda c: f"{c}-h{c.head_groups}")


class Cubed(nn.Module):
    """Scores to the third power: second derivatives reach q, k and v."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output, ``[B, H, S, D]``."""
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        return (0.3 * q @ k.transpose(-1, -2)).pow(3) @ v


class Pointwise(nn.Module):
    """No contraction: q meets sums over all keys."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output, ``[B, H, S, D]``."""
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        return q * k.pow(2).mean(2, keepdim=True) + v.pow(3).sum(2, keepdim=True)


@pytest.mark.parametrize("core", [Cubed, Pointwise])
@every
def test_second_derivatives_of_dtensors(case: Case, core: type[nn.Module]) -> None:
    """A gradient penalty, as for one process: right in every mode, never silently another."""
    weights = [randn(*x.shape, seed=20 + i) for i, x in enumerate(case.qkv())]

    def penalise(out: Tensor, leaves: Sequence[Tensor], upstream: Tensor, by: Any) -> None:
        first = torch.autograd.grad(out, leaves, upstream, create_graph=True)
        torch.stack([(g * w).sum() for g, w in zip(first, by, strict=True)]).sum().backward()

    whole = [x.requires_grad_() for x in case.qkv()]
    penalise(core()(*whole), whole, case.upstream(), weights)

    def run(rank: int) -> None:
        module = case.style().apply(core(), case.mesh())
        shards = [case.local(x.detach(), rank).clone().requires_grad_() for x in whole]
        own = [case.local(w, rank) for w in weights]
        penalise(module(*shards), shards, case.local(case.upstream(), rank), own)
        for shard, full in zip(shards, whole, strict=True):
            assert_close(shard.grad, case.local(full.grad, rank), kind="grad")

    ranks(case.P).run(run)


@every
def test_a_write_to_what_attention_saved_is_an_error_as_without_cp(case: Case) -> None:
    """SDPA saves its output for backward; torch refuses the write, and so do we."""

    class Writes(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            return out.mul_(2)

    whole = [x.requires_grad_() for x in case.qkv()]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Writes()(*whole).sum().backward()

    def run(rank: int) -> None:
        module = case.style().apply(Writes(), case.mesh())
        shards = [case.local(x.detach(), rank).clone().requires_grad_() for x in whole]
        out = module(*shards)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out, shards, torch.ones_like(out))

    ranks(case.P).run(run)


def test_a_write_to_q_counts_for_whoever_made_it() -> None:
    """In Colossal q is the caller's own tensor: what its producer saved must not change unseen."""

    class Halves(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q.mul_(0.5)
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def run(rank: int) -> None:
        case = Case(P=2, degree=1, layout="BNSD")
        module = case.style().apply(Halves(), case.mesh())
        leaves = [case.local(x, rank).clone().requires_grad_() for x in case.qkv()]
        out = module(leaves[0].exp(), *leaves[1:])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out, leaves, torch.ones_like(out))

    ranks(2).run(run)


def test_load_balance_refuses_a_core_that_writes_to_k() -> None:
    """The core runs twice on the same k and v; a write would be made twice."""

    class Scales(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k.mul_(0.5)
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def run(rank: int) -> str:
        case = Case(P=2, degree=1, load_balance=True, layout="BNSD")
        core = case.style().apply(Scales(), case.mesh())
        with pytest.raises(ValueError, match="must not write to in place") as caught:
            core(*(case.local(x, rank).clone() for x in case.qkv()))
        return str(caught.value)

    first, second = ranks(2).run(run)
    assert first == second


def test_ranks_that_differ_in_use_local_input_are_told() -> None:
    """It decides in what order the tensors lie on the wire."""

    def run(rank: int) -> str:
        case = Case(P=2)
        core = case.style(use_local_input=rank == 0).apply(Eager(), case.mesh())
        with pytest.raises(ValueError, match="style must be the same on all ranks") as caught:
            core(*(case.local(x, rank) for x in case.qkv()))
        return str(caught.value)

    first, second = ranks(2).run(run)
    assert first == second


@pytest.mark.parametrize("several", [{"head_groups": 2}, {"degree": 1, "load_balance": True}])
def test_full_backward_hooks_that_would_see_one_call_are_refused(several: dict[str, Any]) -> None:
    """torch lays their nodes around the module's own call only."""

    def run(rank: int) -> None:
        case = Case(P=2, HK=12).but(**several)
        core = case.style().apply(Eager(), case.mesh())
        handle = core.register_full_backward_hook(lambda module, grads, outs: None)
        with pytest.raises(ValueError, match="would run for one call only"):
            core(*(case.local(x, rank).requires_grad_() for x in case.qkv()))
        handle.remove()
        compare(rank, case, Eager, applied=core)

    ranks(2).run(run)


def _compiled(rank: int, case: Case) -> None:
    core = Eager(case.layout, head_size=case.D)
    core.compile(backend="eager")
    case.style().apply(core, case.mesh())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # dynamo tells what it does not trace
        compare(rank, case, lambda: Eager(case.layout, head_size=case.D), applied=core)


@pytest.mark.parametrize("case", [SMALL[0], SMALL[1], SMALL[3]], ids=str)
def test_a_compiled_core_gives_the_same_numbers(case: Case) -> None:
    """torch.compile of the core, with the hooks outside of the graph."""
    ranks(case.P, backend="processes").run(_compiled, case, timeout=600.0)


class Asking(nn.Module):
    """Attention that asks whether its frames, and those that it calls, are traced."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.told = Eager(), list[bool]()

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.told.append(torch.compiler.is_compiling())
        return _asked(self, query, key, value)


def _asked(core: Asking, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    core.told.append(torch.compiler.is_compiling())
    return core.inner(query, key, value)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core, self.told = Asking(), list[bool]()

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.told.append(torch.compiler.is_compiling())
        out = self.core(query * 1.5, key, value).sin()
        self.told.append(torch.compiler.is_compiling())
        return out


def _asked_in_a_compiled_block(rank: int, case: Case) -> None:
    block = Around()
    case.style().apply(block.core, case.mesh())
    block.compile(backend="eager")
    mine = [case.local(x, rank) for x in case.qkv()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # dynamo tells what it does not trace
        block(*mine).sum()
        with pytest.raises(ValueError, match="must be a tensor"):
            block(mine[0], None, None)
        block(*mine).sum()  # traced again after an error
    assert block.told == [True] * 5
    assert block.core.told == [False] * 4


def test_torch_compile_traces_around_a_boundary_and_nothing_inside() -> None:
    """A traced frame inside would run torch's ops on DTensors that the view should see first."""
    case = Case(P=2)
    ranks(2, backend="processes").run(_asked_in_a_compiled_block, case, timeout=600.0)


def test_checkpoints_of_a_mesh_do_not_grow() -> None:
    """What is remembered per mesh is not saved with it."""

    def run(rank: int) -> None:
        case = Case(P=2)
        mesh = case.mesh()
        core = case.style().apply(Eager(), mesh)
        before = None
        for length in (24, 48, 72):
            sized = case.but(S=length)
            core(*(sized.local(x, rank) for x in sized.qkv()))
            kept = mesh.__dict__.get("_hp_specs")
            assert kept and pickle.loads(pickle.dumps(kept)) == {}
            size = len(pickle.dumps(kept))
            assert before in (None, size)
            before = size

    ranks(2).run(run)
