"""The cost of a DSA layer under `hp_dsa`: indexer, top-k, sparse core, the indexer's loss.

Queries stay where they are; index keys and latents are gathered. Attention runs in the absorbed
form: each head's query meets the latent itself, so that K and V are one and have one head.
"""

from __future__ import annotations

from collections.abc import Sequence

from hp_dsa.plan import DSAPlan, make_plan
from hp_mesh.window import Range, contiguous_rows
from hp_tune.clusters.cluster import Cluster
from hp_tune.cost.cores import stretch, waits_for
from hp_tune.cost.pairs import seen_pairs
from hp_tune.cost.pricing import LAUNCH, Move, Pricing
from hp_tune.cost.term import Phase, Piece, chained
from hp_tune.models.model import Attention, Model
from hp_tune.workload import Config, Workload

__all__ = ["SparseCost", "dsa_plan"]

TOPK_PASSES = 2
"""Times that scores are read or written by a selection; a radix select takes about two."""


def dsa_plan(workload: Workload, config: Config) -> DSAPlan:
    """Return the plan of `hp_dsa` that a configuration stands for."""
    layout = "TND" if workload.layout == "TND" else "BSND"
    return make_plan(
        workload.cp_size,
        layout=layout,
        load_balance=config.load_balance,
        order="contiguous",
        where="search",
    )


class SparseCost:
    """The pieces of one kind of DSA layer."""

    def __init__(
        self,
        model: Model,
        layer: Attention,
        cluster: Cluster,
        workload: Workload,
        config: Config,
    ) -> None:
        self.layer, self.workload, self.config = layer, workload, config
        self.price = Pricing(cluster, workload)
        self.plan = dsa_plan(workload, config)
        self.heads = layer.num_heads // workload.tp_size
        self.index_heads = layer.index_heads or 1
        self.index_size = layer.index_head_size or 1
        self.latent = (layer.latent_size or 0) - layer.rope_size
        self.tokens = workload.batch * workload.seq_len // workload.cp_size
        self.rows = workload.seq_len // workload.cp_size
        self.hidden = model.hidden_size
        S, P = workload.seq_len, workload.cp_size
        self.description = self.plan.describe(
            seq_len=S,
            batch=workload.batch,
            element_size=workload.element_size,
            latent=self.latent,
            rope=layer.rope_size,
            index_dim=self.index_size,
            index_heads=self.index_heads,
            topk=layer.index_topk or 1,
            keep_keys=config.keep_kv,
        )
        self.moves = [
            Move(row.phase, row.kind, row.what, 1, row.bytes_sent, P, workload.tp_size)
            for row in self.description.collectives
            if layer.has_indexer or row.boundary == "attention"
        ]
        index = [self._pairs(self.plan.rows(rank, S), None) for rank in range(P)]
        core = [self._pairs((contiguous_rows(rank, P, S),), layer.index_topk) for rank in range(P)]
        self.index_pairs, index_share = _slowest(index, cluster, workload)
        self.core_pairs, core_share = _slowest(core, cluster, workload)
        self.imbalance = max(index_share, core_share) if layer.has_indexer else core_share

    def _pairs(self, ranges: Sequence[Range], window: int | None) -> int:
        """Return the pairs of rows; a selection sees at most ``window`` keys, wherever they are."""
        return sum(seen_pairs(rows, self.layer, self.workload, window=window) for rows in ranges)

    def pieces(self, phase: Phase) -> list[Piece]:
        """Return the pieces of a phase in the order in which each resource runs them."""
        moves = {move.what: move for move in self.moves if move.phase == phase}
        if phase == "forward":
            return self._forward(moves)
        sends = [move for move in self.moves if move.phase == phase]
        loss = [m for m in sends if m.what == "key_index"]
        rest = [m for m in sends if m.what != "key_index"]
        refetch = [m for m in rest if m.kind == "all_gather"]
        back = [m for m in rest if m.kind != "all_gather"]
        gemms = self._projections(2)
        core = [
            gemms["out"], gemms["absorb"], *map(self.price.move, refetch), self._core(2.5),
        ]  # fmt: skip
        index = [self._loss(2.0), *map(self.price.move, loss)] if self.layer.has_indexer else []
        names = [n for n in ("index_key", "index_query", "latent", "q") if n in gemms]
        if not self.config.overlap:
            tail = [*map(self.price.move, back), *(gemms[name] for name in names)]
            return chained([*index, *core, *tail])
        found = chained([*index[:1], *core])  # the index key's sum travels behind attention
        if loss and index:
            found.insert(1, index[1].waiting((index[0].id,)))
        ready = (found[-1].id,)
        found += [piece.waiting(ready) for piece in map(self.price.move, back)]
        sent = tuple(move.name for move in back)
        waits = {"index_key": tuple(m.name for m in loss), "latent": sent}
        for name in ("index_query", "q", "index_key", "latent"):
            if name in gemms:
                found.append(gemms[name].waiting(waits.get(name, ready) or ready))
        return found

    def _forward(self, moves: dict[str, Move]) -> list[Piece]:
        gemms = self._projections(1)
        kv = next((what for what in moves if what.startswith("key|") or what == "key"), None)
        swaps = [moves[what] for what in ("query", "weights") if what in moves]
        index: list[Piece] = []
        if self.layer.has_indexer:
            index = [*map(self.price.move, swaps), self._indexer(), self._topk()]
            index += [self.price.move(moves["indices"])] if "indices" in moves else []
        late = [gemms["absorb"], gemms["out"]]
        loss = [self._loss(1.0)] if self.layer.has_indexer else []
        loss += [self.price.move(moves["loss"])] if loss and "loss" in moves else []
        gathers = [
            (name, self.price.move(moves[what]))
            for name, what in (("index_key", "key_index"), ("latent", kv))
            if what in moves and what is not None
        ]
        early = [
            gemms[name] for name in ("index_key", "latent", "q", "index_query") if name in gemms
        ]
        if not self.config.overlap:
            sent = [piece for _, piece in gathers]
            return chained([*early, *sent, *index, self._core(1.0), *loss, *late])
        found: list[Piece] = []
        for piece in early:
            found.append(piece)
            found += [
                sent.waiting((piece.id,))
                for name, sent in gathers
                if gemms[name].name == piece.name
            ]
        here = [piece.id for piece in early]
        keys = [sent.id for name, sent in gathers if name == "index_key"]
        found += chained(index, (*here, *keys))
        last = [found[-1].id] if index else here
        latents = [sent.id for name, sent in gathers if name == "latent"]
        return [*found, *chained([self._core(1.0), *loss, *late], (*last, *latents))]

    def _projections(self, times: int) -> dict[str, Piece]:
        layer, hidden, heads = self.layer, self.hidden, self.heads
        nope = layer.head_size - layer.rope_size
        source = layer.q_latent_size or hidden
        q = source * heads * layer.head_size + (hidden * source if layer.q_latent_size else 0)
        macs = {
            "q": q,
            "latent": hidden * (self.latent + layer.rope_size),
            "absorb": heads * self.latent * (nope + layer.v_head_size),
            "out": hidden * heads * layer.v_head_size,
        }
        if layer.has_indexer:
            macs["index_key"] = hidden * self.index_size
            macs["index_query"] = source * self.index_heads * self.index_size
            macs["index_query"] += hidden * self.index_heads
        names = {"index_key": "index key projection", "index_query": "index query projection",
                 "absorb": "absorbed K and V projections"}  # fmt: skip
        return {
            key: self.price.gemm(names.get(key, f"{key} projection"), self.tokens, value, times)
            for key, value in macs.items()
        }

    def _indexer(self) -> Piece:
        calls = 2 if self.plan.load_balance else 1
        return self.price.attention(
            "indexer scores",
            self.index_pairs,
            self.index_heads,
            self.index_size,
            rows=self.rows // calls,
            calls=calls,
        )

    def _topk(self) -> Piece:
        """Price the selection: fp32 scores pass through memory."""
        scores = 4.0 * self.workload.batch * self.index_pairs
        moved = TOPK_PASSES * scores
        return Piece(
            "top-k",
            "memory",
            self.price.launch + moved / self.price.copy_rate,
            f"launch + {TOPK_PASSES} x {scores:.6g} B / {self.price.copy_rate / 1e9:.4g} GB/s",
            ("device.memory_GBps", "device.memory_efficiency", LAUNCH),
            {"scores_bytes": scores, "passes": TOPK_PASSES},
            bytes=moved,
            share_of_peak=self.price.cluster.device.memory_efficiency.value,
        )

    def _core(self, times: float) -> Piece:
        size = 2 * self.latent + self.layer.rope_size
        return self.price.attention(
            "sparse attention", self.core_pairs, self.heads, size, rows=self.rows, times=times
        )

    def _loss(self, times: float) -> Piece:
        """Price the indexer's loss on the selected keys: attention's weights and index scores."""
        target = self.heads * (self.latent + self.layer.rope_size)
        scores = self.index_heads * self.index_size
        piece = self.price.attention(
            "indexer loss", self.core_pairs, 1, target + scores, rows=self.rows, times=times
        )
        # the device is as full as with all heads: rows count once for each
        full = self.price.attention(
            "indexer loss", self.core_pairs, self.heads, 1, rows=self.rows
        ).share_of_peak
        assert full and piece.share_of_peak, "attention has a share of the peak"
        return piece._replace(
            seconds=(piece.seconds - self.price.launch) * piece.share_of_peak / full
            + self.price.launch,
            share_of_peak=full,
        )


def _slowest(work: Sequence[int], cluster: Cluster, workload: Workload) -> tuple[float, float]:
    """Return the work that decides and its ratio to the mean."""
    even = sum(work) / len(work) * stretch(cluster, workload.num_ranks)
    found = waits_for(cluster, work, workload)
    return found, found / even if even else 1.0
