"""Ring attention, priced to be compared with published tables. No style runs it.

K and V travel from rank to rank in ``P - 1`` steps, each behind the attention of the block that is
there; a step takes as long as the slowest rank's block or its send, whichever is longer.
"""

from __future__ import annotations

from dataclasses import dataclass

from hp_tune.clusters.cluster import Cluster
from hp_tune.clusters.network import Group, transfer
from hp_tune.cost.pricing import Pricing
from hp_tune.models.model import Attention
from hp_tune.workload import Workload

__all__ = ["RingTime", "ring_attention"]


@dataclass(frozen=True, slots=True)
class RingTime:
    """Seconds of one layer's attention.

    Attributes:
        forward, backward: All steps.
        send: One send of K and V.
        block: Attention of one off-diagonal block, forward.
    """

    forward: float
    backward: float
    send: float
    block: float


def ring_attention(
    layer: Attention, cluster: Cluster, workload: Workload, *, zigzag: bool = True
) -> RingTime:
    """Return what attention of one layer takes as a ring.

    Args:
        zigzag: Head-tail order of the data: causal work is half a block in every step. Without it,
            some rank computes a whole block in every step but the first.
    """
    P, tp = workload.cp_size, workload.tp_size
    rows = workload.seq_len // P
    heads, kv = layer.num_heads // tp, max(1, layer.num_kv_heads // tp)
    size = layer.head_size + layer.v_head_size
    price = Pricing(cluster, workload)
    halved = workload.causal and workload.skips_masked

    def block(pairs: float) -> float:
        return price.attention("block", pairs, heads, size, rows=rows).seconds

    backward = price.attention_backward
    own = block(rows * (rows + 1) / 2 if halved else rows * rows)
    other = block(rows * rows / 2 if halved and zigzag else rows * rows)
    if P == 1:
        return RingTime(own, backward * own, 0.0, other)
    shard = workload.batch * rows * kv * size * workload.element_size
    ring = transfer(cluster, "ring", Group(P, tp, workload.num_ranks), shard * (P - 1))
    send = ring.seconds / (P - 1)

    def steps(times: float, sends: float) -> float:
        """The own block hides the first send, each other one the next, the last hides none."""
        first = max(times * own, sends * send)
        return first + (P - 2) * max(times * other, sends * send) + times * other

    # backward carries K, V and the sums of their gradients, which take one more send home
    return RingTime(steps(1.0, 1.0), steps(backward, 2.0) + send, send, other)
