"""What a module sees inside a boundary: the whole sequence, or exactly the keys it may see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from hp_dsa import (
    DSAIndexerContextParallel,
    DSAIndexerLossContextParallel,
    DSASparseAttentionContextParallel,
    attention_window,
    init_device_mesh,
    ops,
    parallelize_module,
)
from hp_mesh.boundary import boundary_of
from hp_mesh.testing import assert_close, randn, ranks

from ._layer import (
    NAMES,
    SCALE,
    TOPK,
    Attention,
    Case,
    Indexer,
    Layer,
    Loss,
    check,
    compare,
    reference,
    scalar,
    styles,
    upstreams,
)


class Spy(nn.Module):
    """Remembers how it was called and returns its first argument."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.args, self.kwargs = args, kwargs
        self.window = attention_window()
        return args[0] if args else next(iter(kwargs.values()))


def _placements(x: Any) -> Any:
    assert isinstance(x, DTensor)
    return tuple(x.placements)


def _mesh(P: int) -> Any:
    return init_device_mesh("cpu", (P,), mesh_dim_names=("cp",))


ROWS, KEYS = (Shard(1),), (Replicate(),)


def _indexer_sees(rank: int) -> None:
    spy = DSAIndexerContextParallel(layout="bsnd").apply(Spy(), _mesh(2))
    q, k, w = randn(2, 4, 8, 16), randn(2, 4, 1, 16), randn(2, 4, 8)

    out = spy(q, k, w, "kept", sparse_count=3)

    assert [_placements(x) for x in spy.args[:3]] == [ROWS, KEYS, ROWS]
    assert [tuple(x.shape) for x in spy.args[:3]] == [(2, 8, 8, 16), (2, 8, 1, 16), (2, 8, 8)]
    assert spy.args[3:] == ("kept",) and spy.kwargs == {"sparse_count": 3}
    assert (spy.window.query_start, spy.window.key_length) == (4 * rank, 8)
    assert not isinstance(out, DTensor) and torch.equal(out, q)


def test_the_indexer_sees_the_whole_sequence() -> None:
    """Behaviour 34: rows sharded, the key replicated; plain in, plain out."""
    ranks(2).run(_indexer_sees)


def _attention_sees(rank: int) -> None:
    spy = DSASparseAttentionContextParallel().apply(Spy(), _mesh(2))
    shapes = ((3, 5), (1, 5), (3, 2), (1, 2))
    q, k, r, kr = (randn(2, 4, *shape, seed=rank) for shape in shapes)
    topk = torch.zeros(2, 4, 1, 3, dtype=torch.int32)

    spy(q, k, k, topk, query_rope=r, key_rope=kr)
    assert [_placements(x) for x in spy.args] == [ROWS, KEYS, KEYS, ROWS]
    assert spy.args[1] is spy.args[2]  # value is key, inside as outside
    assert spy.args[3].dtype is torch.int32
    assert _placements(spy.kwargs["query_rope"]) == ROWS
    assert _placements(spy.kwargs["key_rope"]) == KEYS

    spy(q, k, k * 2, topk, r, kr)
    assert [_placements(x) for x in spy.args[4:]] == [ROWS, KEYS]
    assert spy.args[1] is not spy.args[2]
    assert_close(spy.args[2].full_tensor(), spy.args[1].full_tensor() * 2)

    spy(query=q, key=k, value=k, sparse_indices=topk, query_rope=None)
    assert _placements(spy.kwargs["sparse_indices"]) == ROWS
    assert spy.kwargs["query_rope"] is None


def test_attention_finds_its_tensors_by_position_or_keyword() -> None:
    """Behaviour 34: rotary parts are found under their keywords by default."""
    ranks(2).run(_attention_sees)


def _loss_sees(rank: int, layout: str, variant: str) -> None:
    style = DSAIndexerLossContextParallel(layout=layout, loss_variant=variant)
    assert f"loss_variant={variant!r}" in repr(style)
    spy = style.apply(Spy(), _mesh(2))
    head, dim = ((2, 4), 1) if layout == "BSND" else ((4,), 0)
    rows, keys, statistics = (Shard(dim),), (Replicate(),), (Shard(dim + 1),)
    one = (2, 1, 4, 3) if layout == "BSND" else (1, 4, 3)
    tensors = [randn(*head, 3, 5), randn(*head, 1, 5), randn(*head, 2, 4), randn(*head, 1, 4)]
    tensors += [randn(*head, 2, seed=rank)]
    expected = [rows, keys, rows, keys, rows]
    if variant == "sparse":
        tensors += [torch.zeros(*head, 1, 3, dtype=torch.int32), randn(*one), randn(*one)]
        expected += [rows, statistics, statistics]
    else:
        index = one[:-1]
        tensors += [randn(*one), randn(*one), randn(*index), randn(*index)]
        expected += [statistics] * 4
    ropes = [randn(*head, 3, 2), randn(*head, 1, 2)]

    scale = [1.0] if variant == "dense" else []
    spy(*tensors, *scale, *ropes)
    found = list(spy.args)
    if scale:
        assert found.pop(9) == 1.0
    assert [_placements(x) for x in found] == [*expected, rows, keys]

    # a scale where a rotary part may be, and the rotary parts by keyword
    spy(*tensors, 0.5, query_rope=ropes[0], key_rope=ropes[1])
    assert spy.args[-1] == 0.5
    assert _placements(spy.kwargs["key_rope"]) == keys
    spy(*tensors, *scale, None, None)
    assert spy.args[-2:] == (None, None)


@pytest.mark.parametrize("layout", ["BSND", "TND"])
@pytest.mark.parametrize("variant", ["sparse", "dense"])
def test_statistics_are_sharded_on_their_own_dim(layout: str, variant: str) -> None:
    """Behaviour 35: dim 2 for BSND, 1 for TND; the dense scale at position 9 is left alone."""
    ranks(2).run(_loss_sees, layout, variant)


def _renamed(rank: int) -> None:
    style = DSASparseAttentionContextParallel(
        key_kwarg_name="c_kv", value_kwarg_name="c_kv_too", key_rope_kwarg_name="k_pe"
    )
    spy = style.apply(Spy(), _mesh(2))
    q, k = randn(2, 4, 3, 5), randn(2, 4, 1, 5)
    topk = torch.zeros(2, 4, 1, 3, dtype=torch.int32)
    spy(q, topk_indices=topk, c_kv=k, c_kv_too=k, k_pe=k, query_rope=q)
    assert [_placements(spy.kwargs[n]) for n in ("c_kv", "c_kv_too", "k_pe")] == [KEYS] * 3


def test_keywords_may_be_named() -> None:
    ranks(2).run(_renamed)


def _flattened(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    compare(rank, Case(P=4), lambda layer, _: styles(Case(P=4))(layer, mesh))
    plan = {
        "indexer": DSAIndexerContextParallel(),
        "attention": DSASparseAttentionContextParallel(),
        "loss": DSAIndexerLossContextParallel(),
    }
    compare(rank, Case(P=4), lambda layer, _: parallelize_module(layer, mesh, plan))


def test_a_mesh_of_several_axes_is_flattened_by_its_ranks() -> None:
    ranks(4).run(_flattened)


class ToLocal(nn.Module):
    """A module that hands local tensors of what it received to its operator."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def local(x: Any) -> Any:
            return x.to_local() if isinstance(x, DTensor) else x

        return self.inner(*map(local, args), **{k: local(v) for k, v in kwargs.items()})


def _to_local(layer: Any) -> Any:
    for name in ("indexer", "attention", "loss"):
        setattr(layer, name, ToLocal(getattr(layer, name)))
    return layer


class OwnFunction(torch.autograd.Function):
    """A loss as a user of torch_npu writes it: gradients in forward, scaled in backward."""

    @staticmethod
    def forward(ctx: Any, qi: Tensor, ki: Tensor, w: Tensor, run: Callable[..., Any]) -> Tensor:
        *grads, loss = run(qi, ki, w)
        ctx.save_for_backward(*grads)
        return loss

    @staticmethod
    def backward(ctx: Any, up: Tensor) -> tuple[Any, ...]:
        return *(grad * up for grad in ctx.saved_tensors), None


class OwnLoss(Loss):
    def forward(self, query: Tensor, key: Tensor, qi: Tensor, ki: Tensor, w: Tensor, *rest: Any, **kwargs: Any) -> Any:  # fmt: skip  # noqa: E501
        run = ops.sparse_lightning_indexer_grad_kl_loss
        kwargs |= {"layout": self.case.layout}
        kwargs |= self.case.lengths("actual_seq_qlen", "actual_seq_klen")
        return OwnFunction.apply(
            qi, ki, w, lambda *index: run(query, key, *index, *rest, SCALE, **kwargs)
        )


MODULES: dict[str, Callable[[Any, Case], Any]] = {
    "to_local": lambda layer, case: _to_local(layer),
    "autograd-function": lambda layer, case: _with_loss(layer, OwnLoss(case)),
}


def _with_loss(layer: Any, loss: nn.Module) -> Any:
    layer.loss = loss
    return layer


CASES = [
    Case(P=3),
    Case(P=2, load_balance=True),
    Case(P=2, layout="TND", ends=(5, 12)),
    Case(P=2, layout="TND", ends=(5, 12), load_balance=True),
]


def _other_module(rank: int, case: Case, name: str) -> None:
    def apply(layer: Any, mesh: Any) -> None:
        styles(case)(MODULES[name](layer, case), mesh)

    compare(rank, case, apply)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_modules_of_other_kinds_give_the_same_numbers(name: str, case: Case) -> None:
    ranks(case.P).run(_other_module, case, name)


class KwargLengths(nn.Module):
    """Passes the lengths of the whole sequence as keywords of the boundary's call."""

    def __init__(self, inner: nn.Module, case: Case, names: tuple[str, str]) -> None:
        super().__init__()
        self.inner, self.lengths = inner, case.lengths(*names)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs, **self.lengths)


class Local(nn.Module):
    """A module for plain tensors: fails on anything but the keys that its rows may see."""

    def __init__(self, case: Case, run: Callable[..., Any], keys: tuple[int, ...]) -> None:
        super().__init__()
        self.case, self.run, self.keys = case, run, keys

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        window = attention_window()
        assert window is not None
        assert not any(isinstance(x, DTensor) for x in (*args, *kwargs.values()))
        for place in self.keys:
            assert args[place].size(self.case.seq_dim) == window.key_length
            assert args[place].is_contiguous()
        assert args[0].size(self.case.seq_dim) == window.query_length
        return self.run(*args, **kwargs)


def _locals(layer: Any, case: Case) -> None:
    layouts = {"layout_query": case.layout}

    def indexer(*args: Any, **kwargs: Any) -> Any:
        kwargs |= {**layouts, "layout_key": case.layout, "return_value": True}
        return ops.lightning_indexer(*args, sparse_count=TOPK, **kwargs)

    def attention(
        q: Tensor, k: Tensor, v: Tensor, i: Tensor, qr: Any, kr: Any, **kwargs: Any
    ) -> Any:
        assert v is k
        kwargs |= {**layouts, "layout_kv": case.layout, "return_softmax_lse": True}
        return ops.sparse_flash_attention(q, k, v, i, SCALE, query_rope=qr, key_rope=kr, **kwargs)

    def loss(*args: Any, **kwargs: Any) -> Any:
        run = ops.sparse_lightning_indexer_kl_loss
        return run(*args, SCALE, layout=case.layout, **kwargs)

    layer.indexer = Local(case, indexer, (1,))
    layer.attention = Local(case, attention, (1, 2))
    layer.loss = Local(case, loss, (1, 3))


def _local_input(rank: int, case: Case) -> None:
    expected, grads = reference(case)
    layer: Any = Layer(case)
    _locals(layer, case)
    styles(case, use_local_input=True)(layer, case.mesh())
    for name, names in (
        ("indexer", ("actual_seq_lengths_query", "actual_seq_lengths_key")),
        ("attention", ("actual_seq_lengths_query", "actual_seq_lengths_kv")),
        ("loss", ("actual_seq_qlen", "actual_seq_klen")),
    ):
        setattr(layer, name, KwargLengths(getattr(layer, name), case, names))
    leaves = {n: case.local(x, rank).clone().requires_grad_() for n, x in case.inputs().items()}
    outputs = layer(*leaves.values())
    scalar(outputs, {n: case.local(x, rank) for n, x in upstreams(case).items()}).backward()
    check(case, rank, outputs, expected, leaves, grads)


@pytest.mark.parametrize("case", [*CASES, Case(P=1), Case(P=2, ends=(9, 12))], ids=str)
def test_local_input_is_the_rows_and_the_keys_that_they_may_see(case: Case) -> None:
    """No uncut key is there to be found; under balance the module is called for each window."""
    ranks(case.P).run(_local_input, case)


class EagerIndexer(nn.Module):
    """Scores as a user writes them on one device: no operator, a causal mask from the shapes."""

    def forward(self, query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
        scores = torch.einsum("bsnd,btnd->bsnt", query, key.expand(-1, -1, query.size(2), -1))
        total = (torch.relu(scores) * weights.unsqueeze(-1)).sum(2)
        mask = torch.ones(query.size(1), key.size(1), dtype=torch.bool).tril()
        return total.masked_fill(~mask, -1e9)


def _eager(rank: int, case: Case) -> None:
    xs = case.inputs()
    expected = EagerIndexer()(xs["query_index"], xs["key_index"], xs["weights"])
    style = DSAIndexerContextParallel(load_balance=case.load_balance)
    module = style.apply(EagerIndexer(), case.mesh())
    local = {n: case.local(x, rank) for n, x in xs.items()}
    out = module(local["query_index"], local["key_index"], local["weights"])
    assert_close(out, case.local(expected, rank))


@pytest.mark.parametrize("balanced", [False, True])
def test_code_without_an_operator_sees_the_whole_sequence(balanced: bool) -> None:
    """A mask with a row for each of the sequence is cut to the rows of this rank's data."""
    ranks(2).run(_eager, Case(P=2, load_balance=balanced))


def _removed(rank: int) -> None:
    case = Case(P=2)
    for kind, module in (
        (DSAIndexerContextParallel, Indexer(case)),
        (DSASparseAttentionContextParallel, Attention(case)),
        (DSAIndexerLossContextParallel, Loss(case)),
    ):
        style: Any = kind()
        with pytest.raises(ValueError, match="no context-parallel style to remove"):
            style.remove(module)
        assert style.apply(module, case.mesh()) is module
        with pytest.raises(ValueError, match="already has"):
            style.apply(module, case.mesh())
        assert style.remove(module) is module and boundary_of(module) is None
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert len(NAMES) == 7


def test_a_style_can_be_taken_off_and_is_refused_twice() -> None:
    ranks(2).run(_removed)
