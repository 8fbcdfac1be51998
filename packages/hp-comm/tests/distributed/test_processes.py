"""What threads can't show: the same exchanges between real processes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hp_comm import exchange_head_tail, gather_seq, head_to_seq, preflight, seq_to_head, traffic
from hp_mesh.testing import assert_close, randn, ranks


def _step(rank: int) -> dict[str, tuple[int, int]]:
    x = randn(2, 6, 4, 3, seed=rank, requires_grad=True)
    group = dist.group.WORLD
    with traffic() as sent:
        preflight(group, "here", {"x": tuple(x.shape)}, call_index=0)
        handle = seq_to_head(x, group, seq_dim=1, head_dim=2, async_op=True)
        whole = gather_seq(x, group, seq_dim=1)
        tail = exchange_head_tail(x[:, 3:], group)
        back = head_to_seq(handle.wait(), group, seq_dim=1, head_dim=2)
        (back.sum() + 2 * whole.sum() + 3 * tail.sum()).backward()
    assert torch.equal(back, x)
    expected = torch.full_like(x, 1.0 + 2 * 2)
    expected[:, 3:] += 3
    assert_close(x.grad, expected, kind="grad")
    return sent.summary()


def test_processes_exchange_what_threads_exchange() -> None:
    """Same results, same gradients, same bytes."""
    assert ranks(2, backend="processes").run(_step) == ranks(2).run(_step)
