"""The cost of one kind of layer, term by term, each with its formula and its sources."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from hp_cp.description import Collective, Description
from hp_cp.plan import Plan
from hp_tune.cluster import Cluster
from hp_tune.model import Attention, Model
from hp_tune.network import Group, Transfer, transfer
from hp_tune.workload import Config, Workload

__all__ = ["LayerCost", "Term", "busiest_description", "causal_pairs", "work_shares"]

Phase = Literal["forward", "backward"]
Resource = Literal["compute", "network", "memory"]


@dataclass(frozen=True, slots=True)
class Term:
    """One addend of a prediction.

    Attributes:
        name: What runs, such as ``all_to_all q,k,v``.
        seconds: Time on its resource, over all layers that it stands for.
        exposed: Part of it that the step waits for; less than ``seconds`` where it is overlapped.
        bytes: Bytes that leave a rank (network) or move in memory (memory), over those layers.
        formula: How ``seconds`` of one layer follows from the numbers.
        sources: Names of the cluster's numbers behind it.
    """

    name: str
    phase: Phase
    resource: Resource
    layers: int
    seconds: float
    exposed: float
    bytes: float
    formula: str
    sources: tuple[str, ...]


def causal_pairs(start: int, stop: int, window: int | None = None) -> int:
    """Return how many (query, key) pairs the query rows ``[start, stop)`` see.

    A row sees itself and all earlier ones, or only the last ``window`` of these.
    """

    def below(rows: int) -> int:  # pairs of the first rows
        full = rows if window is None else min(rows, window)
        return full * (full + 1) // 2 + (rows - full) * (window or 0)

    return below(stop) - below(start)


def work_shares(plan: Plan, layer: Attention, workload: Workload) -> list[int]:
    """Return the (query, key) pairs of each Colossal index, read from the plan's rows."""
    S = workload.seq_len
    shares = []
    for rank in range(0, plan.cp_size, plan.ulysses_degree):
        pairs = 0
        for rows in plan.rows(rank, S):
            if workload.causal and workload.skips_masked:
                pairs += causal_pairs(rows.query_start, rows.query_end, layer.window)
            else:
                pairs += rows.query_length * S
        shares.append(pairs)
    return shares


@lru_cache(maxsize=4096)
def busiest_description(
    plan: Plan,
    heads: int,
    kv_heads: int,
    workload: Workload,
    sizes: tuple[int, int],
    overlap: bool,
) -> Description:
    """Return what the Ulysses rank that sends most sends; ``sizes`` are those of a q and a v head.

    Ranks differ only where neighbours share KV heads. Kept, because a search asks again and again
    with other clusters.
    """
    head_size, v_head_size = sizes
    found = [
        plan.describe(
            num_heads=heads,
            num_kv_heads=kv_heads,
            seq_len=workload.seq_len,
            head_size=head_size,
            v_head_size=v_head_size,
            batch=workload.batch,
            element_size=workload.element_size,
            rank=rank,
            overlap=overlap,
        )
        for rank in range(plan.ulysses_degree if kv_heads % plan.ulysses_degree else 1)
    ]
    return max(found, key=lambda description: description.bytes())


class LayerCost:
    """The terms of one kind of layer, ``count`` times."""

    def __init__(
        self,
        model: Model,
        layer: Attention,
        count: int,
        cluster: Cluster,
        workload: Workload,
        config: Config,
        plan: Plan,
    ) -> None:
        self.layer, self.count, self.cluster = layer, count, cluster
        self.workload, self.config, self.plan = workload, config, plan
        self.heads = layer.num_heads // workload.tp_size
        self.kv_heads = max(1, layer.num_kv_heads // workload.tp_size)
        self.tokens = workload.batch * workload.seq_len // workload.cp_size
        self.hidden = model.hidden_size
        self.description = busiest_description(
            plan,
            self.heads,
            self.kv_heads,
            workload,
            (layer.head_size, layer.v_head_size),
            config.overlap,
        )
        shares = work_shares(plan, layer, workload)
        mean = sum(shares) / len(shares)
        self.imbalance = 1.0 if cluster.shared_cores else max(shares) / mean
        self.pairs = mean * self.imbalance

    def terms(self) -> list[Term]:
        """Return all terms, forward first; recomputation repeats the forward's in backward."""
        forward = self._phase("forward")
        backward = self._phase("backward")
        if self.workload.recompute:
            backward += [
                replace(term, phase="backward", name=f"{term.name} (again)") for term in forward
            ]
        return forward + backward

    def _phase(self, phase: Phase) -> list[Term]:
        rows = [row for row in self.description.collectives if row.phase == phase]
        costs = [(row, self._transfer(row)) for row in rows]
        hidden = self._hidden(phase, costs)
        terms = [
            *self._projections(phase),
            self._attention(phase),
            *(self._network(row, moved, hidden.get(row, 0.0)) for row, moved in costs),
            *self._copies(phase, rows),
        ]
        return [term for term in terms if term.seconds > 0]

    def _projections(self, phase: Phase) -> list[Term]:
        times = 1 if phase == "forward" else 2
        return [
            self._term(
                f"{name} projection",
                phase,
                "compute",
                times * seconds,
                f"{times} x 2 x {self.tokens} tokens x {self.hidden} x {width} / GEMM rate",
                sources=("device.peak_TFLOPS", "device.gemm_efficiency"),
            )
            for name, width, seconds in self._gemms()
        ]

    def _gemms(self) -> list[tuple[str, int, float]]:
        layer, device = self.layer, self.cluster.device
        rate = device.peak_TFLOPS[self.workload.dtype].value * 1e12 * device.gemm_efficiency.value
        kv = self.kv_heads
        widths = [
            ("q", self.heads * layer.head_size),
            ("k", kv * layer.head_size),
            ("v", kv * layer.v_head_size),
            ("out", self.heads * layer.v_head_size),
        ]
        return [(name, w, 2 * self.tokens * self.hidden * w / rate) for name, w in widths]

    def _attention(self, phase: Phase) -> Term:
        layer, device = self.layer, self.cluster.device
        calls = 2 if self.plan.load_balance else 1
        heads = self.heads // self.plan.ulysses_degree
        rows = self.workload.seq_len // self.plan.colossal_degree // calls
        busy = rows * heads * self.workload.batch
        fill = busy / (busy + device.attention_saturation.value)
        peak = device.peak_TFLOPS[self.workload.dtype].value * 1e12
        rate = peak * device.attention_efficiency.value * fill
        size = layer.head_size + layer.v_head_size
        flops = 2 * self.workload.batch * heads * size * self.pairs
        times = 1.0 if phase == "forward" else 2.5
        return self._term(
            "attention" if calls == 1 else "attention (2 calls)",
            phase,
            "compute",
            times * flops / rate + calls * device.launch_us.value * 1e-6,
            f"{times} x 2 x {self.workload.batch} x {heads} heads x {size} "
            f"x {self.pairs:.6g} pairs / ({rate / 1e12:.4g} TFLOPS)",
            sources=(
                "device.peak_TFLOPS",
                "device.attention_efficiency",
                "device.attention_saturation",
                "device.launch_us",
            ),
        )

    def _transfer(self, row: Collective) -> Transfer:
        tp, u = self.workload.tp_size, self.plan.ulysses_degree
        size, stride = {
            "ulysses": (u, tp),
            "colossal": (self.plan.colossal_degree, u * tp),
            "cp": (self.plan.cp_size, tp),
        }[row.axis]
        group = Group(size, stride, self.workload.num_ranks)
        return transfer(self.cluster, row.kind, group, row.bytes_sent)

    def _network(self, row: Collective, moved: Transfer, hidden: float) -> Term:
        return self._term(
            f"{row.kind} {row.what}",
            row.phase,
            "network",
            moved.seconds,
            f"latency + {moved.tier_bytes:.6g} B on {moved.tier} / {moved.GBps:.4g} GB/s "
            f"({moved.share_of_peak:.0%} of its peak)",
            exposed=max(0.0, moved.seconds - hidden),
            volume=row.bytes_sent,
            sources=moved.sources,
        )

    def _copies(self, phase: Phase, rows: Iterable[Collective]) -> list[Term]:
        """Price packs and unpacks around all-to-alls, and the relayout of what was gathered.

        A gather lands with the rank in front; where the sequence is the first dim that is in order.
        """
        workload, device = self.workload, self.cluster.device
        in_order = workload.layout in ("SBHD", "TND") or (
            workload.layout == "BSHD" and workload.batch == 1
        )
        copies = {
            "all_to_all": 3 if workload.layout == "BNSD" else 2,
            "all_gather": 0 if in_order else 1,
            "reduce_scatter": 0 if in_order else 1,
            "p2p": 2,
        }
        rate = device.memory_GBps.value * 1e9 * device.memory_efficiency.value
        terms = []
        for row in rows:
            size = {"ulysses": self.plan.ulysses_degree, "colossal": self.plan.colossal_degree}
            members = size.get(row.axis, 0)
            whole = row.bytes_sent * members / (members - 1) if members else row.bytes_sent
            moved = 2 * whole * copies[row.kind]
            terms.append(
                self._term(
                    f"copies for {row.kind} {row.what}",
                    phase,
                    "memory",
                    copies[row.kind] * device.launch_us.value * 1e-6 + moved / rate,
                    f"{copies[row.kind]} x (launch + 2 x {whole:.6g} B / {rate / 1e9:.4g} GB/s)",
                    volume=moved,
                    sources=("device.memory_GBps", "device.memory_efficiency", "device.launch_us"),
                )
            )
        return terms

    def _hidden(
        self, phase: Phase, costs: Sequence[tuple[Collective, Transfer]]
    ) -> dict[Collective, float]:
        """Return how much of each collective runs behind projections, on two resources.

        Forward: the collective of a tensor starts when its projection is done. Backward mirrors
        it: all start together and each projection's gradients wait for their own. The price of
        overlap, slower kernels, is taken off what is hidden.
        """
        if not self.config.overlap:
            return {}
        gemm = {name: seconds for name, _, seconds in self._gemms()}
        kind = {"forward": "all_to_all", "backward": "all_to_all"}
        if self.plan.ulysses_degree == 1:
            kind = {"forward": "all_gather", "backward": "reduce_scatter"}
        slower = 1 + self.cluster.device.overlap_slowdown.value
        order = ("k", "v", "q") if self.plan.ulysses_degree == 1 else ("q", "k", "v")
        times = {
            name: next((m.seconds for r, m in costs if r.what == name and r.kind == kind[phase]), 0)
            for name in order
        }
        compute = network = 0.0
        for name in order:
            if phase == "forward":
                compute += gemm[name] * slower
                network = max(network, compute) + times[name] if times[name] else network
            else:
                network += times[name]
                compute = max(compute, network if times[name] else 0.0) + 2 * gemm[name] * slower
        work = sum(gemm[name] for name in order) * (1 if phase == "forward" else 2)
        total = sum(times.values())
        hidden = max(0.0, total - (max(compute, network) - work))
        return {
            row: hidden * moved.seconds / total
            for row, moved in costs
            if row.kind == kind[phase] and row.what in times and total
        }

    def _term(
        self,
        name: str,
        phase: Phase,
        resource: Resource,
        seconds: float,
        formula: str,
        *,
        exposed: float | None = None,
        volume: float = 0.0,
        sources: tuple[str, ...],
    ) -> Term:
        return Term(
            name=name,
            phase=phase,
            resource=resource,
            layers=self.count,
            seconds=seconds * self.count,
            exposed=(seconds if exposed is None else exposed) * self.count,
            bytes=volume * self.count,
            formula=formula,
            sources=sources,
        )
