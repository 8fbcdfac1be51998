"""Whether a configuration fits, and what takes the room when it does not."""

from __future__ import annotations

from dataclasses import dataclass

from hp_cp.plan import Plan
from hp_tune.cluster import Cluster
from hp_tune.layer_cost import busiest_description
from hp_tune.model import Model
from hp_tune.workload import Config, Workload

__all__ = ["MemoryUse", "memory_use"]

GIB = 2**30
STATE_BYTES = 16
"""Per parameter: 16-bit weight and gradient, fp32 master weight and two Adam moments."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes per rank by what holds them, and what the device has.

    Attributes:
        terms: Name and bytes, largest first.
        capacity: Bytes that a process can use.
    """

    terms: tuple[tuple[str, int], ...]
    capacity: int

    @property
    def total(self) -> int:
        """All terms together."""
        return sum(size for _, size in self.terms)

    @property
    def fits(self) -> bool:
        """Whether the total is within the capacity."""
        return self.total <= self.capacity

    def top(self, count: int = 3) -> str:
        """Return the largest terms as text."""
        return ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in self.terms[:count])


def memory_use(model: Model, cluster: Cluster, workload: Workload, config: Config) -> MemoryUse:
    """Return what one rank holds at the end of the forward pass.

    Logits are not counted: how they are held depends on the loss.
    """
    plan = Plan(workload.cp_size, config.ulysses_degree, config.load_balance)
    tp, e = workload.tp_size, workload.element_size
    tokens = workload.batch * workload.seq_len // workload.cp_size
    hidden, mlp = model.hidden_size, (model.active_mlp_size or 4 * model.hidden_size) // tp
    queries = kv = transient = largest = 0
    for layer, count in model.layer_groups:
        if not layer.exchanges:
            continue
        heads = layer.num_heads // tp
        sizes = (layer.head_size, layer.v_head_size)
        kv_heads = max(1, layer.num_kv_heads // tp)
        found = busiest_description(plan, heads, kv_heads, workload, sizes, config.overlap)
        q = tokens * heads * ((layer.head_size + layer.v_head_size) * e + 4)
        queries += count * q
        kv += count * found.resident_kv_bytes
        transient = max(transient, found.peak_extra_bytes)
        largest = max(largest, q + found.resident_kv_bytes)
    rest = tokens * e * (4 * hidden + 3 * mlp)  # norms, residuals and the three MLP activations
    if workload.recompute:
        kept = {
            "layer inputs": len(model.layers) * tokens * hidden * e,
            "one layer's activations": largest + rest,
        }
    else:
        kept = {
            "q, output and statistics": queries,
            "resident K and V": kv,
            "MLP and norm activations": len(model.layers) * rest,
        }
    groups = 1 + (plan.mode == "hybrid") * 2 + (tp > 1) + (workload.num_ranks > 1)
    terms = {
        **kept,
        "exchange buffers": transient,
        "communicators": int(groups * cluster.device.comm_buffer_MiB.value * 2**20),
    }
    if workload.world_size is not None and model.parameters is not None:
        states = model.parameters * STATE_BYTES // workload.world_size
        terms["parameters and optimizer"] = states
    return MemoryUse(
        terms=tuple(sorted(terms.items(), key=lambda term: -term[1])),
        capacity=int(cluster.device.memory_GiB.value * GIB),
    )
