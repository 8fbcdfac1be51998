"""hp-dsa with its two dependencies alone: indexer and attention on two ranks equal one device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hp_dsa import (
    DSAIndexerContextParallel,
    DSASparseAttentionContextParallel,
    init_device_mesh,
    ops,
)
from hp_mesh.testing import ranks


class Indexer(nn.Module):
    def forward(self, query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
        return ops.lightning_indexer(query, key, weights, sparse_count=3)[0]


class Attention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, topk_indices: Tensor) -> Tensor:
        return ops.sparse_flash_attention(query, key, value, topk_indices, 0.5)[0]


def attend(indexer: nn.Module, core: nn.Module, xs: list[Tensor]) -> Tensor:
    query, latent, query_index, key_index, weights = xs
    return core(query, latent, latent, indexer(query_index, key_index, weights))


def difference(rank: int) -> float:
    generator = torch.Generator().manual_seed(0)
    draw = {"generator": generator, "dtype": torch.float64}
    tails = ((3, 5), (1, 5), (2, 4), (1, 4), (2,))
    whole = [torch.randn(2, 10, *tail, **draw) for tail in tails]
    upstream = torch.randn(2, 10, 3, 5, **draw)
    for x in whole[:2]:
        x.requires_grad_()
    expected = attend(Indexer(), Attention(), whole)
    (expected * upstream).sum().backward()

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    indexer = DSAIndexerContextParallel(layout="BSND").apply(Indexer(), mesh)
    core = DSASparseAttentionContextParallel(layout="BSND").apply(Attention(), mesh)
    local = [x.detach().chunk(2, dim=1)[rank].clone() for x in whole]
    for x in local[:2]:
        x.requires_grad_()
    out = attend(indexer, core, local)
    (out * upstream.chunk(2, dim=1)[rank]).sum().backward()

    pairs = [(out, expected)]
    pairs += [(x.grad, w.grad) for x, w in zip(local[:2], whole[:2], strict=True)]
    return max((a - b.chunk(2, dim=1)[rank]).abs().max().item() for a, b in pairs)


if __name__ == "__main__":
    errors = ranks(2).run(difference)
    assert max(errors) < 1e-9, errors
