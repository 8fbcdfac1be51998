"""torch_npu's operators are known by their names: stand-ins are registered under them here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hp_dsa import ops
from hp_mesh.testing import ranks

from ._layer import SCALE, TOPK, Attention, Case, Indexer, Layer, Loss, compare, styles

_INDEXER = """npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, *,
  Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None,
  str layout_query="BSND", str layout_key="BSND", int sparse_count=2048, int sparse_mode=3,
  bool return_value=False) -> (Tensor, Tensor)"""
_ATTENTION = """npu_sparse_flash_attention(Tensor query, Tensor key, Tensor value,
  Tensor sparse_indices, float scale_value, *, Tensor? actual_seq_lengths_query=None,
  Tensor? actual_seq_lengths_kv=None, Tensor? query_rope=None, Tensor? key_rope=None,
  str layout_query="BSND", str layout_kv="BSND", int sparse_mode=3, int attention_mode=0,
  bool return_softmax_lse=False) -> (Tensor, Tensor, Tensor)"""
_LOSS = """npu_sparse_lightning_indexer_grad_kl_loss(Tensor query, Tensor key, Tensor query_index,
  Tensor key_index, Tensor weights, Tensor sparse_indices, Tensor softmax_max, Tensor softmax_sum,
  float scale_value, *, Tensor? query_rope=None, Tensor? key_rope=None,
  SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_klen=None, str layout="BSND",
  int sparse_mode=3) -> (Tensor, Tensor, Tensor, Tensor)"""


@pytest.fixture(scope="module", autouse=True)
def npu() -> Iterator[None]:
    """Register the stand-ins: lengths as int32 tensors for two of them, as lists for the loss."""

    def as_lists(kwargs: dict[str, Any]) -> dict[str, Any]:
        for name, value in kwargs.items():
            if name.startswith("actual_seq_lengths") and value is not None:
                assert value.dtype is torch.int32
        return kwargs

    library = torch.library.Library("npu", "FRAGMENT")
    for schema, function in (
        (_INDEXER, ops.lightning_indexer),
        (_ATTENTION, ops.sparse_flash_attention),
        (_LOSS, ops.sparse_lightning_indexer_grad_kl_loss),
    ):
        library.define(schema)

        def run(*args: Any, function: Any = function, **kwargs: Any) -> Any:
            return function(*args, **as_lists(kwargs))

        library.impl(schema.split("(")[0], run, "CompositeImplicitAutograd")
    yield
    library._destroy()


class NpuIndexer(Indexer):
    def forward(self, query: Tensor, key: Tensor, weights: Tensor) -> Any:
        lengths = self.case.lengths("actual_seq_lengths_query", "actual_seq_lengths_key")
        return torch.ops.npu.npu_lightning_indexer(
            query,
            key,
            weights,
            layout_query=self.case.layout,
            layout_key=self.case.layout,
            sparse_count=TOPK,
            return_value=True,
            **{n: torch.as_tensor(x, dtype=torch.int32) for n, x in lengths.items()},
        )


class NpuAttention(Attention):
    def forward(self, query: Any, key: Any, value: Any, topk: Any, qr: Any, kr: Any) -> Any:  # type: ignore[override]
        lengths = self.case.lengths("actual_seq_lengths_query", "actual_seq_lengths_kv")
        return torch.ops.npu.npu_sparse_flash_attention.default(
            query,
            key,
            value,
            topk,
            SCALE,
            query_rope=qr,
            key_rope=kr,
            layout_query=self.case.layout,
            layout_kv=self.case.layout,
            attention_mode=2,
            return_softmax_lse=True,
            **{n: torch.as_tensor(x, dtype=torch.int32) for n, x in lengths.items()},
        )


class OwnFunction(torch.autograd.Function):
    """The loss as users of torch_npu write it: gradients in forward, scaled in backward."""

    @staticmethod
    def forward(ctx: Any, qi: Tensor, ki: Tensor, w: Tensor, rest: Any, options: Any) -> Tensor:
        query, key, *others = rest
        run = torch.ops.npu.npu_sparse_lightning_indexer_grad_kl_loss
        *grads, loss = run(query, key, qi, ki, w, *others, SCALE, **options)
        ctx.save_for_backward(*grads)
        return loss

    @staticmethod
    def backward(ctx: Any, up: Tensor) -> tuple[Any, ...]:
        return *(grad * up for grad in ctx.saved_tensors), None, None


class NpuLoss(Loss):
    def forward(
        self, query: Any, key: Any, qi: Any, ki: Any, w: Any, *rest: Any, **ropes: Any
    ) -> Any:  # type: ignore[override]
        lengths = self.case.lengths("actual_seq_qlen", "actual_seq_klen")
        lists = {n: [int(i) for i in x] for n, x in lengths.items()}
        options = {**ropes, **lists, "layout": self.case.layout}
        return OwnFunction.apply(qi, ki, w, (query, key, *rest), options)


def _npu_layer(rank: int, case: Case) -> None:
    def apply(layer: Any, mesh: Any) -> None:
        layer.indexer, layer.attention = NpuIndexer(case), NpuAttention(case)
        layer.loss = NpuLoss(case)
        styles(case)(layer, mesh)

    compare(rank, case, apply)
    assert isinstance(Layer(case).indexer, Indexer)


CASES = [
    Case(P=3),
    Case(P=2, layout="TND", ends=(5, 6, 12)),
    Case(P=2, load_balance=True),
    Case(P=2, layout="TND", ends=(7, 12), load_balance=True),
    Case(P=2, ends=(9, 12)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer_of_torch_npu_operators_equals_the_whole(case: Case) -> None:
    ranks(case.P).run(_npu_layer, case)
