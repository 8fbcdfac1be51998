"""One DSA layer as written for one device, and the comparison of its shards with the whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hp_dsa import ops
from hp_dsa.gather_cache import DSAGatherCache
from hp_dsa.styles import (
    DSAIndexerContextParallel,
    DSAIndexerLossContextParallel,
    DSASparseAttentionContextParallel,
)
from hp_mesh import init_device_mesh, shard_sequence
from hp_mesh.testing import assert_close, count_collectives, randn

N1, D, DR, NI, DI, TOPK = 3, 5, 2, 3, 4, 4
SCALE = 0.4
NAMES = ("query", "latent", "query_rope", "key_rope", "query_index", "key_index", "weights")


@dataclass(frozen=True)
class Case:
    """Sizes, none of them a power of two where it may be free."""

    P: int = 2
    layout: str = "BSND"
    B: int = 2
    S: int = 12
    ends: tuple[int, ...] | None = None
    load_balance: bool = False
    dtype: torch.dtype = torch.float64
    cached: bool = False

    def __str__(self) -> str:
        ends = "" if self.ends is None else f"-{'_'.join(map(str, self.ends))}"
        return (
            f"{self.layout}-P{self.P}-S{self.S}{ends}"
            f"{'-balanced' * self.load_balance}{'-cached' * self.cached}"
        )

    def but(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)

    @property
    def seq_dim(self) -> int:
        return 1 if self.layout == "BSND" else 0

    @property
    def order(self) -> str:
        return "head_tail" if self.load_balance else "contiguous"

    def shape(self, *tail: int) -> tuple[int, ...]:
        return (self.B, self.S, *tail) if self.layout == "BSND" else (self.S, *tail)

    def inputs(self) -> dict[str, Tensor]:
        """Return the whole sequence, the same on every rank."""
        tails = ((N1, D), (1, D), (N1, DR), (1, DR), (NI, DI), (1, DI), (NI,))
        return {
            name: randn(*self.shape(*tail), seed=i).to(self.dtype)
            for i, (name, tail) in enumerate(zip(NAMES, tails, strict=True))
        }

    def local(self, x: Tensor, rank: int, dim: int | None = None) -> Tensor:
        return shard_sequence(
            x, (rank, self.P), seq_dim=self.seq_dim if dim is None else dim, order=self.order
        )

    def mesh(self) -> Any:
        return init_device_mesh("cpu", (self.P,), mesh_dim_names=("cp",))

    def lengths(self, query: str, key: str) -> dict[str, Any]:
        """Return the lengths of the whole sequence by the operators' keywords."""
        if self.ends is None:
            return {}
        return {query: list(self.ends), key: torch.tensor(self.ends, dtype=torch.int32)}


class Indexer(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def forward(self, query: Tensor, key: Tensor, weights: Tensor) -> Any:
        return ops.lightning_indexer(
            query,
            key,
            weights,
            layout_query=self.case.layout,
            layout_key=self.case.layout,
            sparse_count=TOPK,
            return_value=True,
            **self.case.lengths("actual_seq_lengths_query", "actual_seq_lengths_key"),
        )


class Attention(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        topk_indices: Tensor,
        query_rope: Tensor | None = None,
        key_rope: Tensor | None = None,
    ) -> Any:
        return ops.sparse_flash_attention(
            query,
            key,
            value,
            topk_indices,
            SCALE,
            query_rope=query_rope,
            key_rope=key_rope,
            layout_query=self.case.layout,
            layout_kv=self.case.layout,
            attention_mode=2,
            return_softmax_lse=True,
            **self.case.lengths("actual_seq_lengths_query", "actual_seq_lengths_kv"),
        )


class Loss(nn.Module):
    """The sparse loss; ``gradients`` returns torch_npu's four outputs."""

    def __init__(self, case: Case, *, gradients: bool = False) -> None:
        super().__init__()
        self.case, self.gradients = case, gradients

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        query_index: Tensor,
        key_index: Tensor,
        weights: Tensor,
        topk_indices: Tensor,
        softmax_max: Tensor,
        softmax_sum: Tensor,
        query_rope: Tensor | None = None,
        key_rope: Tensor | None = None,
    ) -> Any:
        run = ops.sparse_lightning_indexer_kl_loss
        if self.gradients:
            run = ops.sparse_lightning_indexer_grad_kl_loss
        return run(
            query,
            key,
            query_index,
            key_index,
            weights,
            topk_indices,
            softmax_max,
            softmax_sum,
            SCALE,
            query_rope=query_rope,
            key_rope=key_rope,
            layout=self.case.layout,
            **self.case.lengths("actual_seq_qlen", "actual_seq_klen"),
        )


class Layer(nn.Module):
    """Indexer, attention and loss, as sparse training connects them."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.indexer, self.attention, self.loss = Indexer(case), Attention(case), Loss(case)

    def forward(
        self,
        query: Tensor,
        latent: Tensor,
        query_rope: Tensor,
        key_rope: Tensor,
        query_index: Tensor,
        key_index: Tensor,
        weights: Tensor,
    ) -> dict[str, Tensor]:
        indices, values = self.indexer(query_index, key_index, weights)
        out, top, total = self.attention(query, latent, latent, indices, query_rope, key_rope)
        loss = self.loss(
            query.detach(),
            latent.detach(),
            query_index,
            key_index,
            weights,
            indices,
            top,
            total,
            query_rope=query_rope.detach(),
            key_rope=key_rope.detach(),
        )
        return {
            "indices": indices,
            "values": values,
            "out": out,
            "softmax_max": top,
            "softmax_sum": total,
            "loss": loss,
        }


Apply = Callable[[Any, Any], None]


def styles(case: Case, **options: Any) -> Apply:
    """Return what puts the three styles on a layer."""

    def apply(layer: Any, mesh: Any) -> None:
        given = {"layout": case.layout, "load_balance": case.load_balance, **options}
        if case.cached:
            DSAGatherCache().apply(layer)
        DSAIndexerContextParallel(**given).apply(layer.indexer, mesh)
        DSASparseAttentionContextParallel(**given).apply(layer.attention, mesh)
        DSAIndexerLossContextParallel(**given).apply(layer.loss, mesh)

    return apply


def scalar(outputs: Mapping[str, Tensor], ups: Mapping[str, Tensor]) -> Tensor:
    """Return what is differentiated: attention's output, the values that are real, the loss."""
    values = torch.where(outputs["indices"] >= 0, outputs["values"], 0.0)
    seen = (outputs["out"] * ups["out"]).sum() + (values * ups["values"]).sum()
    return seen + outputs["loss"].sum()


def upstreams(case: Case) -> dict[str, Tensor]:
    return {
        "out": randn(*case.shape(N1, D), seed=20).to(case.dtype),
        "values": randn(*case.shape(1, TOPK), seed=21).to(case.dtype),
    }


def reference(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    """Return outputs and gradients of the unsharded layer."""
    leaves = {n: x.requires_grad_() for n, x in case.inputs().items()}
    outputs = Layer(case)(*leaves.values())
    scalar(outputs, upstreams(case)).backward()
    return {n: x.detach() for n, x in outputs.items()}, {n: x.grad for n, x in leaves.items()}


def statistics_dim(case: Case) -> int:
    return 2 if case.layout == "BSND" else 1


def compare(rank: int, case: Case, apply: Apply | None = None, steps: int = 1) -> list[Any]:
    """Assert outputs and every gradient of the sharded layer; return what each step sent."""
    expected, grads = reference(case)
    layer = Layer(case)
    (apply or styles(case))(layer, case.mesh())
    ups = {n: case.local(x, rank) for n, x in upstreams(case).items()}
    seen = []
    for _ in range(steps):
        leaves = {n: case.local(x, rank).clone().requires_grad_() for n, x in case.inputs().items()}
        with count_collectives() as counted:
            outputs = layer(*leaves.values())
            scalar(outputs, ups).backward()
        seen.append(counted)
        check(case, rank, outputs, expected, leaves, grads)
    return seen


def check(
    case: Case,
    rank: int,
    outputs: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    leaves: Mapping[str, Tensor],
    grads: Mapping[str, Tensor | None],
) -> None:
    for name, whole in expected.items():
        if name == "loss":
            assert_close(outputs[name], whole, kind="loss", name=name)
            continue
        dim = statistics_dim(case) if name.startswith("softmax") else case.seq_dim
        assert_close(outputs[name], case.local(whole, rank, dim), name=name)
    for name, whole in grads.items():
        assert whole is not None, name
        assert_close(leaves[name].grad, case.local(whole, rank), kind="grad", name=f"d{name}")


def run_on(rank: int, tensors: Sequence[Tensor]) -> Tensor:
    return tensors[rank]
