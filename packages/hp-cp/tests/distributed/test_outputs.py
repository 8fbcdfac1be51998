"""What the caller gets back: type, layout and dims of outputs, whatever the core returns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from hp_cp import ContextParallel, attention_window, init_device_mesh
from hp_mesh.testing import assert_close, ranks

from ._compare import EACH, Case, compare, reference
from ._cores import Eager, Sdpa, heads_first

UNBALANCED = EACH[:3]


class Named(NamedTuple):
    out: Tensor
    weights: Tensor | None


MARK = object()
SHAPES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda x: x, lambda y: y),
    "tuple-none": (lambda x: (x, None), lambda y: y[0]),
    "list-object": (lambda x: [x, MARK], lambda y: y[0]),
    "namedtuple": (lambda x: Named(x, None), lambda y: y.out),
    "dict": (lambda x: {"out": x, "note": "kept"}, lambda y: y["out"]),
    "ordered-dict": (lambda x: OrderedDict(note="kept", out=x), lambda y: y["out"]),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", EACH[::3], ids=str)
def test_containers_keep_their_type_and_what_is_not_a_tensor(case: Case, shape: str) -> None:
    """Behaviours 22, 26: the first tensor is laid out, the rest is the same object."""
    make, take = SHAPES[shape]

    class Wraps(Sdpa):
        def forward(self, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
            return make(super().forward(q, k, v))

    def call(module: nn.Module, *qkv: Tensor) -> Tensor:
        result = module(*qkv)
        assert type(result) is type(make(qkv[0]))
        if isinstance(result, (tuple, list)) and len(result) > 1:
            assert result[1] in (None, MARK)
        return take(result)

    ranks(case.P).run(compare, case, Wraps, call=call)


class WithStatistics(nn.Module):
    """Returns the output [B, S, H, D] and log-sum-exp [B, H, S]."""

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        out = Eager()(q, k, v)
        qh, kh = (heads_first(x, "BSHD", 6) for x in (q, k))
        kh = kh.repeat_interleave(qh.shape[1] // kh.shape[1], 1)
        scores = qh @ kh.mT
        return out, torch.logsumexp(scores, -1)


@pytest.mark.parametrize("case", UNBALANCED, ids=str)
def test_an_extra_tensor_is_this_ranks_part_unless_declared(case: Case) -> None:
    """Behaviour 26, U11: statistics are not re-laid with the dims of q; declared, they are."""

    def on(rank: int) -> None:
        expected, statistics = WithStatistics()(*case.qkv())
        local = [case.local(x, rank) for x in case.qkv()]
        module = case.style().apply(WithStatistics(), case.mesh())
        out, extra = module(*local)
        assert_close(out, case.local(expected, rank))
        assert type(extra) is Tensor
        u = case.P if case.degree is None else case.degree
        c, d = divmod(rank, u)
        assert_close(extra, statistics.chunk(case.P // u, 2)[c].chunk(u, 1)[d])
        declared = case.style(outputs=(0, 1)).apply(WithStatistics(), case.mesh())
        out, extra = declared(*local)
        assert_close(out, case.local(expected, rank))
        assert_close(extra, statistics.chunk(case.P, 2)[rank])

    ranks(case.P).run(on)


class Dims(nn.Module):
    """Takes BNSD; returns it as `how` says."""

    def __init__(self, how: str, plain: bool) -> None:
        super().__init__()
        self.how, self.plain = how, plain

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        out = Sdpa("BNSD")(q, k, v)
        out = out if self.how == "BNSD" else out.transpose(1, 2)
        out = out.flatten(2) if self.how == "BSH" else out
        return out.to_local() if self.plain and isinstance(out, DTensor) else out


OUT = {"BNSD": (2, 1), "BSHD": (1, 2), "BSH": (1, 2)}


@pytest.mark.parametrize("how", OUT)
@pytest.mark.parametrize("plain", [False, True], ids=["dtensor", "plain"])
@pytest.mark.parametrize("case", EACH, ids=str)
def test_the_output_may_have_other_dims_than_q(case: Case, how: str, plain: bool) -> None:
    """BNSD in; BNSD, BSHD or flattened heads out. A DTensor says so itself; a plain one is told."""
    case = case.but(layout="BNSD")
    options: dict[str, Any] = {}
    if plain:
        options = {"output_seq_dim": OUT[how][0], "output_head_dim": OUT[how][1]}
    _compare_dims(case, how, plain, options)


@pytest.mark.parametrize("case", EACH, ids=str)
def test_named_output_dims_are_accepted_beside_dtensors(case: Case) -> None:
    """`output_seq_dim` repeats what a DTensor says already; also counted from the end."""
    case = case.but(layout="BNSD")
    _compare_dims(case, "BSHD", False, {"output_seq_dim": 1, "output_head_dim": 2})
    _compare_dims(case, "BSHD", True, {"output_seq_dim": -3, "output_head_dim": -2})


def _compare_dims(case: Case, how: str, plain: bool, options: dict[str, Any]) -> None:
    seq_dim = OUT[how][0]

    def on(rank: int) -> None:
        upstream = case.upstream()
        upstream = upstream if how == "BNSD" else upstream.transpose(1, 2)
        upstream = upstream.flatten(2) if how == "BSH" else upstream
        expected, grads = reference(Dims(how, False), case.qkv(), upstream)
        module = case.style(**options).apply(Dims(how, plain), case.mesh())
        local = [case.local(x, rank).clone().requires_grad_() for x in case.qkv()]
        out = module(*local)
        assert type(out) is Tensor
        assert_close(out, expected.chunk(case.P, seq_dim)[rank])
        out.backward(upstream.chunk(case.P, seq_dim)[rank])
        for x, full in zip(local, grads, strict=True):
            assert full is not None
            assert_close(x.grad, case.local(full, rank), kind="grad")

    ranks(case.P).run(on)


@pytest.mark.parametrize("case", UNBALANCED, ids=str)
def test_a_plain_output_of_global_length_is_cut(case: Case) -> None:
    """A core that gathers everything itself and returns the whole output."""

    class Whole(nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            out = Eager()(q, k, v)
            return out.full_tensor() if isinstance(out, DTensor) else out

    ranks(case.P).run(compare, case, Whole, check_traffic=False)


def test_a_plain_output_of_another_length_is_refused() -> None:
    """Neither this rank's rows nor all of them; every rank says so, and the next call works."""

    def on(rank: int) -> None:
        case = Case(P=2, degree=1)

        class Drops(Sdpa):
            drop = True

            def forward(self, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
                out = super().forward(q, k, v)
                return out.to_local()[:, :-1] if self.drop and isinstance(out, DTensor) else out

        core = Drops()
        case.style().apply(core, case.mesh())
        with pytest.raises(ValueError, match=r"has 11 rows in dim 1, which must be .*\(12\)"):
            core(*(case.local(x, rank) for x in case.qkv()))
        core.drop = False
        compare(rank, case, Sdpa, applied=core)

    ranks(2).run(on)


def test_an_output_without_a_tensor_is_refused_by_type() -> None:
    """A string, or a tuple of None: the message says what was returned."""

    def on(rank: int) -> None:
        case = Case(P=2)
        for returned, message in (("text", "returned str"), ((None,), "NoneType")):

            class Odd(nn.Module):
                value: Any = returned

                def forward(self, q: Any, k: Any, v: Any) -> Any:
                    return self.value

            module = case.style().apply(Odd(), case.mesh())
            with pytest.raises(TypeError, match=message):
                module(*(case.local(x, rank) for x in case.qkv()))
            assert attention_window() is None

    ranks(2).run(on)


@pytest.mark.parametrize("local_output", [False, True], ids=["mirror", "local"])
@pytest.mark.parametrize("case", [*EACH, Case(P=4, degree=2)], ids=str)
def test_cp_dtensors_come_back_as_cp_dtensors(case: Case, local_output: bool) -> None:
    """Behaviour 23: Shard(seq) in and out, also in Hybrid, where `.shape` is the global one."""

    def on(rank: int) -> None:
        mesh = case.mesh()
        expected, grads = reference(Sdpa(), case.qkv(), case.upstream())
        module = case.style(use_local_output=local_output).apply(Sdpa(), mesh)
        local = [case.local(x, rank).clone().requires_grad_() for x in case.qkv()]
        fed = [DTensor.from_local(x, mesh, [Shard(1)], run_check=False) for x in local]
        out = module(*fed)
        assert isinstance(out, DTensor) != local_output
        if isinstance(out, DTensor):
            assert out.placements == (Shard(1),) and out.device_mesh == mesh
            assert out.shape == expected.shape
            assert_close(out.full_tensor(), expected)
            out = out.to_local()
        assert_close(out, case.local(expected, rank))
        out.backward(case.local(case.upstream(), rank))
        for x, full in zip(local, grads, strict=True):
            assert full is not None
            assert_close(x.grad, case.local(full, rank), kind="grad")

    ranks(case.P).run(on)


def test_cp_dtensors_on_the_two_axes_of_a_hybrid_mesh() -> None:
    """(Shard(1), Shard(1)) on ("co", "ds"): U7 labelled the second axis as replicated."""

    def on(rank: int) -> None:
        case = Case(P=4, degree=2)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("co", "ds"))
        expected = Sdpa()(*case.qkv())
        fed = [
            DTensor.from_local(case.local(x, rank), mesh, [Shard(1), Shard(1)], run_check=False)
            for x in case.qkv()
        ]
        out = case.style().apply(Sdpa(), mesh)(*fed)
        assert out.placements == (Shard(1), Shard(1))
        assert out.shape == expected.shape
        assert_close(out.full_tensor(), expected)

    ranks(4).run(on)


def test_a_replicated_dtensor_on_the_cp_axis_is_refused() -> None:
    """It would be the whole sequence on every rank."""

    def on(rank: int) -> None:
        case = Case(P=2)
        mesh = case.mesh()
        fed = [DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in case.qkv()]
        with pytest.raises(ValueError, match=r"must be Shard\(1\) on the CP axis"):
            case.style().apply(Sdpa(), mesh)(*fed)

    ranks(2).run(on)


NAMES = ("query", "key", "value")
CALLS: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    "all-keywords": ({"qkv_kwarg_names": NAMES}, lambda m, q, k, v: m(value=v, key=k, query=q)),
    "mixed": ({"qkv_kwarg_names": NAMES}, lambda m, q, k, v: m(q, k, value=v)),
    "positional-with-names": ({"qkv_kwarg_names": NAMES}, lambda m, q, k, v: m(q, k, v)),
    "positions-2-3-4": ({"qkv_indices": (2, 3, 4)}, lambda m, q, k, v: m(None, "keep", q, k, v)),
    "other-order": ({"qkv_indices": (2, 0, 1)}, lambda m, q, k, v: m(k, v, q)),
    "from-the-end": ({"qkv_indices": (-3, -2, -1)}, lambda m, q, k, v: m("keep", q, k, v)),
}


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("case", EACH[::3], ids=str)
def test_qkv_are_found_by_position_and_keyword(case: Case, how: str) -> None:
    """B08, behaviour 22: never a silent no-op; other arguments arrive untouched."""
    options, call = CALLS[how]

    class Takes(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            rest = [x for x in args if not isinstance(x, Tensor)]
            assert all(x is None or x == "keep" for x in rest)
            tensors = [x for x in args if isinstance(x, Tensor)]
            tensors += [kwargs[n] for n in NAMES if n in kwargs]
            if how == "other-order":
                tensors = [tensors[2], tensors[0], tensors[1]]
            return Sdpa()(*tensors)

    ranks(case.P).run(compare, case, Takes, call=call, **options)


def test_an_inner_and_an_outer_call_have_their_own_policy() -> None:
    """Behaviour 25: a core that calls another parallel core on its local tensors."""

    def on(rank: int) -> None:
        case = Case(P=2, degree=1)
        mesh = case.mesh()
        inner = case.style().apply(Sdpa(causal=False), mesh)

        class Outer(nn.Module):
            def forward(self, q: Any, k: Any, v: Any) -> Any:
                window = attention_window()
                rows = case.local(torch.zeros(2, 24), rank).shape[1]
                own = [x.to_local() for x in (q, k, v)]
                own[1:] = [x[:, rank * rows : (rank + 1) * rows] for x in own[1:]]
                out = inner(*own)
                assert type(out) is Tensor
                assert attention_window() is window is not None
                return out

        q, k, v = (case.local(x, rank) for x in case.qkv())
        fed = [DTensor.from_local(x, mesh, [Shard(1)], run_check=False) for x in (q, k, v)]
        out = case.style().apply(Outer(), mesh)(*fed)
        assert isinstance(out, DTensor)
        assert_close(out.to_local(), case.local(Sdpa(causal=False)(*case.qkv()), rank))

    ranks(2).run(on)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("case", EACH, ids=str)
def test_five_checkpointed_steps_leave_no_state(case: Case, reentrant: bool) -> None:
    """Behaviour 25, B19: both kinds of recompute; the module's attributes stay as they were."""

    def on(rank: int) -> None:
        module = case.style().apply(Sdpa(), case.mesh())
        before = set(vars(module))

        def call(m: nn.Module, *qkv: Tensor) -> Any:
            return checkpoint(m, *qkv, use_reentrant=reentrant)

        for _ in range(5):
            compare(rank, case, Sdpa, applied=module, call=call, check_traffic=False)
        assert set(vars(module)) == before
        assert attention_window() is None
        compare(rank, case, Sdpa, applied=module)

    ranks(case.P).run(on)


def test_remove_restores_the_bare_module() -> None:
    """Behaviour 7: hooks are gone and the result is that of one device; applying again works."""

    def on(rank: int) -> None:
        case = Case(P=2)
        style, module = case.style(), Sdpa()
        style.apply(module, case.mesh())
        with pytest.raises(ValueError, match="already has ContextParallel applied"):
            ContextParallel().apply(module, case.mesh())
        assert style.remove(module) is module
        assert not module._forward_pre_hooks and not module._forward_hooks
        assert torch.equal(module(*case.qkv()), Sdpa()(*case.qkv()))
        with pytest.raises(ValueError, match="no context-parallel style to remove"):
            style.remove(module)
        style.apply(module, case.mesh())
        compare(rank, case, Sdpa, applied=module)

    ranks(2).run(on)
