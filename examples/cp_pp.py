"""The Llama of `cp_tp_fsdp.py` as a pipeline of two stages, each with context parallelism and FSDP.

::

    torchrun --standalone --nproc-per-node 8 examples/cp_pp.py --dp 2 --cp 2
    torchrun --standalone --nproc-per-node 4 examples/cp_pp.py --cp 2 --sync

Within a stage nothing is new: CP, then FSDP over ``dp_shard`` and ``cp`` flattened. Several
micro-batches are under way at a time (1F1B). The loss that is printed is that of the whole batch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cp_tp_fsdp import BATCH, LAYERS, LENGTH, VOCABULARY, Llama
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from hp_comm import count_tokens, global_loss
from hp_cp import AsyncContextParallel, ContextParallel, check_fsdp_mesh, init_device_mesh
from hp_mesh import next_token_labels, position_ids, shard_sequence

STAGES = 2


class Stage(nn.Module):
    """A part of the model that knows the positions of this rank's tokens."""

    def __init__(self, model: Llama, positions: Tensor) -> None:
        super().__init__()
        self.model, self.positions = model, positions

    def forward(self, x: Tensor) -> Tensor:
        """Return what the next stage gets, ``[B, S/P, WIDTH]``, or at last the logits."""
        return self.model(x, self.positions)


def cut(model: Llama, index: int) -> Llama:
    """Take from ``model`` what is not in stage ``index``."""
    first = index * LAYERS // STAGES
    for i in range(LAYERS):
        if not first <= i < first + LAYERS // STAGES:
            del model.layers[str(i)]
    if index > 0:
        model.tok_embeddings = None
    if index < STAGES - 1:
        model.norm = model.output = None
    return model


def build(
    model: Llama,
    mesh: DeviceMesh,
    style: ContextParallel,
    loss: Callable[..., Tensor],
    count: int,
    length: int = LENGTH,
) -> tuple[Stage, Schedule1F1B]:
    """Return this rank's stage, with CP and FSDP in it, and its schedule.

    Args:
        model: The whole model.
        mesh: With the axes ``("pp", "dp_shard", "cp")``.
        style: CP style for attention.
        loss: Loss of a micro-batch, from logits and labels.
        count: Number of micro-batches.
        length: Length of the whole sequence.
    """
    index = mesh.get_local_rank("pp")
    positions = position_ids(mesh["cp"], global_length=length, device=mesh.device_type)
    stage = Stage(cut(model, index), positions)
    for layer in stage.model.layers.values():
        a = layer.attention
        if isinstance(style, AsyncContextParallel):
            style.apply(a.sdpa_core, mesh["cp"], a.q_ready, a.k_ready, a.wv)
        else:
            style.apply(a.sdpa_core, mesh["cp"])
    fsdp_mesh = mesh["dp_shard", "cp"].flatten(mesh_dim_name="fsdp")
    for layer in stage.model.layers.values():
        # whole between its micro-batches, which would gather it again each time
        fully_shard(layer, mesh=fsdp_mesh, reshard_after_forward=False)
    fully_shard(stage, mesh=fsdp_mesh, reshard_after_forward=False)
    check_fsdp_mesh(stage, mesh)

    device = torch.device(mesh.device_type)
    pipelined = PipelineStage(stage, index, STAGES, device, group=mesh.get_group("pp"))
    # the loss has the right denominator already: nothing is to be divided by the number of parts
    return stage, Schedule1F1B(pipelined, count, loss_fn=loss, scale_grads=False)


def main() -> None:
    """Train for a few steps; the first rank of the last stage prints the loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", "npu"))
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--ulysses-degree", type=int, default=None)
    parser.add_argument("--sync", action="store_true", help="exchange at attention, not before")
    args = parser.parse_args()

    shape, names = (STAGES, args.dp, args.cp), ("pp", "dp_shard", "cp")
    mesh = init_device_mesh(args.device, shape, mesh_dim_names=names)
    torch.manual_seed(0)  # the same weights and tokens on every rank
    model, tokens = Llama().to(args.device), torch.randint(VOCABULARY, (BATCH, LENGTH))
    rows = tokens.to(args.device).chunk(args.dp)[mesh.get_local_rank("dp_shard")]
    ids, labels = shard_sequence(rows, mesh["cp"]), next_token_labels(rows, mesh["cp"])

    group = mesh["dp_shard", "cp"].flatten(mesh_dim_name="fsdp").get_group()
    total = count_tokens(labels != -100, group)  # of the step, not of a micro-batch

    def loss_of(logits: Tensor, part: Tensor) -> Tensor:
        losses = F.cross_entropy(logits.transpose(1, 2), part, reduction="none", ignore_index=-100)
        return global_loss(losses, group, weights=part != -100, total=total)

    style = (ContextParallel if args.sync else AsyncContextParallel)(
        seq_dim=1, head_dim=2, ulysses_degree=args.ulysses_degree
    )
    stage, schedule = build(model, mesh, style, loss_of, args.micro_batches)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    is_last = mesh.get_local_rank("pp") == STAGES - 1
    for step in range(4):
        losses: list[Tensor] = []
        if is_last:
            schedule.step(target=labels, losses=losses)
        else:
            schedule.step(ids)
        optimizer.step()
        optimizer.zero_grad()
        if is_last and mesh["dp_shard", "cp"].get_coordinate() == (0, 0):
            print(f"step {step}  loss {sum(losses).item():.6f}")  # of each micro-batch its share
    dist.barrier()  # a rank that leaves early would end the groups of the others
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
