"""hp-comm with hp-mesh alone: heads go to their ranks and come back, and so do gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hp_comm import head_to_seq, seq_to_head, traffic
from hp_mesh.testing import ranks


def round_trip(rank: int) -> tuple[bool, bool, int]:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(2, 6, 4, 3, dtype=torch.float64, generator=generator)
    shard = whole.chunk(2, dim=1)[rank].clone().requires_grad_()
    with traffic() as sent:
        heads = seq_to_head(shard, dist.group.WORLD, seq_dim=1, head_dim=2)
        back = head_to_seq(heads, dist.group.WORLD, seq_dim=1, head_dim=2)
    (back * shard.detach()).sum().backward()
    return (
        torch.equal(heads, whole.chunk(2, dim=2)[rank]),
        torch.equal(shard.grad, shard.detach()),
        sent.count("all_to_all"),
    )


if __name__ == "__main__":
    results = ranks(2).run(round_trip)
    assert results == [(True, True, 2)] * 2, results
