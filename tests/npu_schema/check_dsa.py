"""The operators of hp_dsa on NPU tensors: calls, shapes, dtypes and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hp_dsa import ops

from .fakes import DEVICE, npu, tensor
from .limits_dsa import OPERATORS, check_dsa
from .recording import Call, Recording, recorded

N1, N1I, D, DR, DI, K = 64, 32, 512, 64, 128, 1024
SOURCE = "hp_dsa._npu"


@dataclass(frozen=True)
class Case:
    """Sizes, layout and lengths of a call; ``ends`` says what kind of lengths it is given."""

    B: int = 2
    S1: int = 13
    S2: int = 1200
    layout: str = "BSND"
    mode: int = 3
    lengths: tuple[list[int], list[int]] | None = None
    kind: str = "list"
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        lengths = "" if self.lengths is None else f"-{self.kind}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.layout}-S{self.S1}x{self.S2}-mode{self.mode}{lengths}-{dtype}"

    def query(self, heads: int, size: int, grad: bool = True) -> Tensor:
        return self._tensor(self.S1, heads, size, grad)

    def key(self, size: int, grad: bool = True) -> Tensor:
        return self._tensor(self.S2, 1, size, grad)

    def _tensor(self, rows: int, heads: int, size: int, grad: bool) -> Tensor:
        lead = (self.B, rows) if self.layout == "BSND" else (rows,)
        return tensor(*lead, heads, size, dtype=self.dtype, grad=grad)

    def rows(self, *tail: int) -> tuple[int, ...]:
        return (self.B, self.S1, *tail) if self.layout == "BSND" else (self.S1, *tail)

    def statistics(self, *tail: int) -> tuple[int, ...]:
        return (self.B, 1, self.S1, *tail) if self.layout == "BSND" else (1, self.S1, *tail)

    def given(self) -> tuple[Any, Any]:
        if self.lengths is None:
            return None, None
        if self.kind == "list":
            return self.lengths
        if self.kind == "device":
            return tuple(torch.tensor(ends, device=DEVICE) for ends in self.lengths)  # type: ignore[return-value]
        with unset_fake_temporarily():
            return tuple(torch.tensor(ends) for ends in self.lengths)  # type: ignore[return-value]


PACKED = ([3, 3, 9, 13], [400, 410, 800, 1200])
CASES = [
    Case(),
    Case(mode=0, B=1),
    Case(dtype=torch.float16),
    Case(lengths=([13, 3], [1200, 7])),
    Case(layout="TND", lengths=PACKED),
]
# the first two operators take lengths on the device, the losses read them on the host
ON_DEVICE = [
    Case(lengths=([13, 3], [1200, 7]), kind="device"),
    Case(layout="TND", lengths=PACKED, kind="device", mode=0),
]
ON_HOST = [
    Case(lengths=([13, 3], [1200, 7]), kind="cpu"),
    Case(layout="TND", lengths=PACKED, kind="cpu", mode=0),
]


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    with npu():
        yield


def calls(seen: Recording) -> list[Call]:
    """Return the operators that our door called; hp_dsa's own functions hide them from Python."""
    return [call for call in seen.dispatched if call.operator in OPERATORS]


def checked(seen: Recording, *operators: str) -> None:
    """Assert which operators were called, and their documented limits."""
    assert [call.operator for call in calls(seen)] == list(operators)
    for call in calls(seen):
        check_dsa(call)


def same_shape(*tensors: Tensor) -> None:
    for x in tensors:
        assert x.grad is not None and x.grad.shape == x.shape and x.grad.dtype == x.dtype


def index(case: Case, **options: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    inputs = (case.query(N1I, DI), case.key(DI), case.query(N1I, 1).detach().squeeze(-1))
    inputs[2].requires_grad_()
    q_lengths, k_lengths = case.given()
    found = ops.lightning_indexer(
        *inputs,
        actual_seq_lengths_query=q_lengths,
        actual_seq_lengths_key=k_lengths,
        layout_query=case.layout,
        layout_key=case.layout,
        sparse_mode=case.mode,
        **options,
    )
    return inputs, found


@pytest.mark.parametrize("case", [*CASES, *ON_DEVICE], ids=str)
def test_the_indexer_gives_indices_and_differentiable_values(case: Case) -> None:
    """int32 indices for each query and count; gradients of query, key and weights."""
    for count in (6, 2048, 4096):
        with recorded(SOURCE) as seen:
            inputs, (indices, values) = index(case, sparse_count=count, return_value=True)
            values.sum().backward()
        checked(seen, "npu_lightning_indexer")
        assert indices.dtype == torch.int32 and not indices.requires_grad
        assert indices.shape == case.rows(1, count) == values.shape and values.dtype == case.dtype
        same_shape(*inputs)
        assert [c.operator for c in seen.dispatched][-1] == "npu_lightning_indexer_grad"
    with recorded(SOURCE) as seen:
        _, (indices, values) = index(case, sparse_count=6)
    checked(seen, "npu_lightning_indexer")
    assert indices.shape == case.rows(1, 6)


@pytest.mark.parametrize("shared", [True, False], ids=["latent", "value"])
@pytest.mark.parametrize("case", [*CASES, *ON_DEVICE], ids=str)
def test_sparse_attention_gives_output_statistics_and_gradients(case: Case, shared: bool) -> None:
    """In the absorbed form; the statistics that the backward needs are always asked for."""
    q, k, qr, kr = case.query(N1, D), case.key(D), case.query(N1, DR), case.key(DR)
    v = k if shared else case.key(D)
    indices = torch.zeros(case.rows(1, K), dtype=torch.int64, device=DEVICE)
    q_lengths, k_lengths = case.given()
    for wanted in (True, False):
        with recorded(SOURCE) as seen:
            out, maximum, total = ops.sparse_flash_attention(
                q,
                k,
                v,
                indices,
                0.07,
                query_rope=qr,
                key_rope=kr,
                actual_seq_lengths_query=q_lengths,
                actual_seq_lengths_kv=k_lengths,
                layout_query=case.layout,
                layout_kv=case.layout,
                sparse_mode=case.mode,
                attention_mode=2,
                return_softmax_lse=wanted,
            )
            out.sum().backward()
        checked(seen, "npu_sparse_flash_attention")
        assert calls(seen)[0].given["return_softmax_lse"] is True
        assert out.shape == q.shape and out.dtype == case.dtype
        for stats in (maximum, total):
            assert stats.shape == (case.statistics(N1) if wanted else (0,))
            assert stats.dtype == torch.float32 and not stats.requires_grad
        same_shape(q, k, v, qr, kr)
        (backward,) = seen.named("npu_sparse_flash_attention_grad")
        assert backward.given["attention_mode"] == 2 and backward.given["scale_value"] == 0.07
        assert backward.given["softmax_max"].shape == case.statistics(N1)


def loss_inputs(case: Case) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
    """Return attention's tensors, the indexer's leaves and the common arguments."""
    q_lengths, k_lengths = case.given()
    weights = case.query(N1I, 1).detach().squeeze(-1).requires_grad_()
    return (
        [case.query(N1, D, grad=False), case.key(D, grad=False)],
        [case.query(N1I, DI), case.key(DI), weights],
        {
            "query_rope": case.query(N1, DR, grad=False),
            "key_rope": case.key(DR, grad=False),
            "actual_seq_qlen": q_lengths,
            "actual_seq_klen": k_lengths,
            "layout": case.layout,
            "sparse_mode": case.mode,
        },
    )


LONG = [
    Case(B=1, S1=8200, S2=8200),
    Case(S1=8200, S2=8200, layout="TND", lengths=([5000, 8200], [5000, 8200])),
]
"""More queries than a loss takes at once."""


@pytest.mark.parametrize("case", [*CASES, *ON_HOST, *LONG], ids=str)
def test_the_sparse_loss_is_a_sum_with_the_indexers_gradients(case: Case) -> None:
    """One call for each 8192 queries; the loss in float32."""
    attention, leaves, common = loss_inputs(case)
    indices = torch.zeros(case.rows(1, K), dtype=torch.int32, device=DEVICE)
    stats = [tensor(*case.statistics(N1), dtype=torch.float32, grad=False) for _ in range(2)]
    with recorded(SOURCE) as seen:
        loss = ops.sparse_lightning_indexer_kl_loss(
            *attention, *leaves, indices, *stats, 0.07, **common
        )
        loss.sum().backward()
    checked(seen, *["npu_sparse_lightning_indexer_grad_kl_loss"] * (1 + (case.S1 > 8192)))
    assert loss.dtype == torch.float32 and loss.numel() == 1
    same_shape(*leaves)


@pytest.mark.parametrize("case", [*CASES, *ON_HOST, *LONG], ids=str)
def test_the_dense_loss_follows_its_statistics(case: Case) -> None:
    """The indexer's log-sum-exp first, then the loss; each for 8192 queries at a time."""
    attention, leaves, common = loss_inputs(case)
    common_of_index = {n: x for n, x in common.items() if not n.endswith("_rope")}
    stats = [tensor(*case.statistics(N1), dtype=torch.float32, grad=False) for _ in range(2)]
    parts = 1 + (case.S1 > 8192)
    with recorded(SOURCE) as seen:
        index_stats = ops.dense_lightning_indexer_softmax_lse(*leaves, **common_of_index)
        loss = ops.dense_lightning_indexer_kl_loss(
            *attention, *leaves, *stats, *index_stats, 0.07, **common
        )
        loss.sum().backward()
    checked(
        seen,
        *["npu_dense_lightning_indexer_softmax_lse"] * parts,
        *["npu_dense_lightning_indexer_grad_kl_loss"] * parts,
    )
    assert all(x.shape == case.statistics() and not x.requires_grad for x in index_stats)
    assert loss.dtype == torch.float32 and loss.numel() == 1
    same_shape(*leaves)


def test_the_stand_in_of_the_cpu_tests_has_the_real_signatures() -> None:
    """What computes for torch_npu there takes what torch_npu takes."""
    import importlib.util
    import inspect
    from pathlib import Path

    path = Path(__file__).parents[2] / "packages/hp-dsa/tests/unit/_fake_npu.py"
    spec = importlib.util.spec_from_file_location("_fake_npu", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = [name for name in vars(module.Npu) if name.startswith("npu_")]
    assert len(names) == 5
    for name in names:
        real = {a.name: a for a in getattr(torch.ops.npu, name).default._schema.arguments}
        signature = inspect.signature(getattr(module.Npu, name)).parameters
        mine = {n: p for n, p in signature.items() if n != "self"}
        assert list(mine) == list(real), name
        for key, parameter in mine.items():
            assert (parameter.kind is parameter.KEYWORD_ONLY) == real[key].kwarg_only, (name, key)
            default = parameter.default
            assert (default is not parameter.empty) == real[key].has_default_value(), (name, key)
            assert default is parameter.empty or default == real[key].default_value, (name, key)
