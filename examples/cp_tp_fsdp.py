"""A Llama with tensor, context and fully sharded data parallelism, in the order TP, CP, FSDP.

::

    torchrun --standalone --nproc-per-node 8 examples/cp_tp_fsdp.py --dp 2 --cp 2 --tp 2
    torchrun --standalone --nproc-per-node 8 examples/cp_tp_fsdp.py --cp 4 --tp 2 --ulysses-degree 2

Attention is written for one device. The loss that is printed is that of the whole batch: it does
not depend on how many ranks share the work.
"""

from __future__ import annotations

import argparse
import math
import os
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from hp_comm import global_loss
from hp_cp import (
    ContextParallel,
    Handoff,
    check_fsdp_mesh,
    init_device_mesh,
    parallelize_module,
)
from hp_mesh import next_token_labels, position_ids, shard_sequence

BATCH, LENGTH, VOCABULARY = 8, 48, 96
WIDTH, HEADS, KV_HEADS, HEAD_SIZE, HIDDEN, LAYERS = 48, 8, 4, 6, 80, 2


class Core(nn.Module):
    """Causal attention for one device, ``[B, S, H, D]``; fewer heads of k and v."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention output, ``[B, S, H, D]``."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Return ``x`` ``[B, S, H, D]`` turned by its positions; under TP it may be a DTensor."""
    cos, sin = tables
    if isinstance(x, DTensor):
        cos, sin = (DTensor.from_local(t, x.device_mesh, [Replicate()]) for t in (cos, sin))
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Attention(nn.Module):
    """Projections around the core."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, HEADS * HEAD_SIZE, bias=False)
        self.wk = nn.Linear(WIDTH, KV_HEADS * HEAD_SIZE, bias=False)
        self.wv = nn.Linear(WIDTH, KV_HEADS * HEAD_SIZE, bias=False)
        self.wo = nn.Linear(HEADS * HEAD_SIZE, WIDTH, bias=False)
        self.q_ready, self.k_ready = Handoff(), Handoff()  # for AsyncContextParallel
        self.sdpa_core = Core()

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Return ``[B, S, WIDTH]`` from the same shape."""
        q, k, v = (p(x).unflatten(-1, (-1, HEAD_SIZE)) for p in (self.wq, self.wk, self.wv))
        q, k = self.q_ready(rotate(q, tables)), self.k_ready(rotate(k, tables))
        return self.wo(self.sdpa_core(q, k, v).flatten(2))


class FeedForward(nn.Module):
    """The gated MLP of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, S, WIDTH]`` from the same shape."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and around a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Return ``[B, S, WIDTH]`` from the same shape."""
        x = x + self.attention(self.attention_norm(x), tables)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Embedding, layers, head. The ends may be missing, as in the stages of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(LAYERS)})
        self.norm: nn.Module | None = nn.RMSNorm(WIDTH)
        self.output: nn.Module | None = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return logits ``[B, S, VOCABULARY]`` of token ids ``[B, S]`` at positions ``[S]``."""
        half = torch.arange(HEAD_SIZE // 2, device=positions.device)
        angles = positions[:, None, None] * 1e4 ** (-2 * half / HEAD_SIZE)  # [S, 1, D/2]
        x = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        tables = (angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        for layer in self.layers.values():
            x = layer(x, tables)
        return self.output(self.norm(x)) if self.norm and self.output is not None else x


def tp_plan(*, keep: bool = True) -> dict[str, ColwiseParallel | RowwiseParallel]:
    """Return the TP plan; with ``keep``, attention receives DTensors whose heads are cut."""
    qkv = {
        f"layers.*.attention.{name}": ColwiseParallel(use_local_output=not keep)
        for name in ("wq", "wk", "wv")
    }
    return qkv | {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "layers.*.attention.wo": RowwiseParallel(),
        "layers.*.feed_forward.w1": ColwiseParallel(),
        "layers.*.feed_forward.w3": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(),
        "output": ColwiseParallel(output_layouts=Replicate()),
    }


def steps(
    model: nn.Module, inputs: tuple[Tensor, ...], group: dist.ProcessGroup, count: int
) -> Iterator[float]:
    """Train so many steps on ``(ids, labels, positions)``; yield the loss of the whole batch."""
    ids, labels, positions = inputs
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(count):
        losses = F.cross_entropy(
            model(ids, positions).transpose(1, 2), labels, reduction="none", ignore_index=-100
        )
        # the mean over all tokens of all ranks; undoes the average that FSDP takes of gradients
        loss = global_loss(losses, group, weights=labels != -100)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def main() -> None:
    """Train for a few steps; the first rank prints the loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", "npu"))
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--ulysses-degree", type=int, default=None)
    parser.add_argument("--load-balance", action="store_true")
    args = parser.parse_args()
    # of FSDP, about TP's outputs: they are views, which nothing writes to here
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")

    shape = (args.dp, args.cp, args.tp)
    world = int(os.environ["WORLD_SIZE"])
    if math.prod(shape) != world:
        parser.error(f"--dp x --cp x --tp {shape} must be the number of ranks ({world})")
    mesh = init_device_mesh(args.device, shape, mesh_dim_names=("dp_shard", "cp", "tp"))
    torch.manual_seed(0)  # the same weights and tokens on every rank
    model, tokens = Llama().to(args.device), torch.randint(VOCABULARY, (BATCH, LENGTH))

    parallelize_module(model, mesh["tp"], tp_plan())
    style = ContextParallel(
        seq_dim=1, head_dim=2, ulysses_degree=args.ulysses_degree, load_balance=args.load_balance
    )
    parallelize_module(model, mesh["cp"], {"layers.*.attention.sdpa_core": style})
    fsdp_mesh = mesh["dp_shard", "cp"].flatten(mesh_dim_name="fsdp")
    for layer in model.layers.values():
        fully_shard(layer, mesh=fsdp_mesh)
    fully_shard(model, mesh=fsdp_mesh)
    check_fsdp_mesh(model, mesh)

    rows = tokens.to(args.device).chunk(args.dp)[mesh.get_local_rank("dp_shard")]
    ids = shard_sequence(rows, mesh["cp"])
    labels = next_token_labels(rows, mesh["cp"])  # shifted on the whole sequence, then cut
    positions = position_ids(mesh["cp"], global_length=LENGTH, device=args.device)

    for step, loss in enumerate(steps(model, (ids, labels, positions), fsdp_mesh.get_group(), 4)):
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss:.6f}")
    dist.barrier()  # a rank that leaves early would end the groups of the others
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
