"""What one DSA layer sends, computes and costs on real ranks, for the rows of `cases/dsa.py`.

Functions with ``rank`` first run in gloo processes, which load them from this file; so it imports
nothing from beside it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hp_comm import traffic
from hp_dsa import (
    DSAGatherCache,
    DSAIndexerContextParallel,
    DSAIndexerLossContextParallel,
    DSASparseAttentionContextParallel,
    init_device_mesh,
)
from hp_dsa.cores import IndexerLoss, SelectKeys, SparseAttention
from hp_mesh import shard_sequence
from hp_mesh.testing import assert_close, randn

V32 = {"latent": 512, "rope": 64, "index_dim": 128, "hidden": 64, "heads": 2, "index_heads": 2}
"""DeepSeek-V3.2's widths of what travels; heads are few, since queries stay where they are."""
TINY = {"latent": 48, "rope": 16, "index_dim": 32, "hidden": 96, "heads": 4, "index_heads": 4}
TOPK, SCALE = 48, 0.1


class Indexer(SelectKeys):
    """Select keys, and count the pairs of row and visible key that this rank is handed."""

    pairs = 0
    seconds = 0.0

    def forward(self, query: Tensor, key: Tensor, weights: Tensor, ends: None = None) -> Tensor:
        """Return indices, ``[B, S, 1, K]``."""
        rows, keys = query.size(1), key.size(1)
        self.pairs += rows * (keys - rows) + rows * (rows + 1) // 2
        start = time.process_time()
        indices = super().forward(query, key, weights)
        self.seconds += time.process_time() - start
        return indices


class Layer(nn.Module):
    """Projections, indexer, attention in absorbed form, and the loss, as V3.2 connects them."""

    def __init__(self, sizes: dict[str, int], dtype: torch.dtype) -> None:
        super().__init__()
        heads, latent, rope = sizes["heads"], sizes["latent"], sizes["rope"]
        index = sizes["index_heads"] * sizes["index_dim"]
        widths = (heads * latent, heads * rope, latent, rope, index, sizes["index_dim"])
        widths += (sizes["index_heads"],)
        self.sizes = sizes
        self.projections = nn.ModuleList(
            nn.Linear(sizes["hidden"], width, bias=False, dtype=dtype) for width in widths
        )
        for seed, projection in enumerate(self.projections):
            weight = cast(Tensor, projection.weight)
            weight.data.copy_(randn(*weight.shape, seed=seed) * sizes["hidden"] ** -0.5)
        self.indexer = Indexer("BSND", TOPK)
        self.core, self.loss = SparseAttention("BSND", SCALE), IndexerLoss("BSND", SCALE)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output, ``[B, S, N, latent]``, and the loss, for ``[B, S, hidden]``."""
        sizes = self.sizes
        q, qr, k, kr, qi, ki, w = (projection(x) for projection in self.projections)
        q, qr = (y.unflatten(-1, (sizes["heads"], -1)) for y in (q, qr))
        qi = qi.unflatten(-1, (sizes["index_heads"], -1))
        k, kr, ki = (y.unsqueeze(-2) for y in (k, kr, ki))
        indices = self.indexer(qi.detach(), ki.detach(), w.detach())
        out, top, total = self.core(q, k, k, indices, qr, kr)
        loss = self.loss(
            q.detach(), k.detach(), qi, ki, w, indices, top, total, qr.detach(), kr.detach()
        )
        return out, loss


def styled(layer: Layer, P: int, *, cached: bool = True, balanced: bool = False) -> Layer:
    """Return ``layer`` with the three styles, and with a gather cache if asked for."""
    mesh = init_device_mesh("cpu", (P,), mesh_dim_names=("cp",))
    if cached:
        DSAGatherCache().apply(layer)
    DSAIndexerContextParallel(load_balance=balanced).apply(layer.indexer, mesh)
    DSASparseAttentionContextParallel(load_balance=balanced).apply(layer.core, mesh)
    DSAIndexerLossContextParallel(load_balance=balanced).apply(layer.loss, mesh)
    return layer


def sent(rank: int, P: int, tokens: int, cached: bool) -> dict[str, tuple[int, int]]:
    """Return ``{kind: (calls, bytes)}`` of forward and backward with ``tokens`` on this rank."""
    torch.set_num_threads(1)
    layer = styled(Layer(V32, torch.bfloat16), P, cached=cached)
    x = randn(1, tokens, V32["hidden"], seed=rank).to(torch.bfloat16)
    with traffic() as told:
        out, loss = layer(x)
        (out.float().sum() + loss.sum()).backward()
    return {kind: found for kind, found in told.summary().items() if kind != "preflight"}


def indexed(rank: int, P: int, length: int, balanced: bool) -> tuple[int, float]:
    """Return the pairs that this rank's indexer is handed, and the CPU seconds they take."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (P,), mesh_dim_names=("cp",))
    indexer = Indexer("BSND", TOPK)
    style = DSAIndexerContextParallel(load_balance=balanced, use_local_input=True)
    style.apply(indexer, mesh)
    order: Any = "head_tail" if balanced else "contiguous"
    shapes = ((1, length, 8, 128), (1, length, 1, 128), (1, length, 8))
    shards = [
        shard_sequence(randn(*shape, seed=i, dtype=torch.float32), (rank, P), order=order)
        for i, shape in enumerate(shapes)
    ]
    indexer(*shards)
    indexer.pairs, indexer.seconds = 0, 0.0
    indexer(*shards)
    return indexer.pairs, indexer.seconds


def trained(rank: int, P: int, length: int) -> float:
    """Check outputs and gradients against the layer without styles; return a step's seconds."""
    torch.set_num_threads(1)
    whole = randn(2, length, TINY["hidden"])
    upstream = randn(2, length, TINY["heads"], TINY["latent"], seed=1)
    plain, layer = Layer(TINY, torch.float64), styled(Layer(TINY, torch.float64), P)
    x = whole.clone().requires_grad_()
    out, loss = _step(plain, x, upstream)
    ours = shard_sequence(whole, (rank, P)).clone().requires_grad_()
    up = shard_sequence(upstream, (rank, P))
    found, total = _step(layer, ours, up)
    assert_close(found, shard_sequence(out, (rank, P)), name="output")
    assert_close(total, loss, kind="loss", name="loss")
    assert x.grad is not None and ours.grad is not None, "both are differentiated"
    assert_close(ours.grad, shard_sequence(x.grad, (rank, P)), kind="grad", name="dx")
    for (name, one), other in zip(plain.named_parameters(), layer.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None, name
        dist.all_reduce(other.grad)
        assert_close(other.grad, one.grad, kind="grad", name=name)
    dist.barrier()
    start = time.perf_counter()
    _step(layer, ours, up)
    dist.barrier()
    return time.perf_counter() - start


def _step(layer: Layer, x: Tensor, upstream: Tensor) -> Sequence[Tensor]:
    layer.zero_grad()
    x.grad = None
    out, loss = layer(x)
    ((out * upstream).sum() + loss.sum()).backward()
    return out.detach(), loss.detach()
