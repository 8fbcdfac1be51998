"""Whether a configuration fits, and what takes the room when it does not."""

from __future__ import annotations

from dataclasses import dataclass

from hp_cp.plan import Plan
from hp_tune.clusters.cluster import Cluster
from hp_tune.cost.described import described, latent_bytes
from hp_tune.cost.halo import layer_config, layer_plan
from hp_tune.models.model import Attention, Model
from hp_tune.workload import Config, Workload

__all__ = ["MemoryUse", "memory_use"]

GIB = 2**30
SCORE_ROWS = 1024
"""Query rows whose index scores are in memory at a time."""
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
    tp, e = workload.tp_size, workload.element_size
    tokens = workload.batch * workload.seq_len // workload.cp_size
    hidden, mlp = model.hidden_size, (model.active_mlp_size or 4 * model.hidden_size) // tp
    queries = kv = indices = transient = largest = 0
    hybrids: set[int] = set()  # degrees whose groups have communicators of their own
    for layer, count in model.layer_groups:
        if not layer.exchanges:
            continue
        own, plan = layer_config(layer, config), layer_plan(layer, config, workload.cp_size)
        hybrids |= {plan.ulysses_degree} if plan.mode == "hybrid" else set()
        held = (_sparse if layer.is_sparse else _dense)(layer, plan, workload, own)
        queries += count * held.queries
        kv += count * held.kv
        indices += count * held.indices
        transient = max(transient, held.transient)
        largest = max(largest, held.queries + held.whole_kv + held.indices)
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
            "selected keys": indices,
            "MLP and norm activations": len(model.layers) * rest,
        }
    groups = 1 + 2 * len(hybrids) + (tp > 1) + (workload.num_ranks > 1)
    terms = {
        **kept,
        "exchange buffers": transient,
        "communicators": int(groups * cluster.device.comm_buffer_MiB.value * 2**20),
    }
    if workload.world_size is not None and model.parameters is not None:
        states = model.parameters * STATE_BYTES // workload.world_size
        terms["parameters and optimizer"] = states
    terms = {name: size for name, size in terms.items() if size}
    return MemoryUse(
        terms=tuple(sorted(terms.items(), key=lambda term: -term[1])),
        capacity=int(cluster.device.memory_GiB.value * GIB),
    )


@dataclass(frozen=True, slots=True)
class _Held:
    """Bytes of one layer: kept until backward, and beside that while it runs."""

    queries: int
    kv: int
    whole_kv: int
    transient: int
    indices: int = 0


def _dense(layer: Attention, plan: Plan, workload: Workload, config: Config) -> _Held:
    tokens = workload.batch * workload.seq_len // workload.cp_size
    e, heads = workload.element_size, layer.num_heads // workload.tp_size
    found = described(layer, plan, workload, config)
    saved = found.saved_kv_bytes
    if config.gather == "latent" and layer.latent_size is not None:
        saved = latent_bytes(layer, workload) * workload.cp_size  # K and V come from it again
    return _Held(
        queries=tokens * heads * ((layer.head_size + layer.v_head_size) * e + 4),
        kv=saved,
        whole_kv=found.resident_kv_bytes * config.head_groups,
        transient=found.peak_extra_bytes + (0 if config.keep_kv else found.resident_kv_bytes),
    )


def _sparse(layer: Attention, plan: Plan, workload: Workload, config: Config) -> _Held:
    """Count the absorbed form: each head's query and output are as wide as the latent."""
    tokens = workload.batch * workload.seq_len // workload.cp_size
    e, heads = workload.element_size, layer.num_heads // workload.tp_size
    latent, own = layer.latent_size or 0, latent_bytes(layer, workload)
    index = (layer.index_head_size or 0) * e if layer.has_indexer else 0
    index_query = tokens * (layer.index_heads or 0) * (index + e * layer.has_indexer)
    gathered = workload.cp_size * (own + tokens * index)
    return _Held(
        queries=tokens * heads * ((2 * latent - layer.rope_size) * e + 8) + index_query,
        kv=gathered if config.keep_kv else own + tokens * index,
        whole_kv=gathered,
        # the scores of a block of query rows against all keys, fp32
        transient=gathered + 4 * SCORE_ROWS * workload.batch * workload.seq_len,
        indices=tokens * (layer.index_topk or 0) * 4,
    )
