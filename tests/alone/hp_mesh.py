"""hp-mesh with nothing else installed: a mesh on two ranks, and a sequence cut for them."""

from __future__ import annotations

import torch

from hp_mesh import flatten_mesh, init_device_mesh, shard_sequence
from hp_mesh.testing import ranks


def cut_and_reduce(rank: int) -> tuple[int, list[int]]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    flat = flatten_mesh(mesh["dp", "cp"], mesh_dim_name="fsdp")
    tokens = torch.arange(12).view(1, 12)
    local = shard_sequence(tokens, mesh["cp"], seq_dim=1)
    return flat.size(), local.flatten().tolist()


if __name__ == "__main__":
    results = ranks(2).run(cut_and_reduce)
    assert results == [(2, list(range(6))), (2, list(range(6, 12)))], results
