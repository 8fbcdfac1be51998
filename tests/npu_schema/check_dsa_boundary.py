"""The DSA styles around modules that call torch_npu's operators as on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hp_dsa import (
    DSAIndexerContextParallel,
    DSAIndexerLossContextParallel,
    DSASparseAttentionContextParallel,
    init_device_mesh,
    operands,
    ops,
)

from .fakes import DEVICE, npu, tensor, torch_npu, world
from .limits_dsa import OPERATORS, check_dsa
from .recording import Call, Recording, recorded

P, B, S, N1, N1I, D, DR, DI, K = 4, 2, 4400, 64, 32, 512, 64, 128, 1024
ENDS = [1500, 1700, S]
STYLES = {
    "contiguous": {},
    "head-tail": {"load_balance": True},
    "local input": {"use_local_input": True},
}


def lengths(layout: str, query: str, key: str, *, tensors: bool) -> dict[str, Any]:
    """Return the lengths of the packed sequence in the operators' own type."""
    if layout == "BSND":
        return {}
    ends = torch.tensor(ENDS, dtype=torch.int32, device=DEVICE) if tensors else ENDS
    return {query: ends, key: ends}


def known(read: Callable[..., Any]) -> Callable[..., Any]:
    """Read what `lengths` put on the device, where a fake tensor holds no numbers."""

    def reads(where: str, name: str, given: Any) -> Any:
        return ENDS if isinstance(given, Tensor) else read(where, name, given)

    return reads


class Indexer(nn.Module):
    def __init__(self, layout: str, ours: bool) -> None:
        super().__init__()
        self.layout = layout
        self.operator = ops.lightning_indexer if ours else torch_npu.npu_lightning_indexer

    def forward(self, query: Tensor, key: Tensor, weights: Tensor, **given: Any) -> Any:
        return self.operator(
            query,
            key,
            weights,
            layout_query=self.layout,
            layout_key=self.layout,
            sparse_count=K,
            return_value=True,
            **given,
        )


class Attention(nn.Module):
    def __init__(self, layout: str, ours: bool) -> None:
        super().__init__()
        self.layout = layout
        self.operator = ops.sparse_flash_attention if ours else torch_npu.npu_sparse_flash_attention

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        topk_indices: Tensor,
        query_rope: Tensor,
        key_rope: Tensor,
        **given: Any,
    ) -> Any:
        return self.operator(
            query,
            key,
            value,
            topk_indices,
            0.07,
            query_rope=query_rope,
            key_rope=key_rope,
            layout_query=self.layout,
            layout_kv=self.layout,
            attention_mode=2,
            return_softmax_lse=True,
            **given,
        )


class Loss(nn.Module):
    def __init__(self, layout: str, ours: bool) -> None:
        super().__init__()
        self.layout = layout
        self.operator = (
            ops.sparse_lightning_indexer_grad_kl_loss
            if ours
            else torch_npu.npu_sparse_lightning_indexer_grad_kl_loss
        )

    def forward(self, *tensors: Tensor, **given: Any) -> Any:
        *tensors, query_rope, key_rope = tensors  # type: ignore[assignment]
        return self.operator(
            *tensors,
            0.07,
            query_rope=query_rope,
            key_rope=key_rope,
            layout=self.layout,
            **given,
        )


@pytest.fixture(autouse=True)
def numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors hold no numbers: lengths are given here, indices are taken as they are."""
    monkeypatch.setattr("hp_dsa.boundary.check_indices", lambda *given: None)
    for module in ("operator_call", "windowed"):
        monkeypatch.setattr(f"hp_dsa.{module}.check_documents", lambda *given: None)
    # or lengths of one document would be kept as a real tensor, there as well
    monkeypatch.setattr("torch._subclasses.fake_tensor.CONSTANT_NUMEL_LIMIT", 0)
    monkeypatch.setattr("hp_dsa.operands.read_lengths", known(operands.read_lengths))


@pytest.fixture(params=[0, 2, P - 1], ids=lambda rank: f"rank{rank}")
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    with world(request.param, P):
        yield init_device_mesh("npu", (P,), mesh_dim_names=("cp",))


def shape(layout: str, *tail: int) -> tuple[int, ...]:
    return (B, S // P, *tail) if layout == "BSND" else (S // P, *tail)


def keys_of(call: Call) -> int:
    key, batched = call.given["key"], call.given.get("layout_query", call.given.get("layout"))
    return int(key.shape[1 if batched == "BSND" else 0])


def seen_keys(style: str, layout: str, rank: int) -> set[int]:
    """Return how many keys the operators are handed: up to the last row, from its documents on."""
    part = S // P // 2
    spans = [(2 * rank, 2 * rank + 2)]
    if style == "head-tail":
        spans = [(rank, rank + 1), (2 * P - 1 - rank, 2 * P - rank)]
    starts = [0] if layout == "BSND" else [0, *ENDS[:-1]]
    return {
        stop * part - max(start for start in starts if start <= first * part)
        for first, stop in spans
    }


def made(seen: Recording) -> list[Call]:
    """Return the calls of the operators, each held to its documented limits."""
    calls = [call for call in seen.dispatched if call.operator in OPERATORS]
    for call in calls:
        check_dsa(call)
    return calls


@pytest.mark.parametrize("ours", [True, False], ids=["hp_dsa", "torch_npu"])
@pytest.mark.parametrize("layout", ["BSND", "TND"])
@pytest.mark.parametrize("style", STYLES)
def test_a_layer_calls_its_operators_on_rows_and_the_keys_they_see(
    style: str, layout: str, ours: bool, mesh: DeviceMesh
) -> None:
    """Indexer, attention and loss: calls, shapes of the rank, gradients, dense keys."""
    options: dict[str, Any] = {"layout": layout, **STYLES[style]}
    indexer = DSAIndexerContextParallel(**options).apply(Indexer(layout, ours), mesh)
    attention = DSASparseAttentionContextParallel(**options).apply(Attention(layout, ours), mesh)
    loss = DSAIndexerLossContextParallel(**options).apply(Loss(layout, ours), mesh)
    with npu():
        index = [tensor(*shape(layout, *tail)) for tail in ((N1I, DI), (1, DI), (N1I,))]
        query, latent = tensor(*shape(layout, N1, D)), tensor(*shape(layout, 1, D))
        ropes = [tensor(*shape(layout, heads, DR)) for heads in (N1, 1)]
        lens = {
            name: lengths(layout, *names, tensors=not ours)
            for name, names in (
                ("indexer", ("actual_seq_lengths_query", "actual_seq_lengths_key")),
                ("attention", ("actual_seq_lengths_query", "actual_seq_lengths_kv")),
            )
        }
        of_loss = lengths(layout, "actual_seq_qlen", "actual_seq_klen", tensors=False)
        with recorded(f"hp_dsa, {style}") as seen:
            indices, values = indexer(*index, **lens["indexer"])
            out, top, total = attention(query, latent, latent, indices, *ropes, **lens["attention"])
            (out.sum() + values.sum()).backward()
            detached = [x.detach() for x in (query, latent, *index, indices, top, total, *ropes)]
            *gradients, summed = loss(*detached, **of_loss)
    assert out.shape == query.shape and type(out) is type(query)
    assert indices.shape == values.shape == shape(layout, 1, K) and indices.dtype == torch.int32
    for x in (query, latent, *index, *ropes):
        assert x.grad is not None and x.grad.shape == x.shape and x.grad.dtype == x.dtype
    for x, gradient in zip(index, gradients, strict=True):
        assert gradient.shape == x.shape
    assert summed.numel() == 1
    calls = made(seen)
    assert {call.operator for call in calls} == set(OPERATORS) - {
        "npu_dense_lightning_indexer_softmax_lse",
        "npu_dense_lightning_indexer_grad_kl_loss",
    }
    assert {keys_of(call) for call in calls} == seen_keys(style, layout, mesh.get_local_rank())
