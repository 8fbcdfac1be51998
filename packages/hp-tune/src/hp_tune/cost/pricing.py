"""What a matrix product, a copy and a collective cost on a cluster: the pieces of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from hp_tune.clusters.cluster import Cluster
from hp_tune.clusters.neighbours import fetch
from hp_tune.clusters.network import Group, transfer
from hp_tune.cost.cores import stretch
from hp_tune.cost.term import Phase, Piece
from hp_tune.workload import Workload

__all__ = ["Move", "Pricing"]

PEAK, LAUNCH = "device.peak_TFLOPS", "device.launch_us"
MOST_CPU = 0.9
"""A kernel beside a collective keeps at least a tenth of the cores: the system shares them out."""


@dataclass(frozen=True, slots=True)
class Move:
    """Collectives of one kind: ``count`` calls that send ``bytes_sent`` from a rank in all.

    Attributes:
        size, stride: The group, as in `hp_tune.clusters.network.Group`.
        messages: Bytes of each message of the rank that is done last, where ranks fetch rows of
            each other (`hp_tune.clusters.neighbours.fetch`): together they are one piece of work.
    """

    phase: Phase
    kind: str
    what: str
    count: int
    bytes_sent: int
    size: int
    stride: int
    messages: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """What the term is called."""
        return f"{self.kind} {self.what}"


class Pricing:
    """Prices of one workload on one cluster."""

    def __init__(self, cluster: Cluster, workload: Workload) -> None:
        self.cluster, self.workload = cluster, workload
        device = cluster.device
        self.peak = device.peak_TFLOPS[workload.dtype].value * 1e12
        # all ranks are as busy with these; attention is not so even and brings its own share
        share = self.share = stretch(cluster, workload.num_ranks)
        self.gemm_rate = self.peak * device.gemm_efficiency.value / share
        self.copy_rate = device.memory_GBps.value * 1e9 * device.memory_efficiency.value / share
        backward = device.attention_backward
        self.attention_backward = 2.5 if backward is None else backward.value
        tile = device.attention_tile
        self.attention_tile = 1 if tile is None else int(tile.value)
        self.launch = device.launch_us.value * 1e-6 * share

    def host(self, moves: int, tensors: int) -> Piece:
        """Price hooks, autograd and wrapping in one phase of a layer, where cores are the device.

        Args:
            moves: Collectives that are started.
            tensors: Tensors that pass a boundary (`hp_tune.cost.layer.crossings`).
        """
        device = self.cluster.device
        numbers = (device.host_layer_us, device.host_exchange_us, device.host_tensor_us)
        layer, move, tensor = (0.0 if n is None else n.value for n in numbers)
        return Piece(
            "host: hooks, autograd",
            "compute",
            (layer / 2 + moves * move + tensors * tensor) * 1e-6 * self.share,
            f"{layer:g} us / 2 + {moves} x {move:g} us + {tensors} x {tensor:g} us",
            ("device.host_layer_us", "device.host_exchange_us", "device.host_tensor_us"),
            {"collectives": moves, "tensors": tensors},
        )

    def gemm(self, name: str, tokens: float, macs: float, times: int, key: str = "") -> Piece:
        """Price ``times`` products of ``tokens`` rows with ``macs`` multiply-adds per row."""
        return Piece(
            name,
            "compute",
            times * 2 * tokens * macs / self.gemm_rate,
            f"{times} x 2 x {tokens:.6g} tokens x {macs:.6g} / GEMM rate",
            (PEAK, "device.gemm_efficiency"),
            {"tokens": tokens, "macs_per_token": macs, "FLOPS": self.gemm_rate, "times": times},
            share_of_peak=self.gemm_rate / self.peak,
            key=key,
        )

    def attention(
        self,
        name: str,
        pairs: float,
        heads: int,
        size: int,
        *,
        rows: float,
        calls: int = 1,
        times: float = 1.0,
        key: str = "",
    ) -> Piece:
        """Price kernels that take ``size`` multiply-adds per head and (query, key) pair.

        Args:
            pairs: Of one sequence, on the slowest rank (`hp_tune.cost.cores.waits_for`).
            heads: Heads of one call.
            rows: Query rows of one call and sequence: few of them do not fill the device.
        """
        device, batch = self.cluster.device, self.workload.batch
        busy = rows * heads * batch
        fill = busy / (busy + device.attention_saturation.value)
        share = device.attention_efficiency.value * fill
        rate = self.peak * share
        flops = 2 * batch * heads * size * pairs
        return Piece(
            name,
            "compute",
            times * flops / rate + calls * self.launch,
            f"{times} x 2 x {batch} x {heads} heads x {size} x {pairs:.6g} pairs "
            f"/ ({rate / 1e12:.4g} TFLOPS) + {calls} x launch",
            (PEAK, "device.attention_efficiency", "device.attention_saturation", LAUNCH),
            {"pairs": pairs, "heads": heads, "size": size, "fill": fill, "FLOPS": rate,
             "times": times},
            share_of_peak=share,
            key=key,
        )  # fmt: skip

    def copy(self, name: str, size: float, copies: int, key: str = "") -> Piece:
        """Price ``copies`` that read and write ``size`` bytes each."""
        moved = 2 * size * copies
        return Piece(
            name,
            "memory",
            copies * self.launch + moved / self.copy_rate,
            f"{copies} x (launch + 2 x {size:.6g} B / {self.copy_rate / 1e9:.4g} GB/s)",
            ("device.memory_GBps", "device.memory_efficiency", LAUNCH),
            {"bytes": size, "copies": copies, "GBps": self.copy_rate / 1e9},
            bytes=moved,
            share_of_peak=self.cluster.device.memory_efficiency.value,
            key=key,
        )

    def move(self, move: Move, key: str = "") -> Piece:
        """Price one call of a collective, or all messages of a fetch."""
        group = Group(move.size, move.stride, self.workload.num_ranks)
        if move.messages:
            sent: float = sum(move.messages)
            found = fetch(self.cluster, group, move.messages)
        else:
            sent = move.bytes_sent / move.count
            found = transfer(self.cluster, move.kind, group, sent)
        return Piece(
            move.name,
            "network",
            found.seconds,
            found.formula or "nothing is sent",
            found.sources,
            {"bytes_sent": sent, "tier_bytes": found.tier_bytes, "GBps": found.GBps,
             "ranks": move.size, "stride": move.stride},
            bytes=sent,
            share_of_peak=found.share_of_peak,
            key=key,
            slows=None if found.cpu is None else 1 / (1 - min(found.cpu, MOST_CPU)) - 1,
        )  # fmt: skip

    def copies_of(self, move: Move, copies: int, key: str = "") -> Piece:
        """Price packs and unpacks of one call: every rank's part counts, its own included."""
        sent = move.bytes_sent / move.count
        whole = sent if move.kind == "p2p" else sent * move.size / (move.size - 1)
        return self.copy(f"copies for {move.name}", whole, copies, key)
