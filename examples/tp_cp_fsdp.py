"""Tensor, context and fully sharded data parallelism together, in the order TP, CP, FSDP.

    torchrun --nproc-per-node 8 examples/tp_cp_fsdp.py --dp 2 --cp 2 --tp 2

Attention is written for one device. The loss that is printed is that of the whole batch: it does
not depend on how many ranks share the work.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from hp_comm import global_loss
from hp_cp import ContextParallel, init_device_mesh, parallelize_module

BATCH, LENGTH, WIDTH, HEADS, VOCABULARY = 4, 48, 64, 8, 32


class Core(nn.Module):
    """Causal attention for one device, ``[B, S, H, D]``."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention output, ``[B, S, H, D]``."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Layer(nn.Module):
    """Attention with its projections and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, WIDTH)
        self.v_proj = nn.Linear(WIDTH, WIDTH)
        self.o_proj = nn.Linear(WIDTH, WIDTH)
        self.sdpa_core = Core()

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, S/P, WIDTH]`` from the same shape."""
        normed = self.norm(x)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(normed).unflatten(-1, (HEADS, -1)) for p in projections)
        return x + self.o_proj(self.sdpa_core(q, k, v).flatten(2))


class Model(nn.Module):
    """Token and position embeddings, two layers, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return logits, ``[B, S/P, VOCABULARY]``."""
        x = self.tokens(ids) + self.positions(positions)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


TP_PLAN = {
    "layers.*.q_proj": ColwiseParallel(use_local_output=False),
    "layers.*.k_proj": ColwiseParallel(use_local_output=False),
    "layers.*.v_proj": ColwiseParallel(use_local_output=False),
    "layers.*.o_proj": RowwiseParallel(),
}


def main() -> None:
    """Train for a few steps; every rank prints nothing but the first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", "npu"))
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--ulysses-degree", type=int, default=None)
    args = parser.parse_args()

    shape = (args.dp, args.cp, args.tp)
    mesh = init_device_mesh(args.device, shape, mesh_dim_names=("dp_shard", "cp", "tp"))
    torch.manual_seed(0)
    model = Model().to(args.device)
    parallelize_module(model, mesh["tp"], TP_PLAN)
    style = ContextParallel(seq_dim=1, head_dim=2, ulysses_degree=args.ulysses_degree)
    parallelize_module(model, mesh["cp"], {"layers.*.sdpa_core": style})
    data_mesh = mesh["dp_shard", "cp"].flatten(mesh_dim_name="fsdp")
    fully_shard(model, mesh=data_mesh)

    # shift the labels on the whole sequence, then cut everything alike
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1)).to(args.device)
    positions = torch.arange(LENGTH, device=args.device).expand(BATCH, LENGTH)
    rows, columns = mesh.get_local_rank("dp_shard"), mesh.get_local_rank("cp")
    ids, labels, positions = (
        whole.chunk(args.dp, 0)[rows].chunk(args.cp, 1)[columns]
        for whole in (tokens[:, :-1], tokens[:, 1:], positions)
    )

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        token_losses = F.cross_entropy(
            model(ids, positions).transpose(1, 2), labels, reduction="none"
        )
        # the mean over all tokens of all ranks; undoes the average that FSDP takes of gradients
        loss = global_loss(token_losses, data_mesh.get_group())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
