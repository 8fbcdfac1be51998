"""What leaves a boundary: rows as they are, shares summed once, laid out as the query was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hp_dsa import (
    AsyncDSASparseAttentionContextParallel,
    DSAIndexerContextParallel,
    DSAIndexerLossContextParallel,
    DSASparseAttentionContextParallel,
    Handoff,
    init_device_mesh,
    normalize_loss,
    ops,
)
from hp_dsa.async_boundary import AsyncDSABoundary
from hp_mesh.boundary import boundary_of
from hp_mesh.testing import assert_close, count_collectives, randn, ranks

from ._layer import N1, SCALE, Attention, Case, Indexer, Layer, Loss, statistics_dim


class Gradients(NamedTuple):
    """What torch_npu's operator returns, named."""

    query_index: Tensor
    key_index: Tensor
    weights: Tensor
    loss: Tensor


FORMS: dict[str, Callable[..., Any]] = {
    "four": lambda qi, ki, w, loss: (qi, ki, w, loss),
    "named": Gradients,
    "list": lambda qi, ki, w, loss: [qi, ki, w, loss],
    "two": lambda qi, ki, w, loss: (loss, ki),
    "three": lambda qi, ki, w, loss: (ki, w, loss),
    "five": lambda qi, ki, w, loss: (loss, qi, ki, w, 2 * loss),
    "mapping": lambda qi, ki, w, loss: {"loss": loss, "dk": ki, "nothing": None},
    "loss": lambda qi, ki, w, loss: loss,
}


class Formed(nn.Module):
    def __init__(self, case: Case, form: str) -> None:
        super().__init__()
        self.loss, self.form = Loss(case, gradients=True), FORMS[form]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.form(*self.loss(*args, **kwargs))


def _arguments(case: Case) -> list[Tensor]:
    """Return what the loss is called with, of the whole sequence."""
    xs = case.inputs()
    with torch.no_grad():
        found = Layer(case)(*xs.values())
    order = ("query", "latent", "query_index", "key_index", "weights")
    tensors = [xs[name] for name in order]
    tensors += [found[name] for name in ("indices", "softmax_max", "softmax_sum")]
    return [*tensors, xs["query_rope"], xs["key_rope"]]


def _local(case: Case, tensors: list[Tensor], rank: int) -> list[Tensor]:
    dims = [case.seq_dim] * 6 + [statistics_dim(case)] * 2 + [case.seq_dim] * 2
    return [case.local(x, rank, d).clone() for x, d in zip(tensors, dims, strict=True)]


def _values(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, dict) else output
    return [x for x in values if isinstance(x, Tensor)]


def _gradients(rank: int, case: Case, form: str, use_local_output: bool) -> None:
    tensors = _arguments(case)
    expected = Formed(case, form)(*tensors)
    style = DSAIndexerLossContextParallel(
        layout=case.layout, load_balance=case.load_balance, use_local_output=use_local_output
    )
    module = style.apply(Formed(case, form), case.mesh())

    with count_collectives() as sent:
        output = module(*_local(case, tensors, rank))

    assert type(output) is type(expected)
    for found, whole in zip(_values(output), _values(expected), strict=True):
        wanted = whole if whole.numel() == 1 else case.local(whole, rank)
        assert_close(found, wanted, kind="grad")
    keys = sum(x.ndim == len(case.layout) and x.size(-2) == 1 for x in _values(expected))
    losses = sum(x.numel() == 1 for x in _values(expected))
    assert sent.count("reduce_scatter") == keys * (case.P > 1)
    assert sent.count("all_reduce") == losses * (case.P > 1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "case",
    [Case(P=1), Case(P=3), Case(P=2, layout="TND", ends=(5, 12)), Case(P=2, load_balance=True)],
    ids=str,
)
def test_any_number_of_losses_and_gradients_is_reduced(form: str, case: Case) -> None:
    """Behaviour 36 and fault U12: one reduce-scatter for a key's gradient, whatever the form."""
    ranks(case.P).run(_gradients, case, form, False)


def test_local_output_is_the_same_for_plain_tensors() -> None:
    ranks(2).run(_gradients, Case(P=2), "four", True)


class LocalGradients(nn.Module):
    """Works on plain tensors and returns torch_npu's four outputs in some order."""

    def __init__(self, case: Case, order: tuple[int, ...]) -> None:
        super().__init__()
        self.case, self.order = case, order

    def forward(self, *args: Any, **lengths: Any) -> Any:
        run = ops.sparse_lightning_indexer_grad_kl_loss
        *tensors, query_rope, key_rope = args
        results = run(
            *tensors,
            SCALE,
            query_rope=query_rope,
            key_rope=key_rope,
            layout=self.case.layout,
            **lengths,
        )
        return tuple(results[i] for i in self.order)


def _plain(rank: int, case: Case, order: tuple[int, ...], outputs: Any) -> None:
    tensors, lengths = _arguments(case), case.lengths("actual_seq_qlen", "actual_seq_klen")
    expected = LocalGradients(case, order)(*tensors, **lengths)
    module = DSAIndexerLossContextParallel(
        layout=case.layout,
        load_balance=case.load_balance,
        use_local_input=True,
        outputs=outputs,
    ).apply(LocalGradients(case, order), case.mesh())
    found = module(*_local(case, tensors, rank), **lengths)
    for x, whole in zip(found, expected, strict=True):
        wanted = whole if whole.numel() == 1 else case.local(whole, rank)
        assert_close(x, wanted, kind="grad")


PLAIN = [Case(P=3), Case(P=2, load_balance=True), Case(P=2, layout="TND", ends=(5, 12))]


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_plain_outputs_are_what_their_places_say(case: Case) -> None:
    ranks(case.P).run(_plain, case, (0, 1, 2, 3), None)
    ranks(case.P).run(_plain, case, (3, 1, 0), ("sum", "keys", "rows"))


def test_plain_outputs_that_cannot_be_told_apart_are_refused() -> None:
    for error in ranks(2).errors(_plain, Case(P=2), (3, 1, 0), None):
        assert isinstance(error, ValueError) and "outputs=('rows', 'keys'" in str(error)
    for error in ranks(2).errors(_plain, Case(P=2), (3, 1, 0), ("sum", "keys", "keys")):
        assert isinstance(error, ValueError) and "'keys', must have" in str(error)


def _cp_dtensors(rank: int, use_local_output: bool) -> None:
    case = Case(P=2)
    mesh, xs = case.mesh(), case.inputs()
    leaves = {n: x.clone().requires_grad_() for n, x in xs.items()}
    expected = Layer(case)(*leaves.values())
    (expected["out"].sum() + expected["loss"].sum()).backward()

    layer: Any = Layer(case)
    for kind, module in (
        (DSAIndexerContextParallel, layer.indexer),
        (DSASparseAttentionContextParallel, layer.attention),
        (DSAIndexerLossContextParallel, layer.loss),
    ):
        kind(use_local_output=use_local_output).apply(module, mesh)
    given = {n: distribute_tensor(x, mesh, [Shard(1)]).requires_grad_() for n, x in xs.items()}
    outputs = layer(*given.values())
    for name, whole in expected.items():
        found = outputs[name]
        if use_local_output:
            assert not isinstance(found, DTensor)
            dim = 2 if name.startswith("softmax") else 1
            assert_close(found, whole if name == "loss" else case.local(whole, rank, dim))
            continue
        wanted = (
            (Replicate(),) if name == "loss" else (Shard(2 if name.startswith("softmax") else 1),)
        )
        assert found.placements == wanted, name
        assert_close(found.full_tensor(), whole)
    loss = outputs["loss"] if use_local_output else outputs["loss"].to_local()
    out = outputs["out"] if use_local_output else outputs["out"].to_local()
    (out.sum() + loss.sum()).backward()
    for name, x in given.items():
        assert x.grad is not None and leaves[name].grad is not None
        assert_close(x.grad.full_tensor(), leaves[name].grad, kind="grad", name=name)


@pytest.mark.parametrize("use_local_output", [False, True])
def test_dtensors_of_the_cp_mesh_come_back_as_such(use_local_output: bool) -> None:
    ranks(2).run(_cp_dtensors, use_local_output)


def _tp(rank: int, is_async: bool) -> None:
    """Heads of the query are cut over TP, keys are whole on it."""
    case = Case(P=2)
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("cp", "tp"))
    cp = mesh.get_local_rank("cp")
    xs = case.inputs()
    with torch.no_grad():
        indices = Layer(case)(*xs.values())["indices"]
    names = ("query", "latent", "query_rope", "key_rope")
    leaves = {n: xs[n].clone().requires_grad_() for n in names}
    expected = Attention(case)(
        leaves["query"],
        leaves["latent"],
        leaves["latent"],
        indices,
        leaves["query_rope"],
        leaves["key_rope"],
    )
    up = randn(*expected[0].shape, seed=3)
    (expected[0] * up).sum().backward()

    core, handoffs = Attention(case), (Handoff(), Handoff())
    if is_async:
        AsyncDSASparseAttentionContextParallel().apply(
            core, mesh["cp"], key_handoff=handoffs[0], key_rope_handoff=handoffs[1]
        )
    else:
        DSASparseAttentionContextParallel().apply(core, mesh["cp"])

    def give(x: Tensor, heads: bool) -> Any:
        local = case.local(x.detach(), cp).contiguous()
        placement = Shard(2) if heads else Replicate()
        return distribute_tensor(local, mesh["tp"], [placement]).requires_grad_()

    for _ in range(3):
        given = {n: give(x, n.startswith("query")) for n, x in leaves.items()}
        latents, rope = [handoffs[0](given["latent"])] * 2, handoffs[1](given["key_rope"])
        out, top, total = core(
            given["query"],
            *latents,
            give(indices.double(), False).detach().to(torch.int32),
            given["query_rope"],
            rope,
        )
        assert out.placements == (Shard(2),) and out.device_mesh == mesh["tp"]
        assert top.placements == total.placements == (Shard(3),)
        assert_close(out.full_tensor(), case.local(expected[0], cp))
        assert_close(top.full_tensor(), case.local(expected[1], cp, 2))
        (
            out * distribute_tensor(case.local(up, cp).contiguous(), mesh["tp"], [Shard(2)])
        ).sum().backward()
        for name, x in given.items():
            assert x.grad is not None
            whole = case.local(leaves[name].grad, cp)
            assert_close(x.grad.full_tensor(), whole, kind="grad", name=name)
    assert N1 == 3
    boundary = boundary_of(core)
    if isinstance(boundary, AsyncDSABoundary):
        assert not any(handoff.disarmed for handoff in boundary.handoffs.values())


@pytest.mark.parametrize("is_async", [False, True])
def test_heads_over_tp_keep_their_layout_and_their_gradients(is_async: bool) -> None:
    """The CP axis goes, the TP layout stays; a key's gradient is summed over both."""
    ranks(6).run(_tp, is_async)


def _tp_indexer(rank: int) -> None:
    case, mesh = Case(P=2), init_device_mesh("cpu", (2, 3), mesh_dim_names=("cp", "tp"))
    indexer = DSAIndexerContextParallel().apply(Indexer(case), mesh["cp"])
    xs = {n: case.local(x, mesh.get_local_rank("cp")) for n, x in case.inputs().items()}
    query = distribute_tensor(xs["query_index"].contiguous(), mesh["tp"], [Shard(2)])
    indexer(query, xs["key_index"], xs["weights"])


def test_heads_of_the_indexer_over_tp_are_refused() -> None:
    """Scores are sums over all heads: a part of them selects other keys."""
    for error in ranks(6).errors(_tp_indexer):
        assert isinstance(error, ValueError) and "gather its heads over TP" in str(error)


def _normalized(rank: int, divisor: int) -> None:
    case = Case(P=2, ends=(12, 7))
    xs = {n: x.clone().requires_grad_() for n, x in case.inputs().items()}
    whole = Layer(case)(*xs.values())["loss"] / 19
    whole.sum().backward()

    layer: Any = Layer(case)
    DSAIndexerContextParallel().apply(layer.indexer, case.mesh())
    DSASparseAttentionContextParallel().apply(layer.attention, case.mesh())
    DSAIndexerLossContextParallel().apply(layer.loss, case.mesh())
    leaves = {n: case.local(x.detach(), rank).clone().requires_grad_() for n, x in xs.items()}
    loss = normalize_loss(layer(*leaves.values())["loss"], 19, gradient_divisor=divisor)
    loss.sum().backward()

    assert_close(loss, whole, kind="loss")
    for name in ("query_index", "key_index", "weights"):
        grad = xs[name].grad
        assert grad is not None
        assert_close(leaves[name].grad, case.local(grad, rank) * divisor, kind="grad")


@pytest.mark.parametrize("divisor", [1, 2])
def test_the_loss_is_a_sum_over_an_explicit_denominator(divisor: int) -> None:
    """Shards with different numbers of tokens: a mean of means would be another number."""
    ranks(2).run(_normalized, divisor)
