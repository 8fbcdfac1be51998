"""The cost of one kind of layer under `hp_cp`, term by term: what runs, and behind what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hp_tune.clusters.cluster import Cluster
from hp_tune.cost.cores import stretch, waits_for
from hp_tune.cost.described import described
from hp_tune.cost.halo import layer_config, layer_plan
from hp_tune.cost.moves import gathers_latent, layer_moves
from hp_tune.cost.pairs import work_shares
from hp_tune.cost.pricing import Move, Pricing
from hp_tune.cost.streamed import streamed_core
from hp_tune.cost.term import Phase, Piece, chained
from hp_tune.models.model import Attention, Model
from hp_tune.workload import Config, Workload

__all__ = ["LayerCost", "crossings"]


def crossings(config: Config) -> int:
    """Return how many tensors pass a boundary of a style in one phase: each is hooked and wrapped.

    q, k, v and the output of the module, twice where it is called twice; q, k and v once more where
    projections hand them off.
    """
    calls = 2 if config.balances else 1
    return 4 * calls * config.head_groups + 3 * (config.overlap and config.head_groups == 1)


class LayerCost:
    """The pieces of one kind of layer.

    ``config`` and ``plan`` are those of the layer's own style (`hp_tune.cost.halo.layer_config`).
    """

    def __init__(
        self,
        model: Model,
        layer: Attention,
        cluster: Cluster,
        workload: Workload,
        config: Config,
    ) -> None:
        self.layer, self.workload = layer, workload
        self.config = layer_config(layer, config)
        self.plan = plan = layer_plan(layer, config, workload.cp_size)
        self.price = Pricing(cluster, workload)
        self.heads = layer.num_heads // workload.tp_size
        self.kv_heads = max(1, layer.num_kv_heads // workload.tp_size)
        self.tokens = workload.batch * workload.seq_len // workload.cp_size
        self.hidden = model.hidden_size
        self.description = described(layer, plan, workload, self.config)
        self.moves = layer_moves(self.description, layer, plan, workload, self.config)
        self.gathers_latent = gathers_latent(layer, self.config)
        tile, fetched = self.price.attention_tile, self.config.halo > 0
        shares = work_shares(plan, layer, workload, tile, fetched=fetched)
        even = sum(shares) / len(shares) * stretch(cluster, workload.num_ranks)
        self.pairs = waits_for(cluster, shares, workload)
        self.imbalance = self.pairs / even

    def pieces(self, phase: Phase) -> list[Piece]:
        """Return the pieces of a phase in the order in which each resource runs them."""
        own = [move for move in self.moves if move.phase == phase]
        calls = sum(len(move.messages) or move.count for move in own)
        host = self.price.host(calls, crossings(self.config))
        return [host, *self._pieces(phase)]

    def _pieces(self, phase: Phase) -> list[Piece]:
        moves = [move for move in self.moves if move.phase == phase]
        if self.config.head_groups > 1:
            return self._grouped(phase, moves)
        if self.config.overlap:
            return self._overlapped(phase, moves)
        if self.config.kv_chunks > 1 and self.plan.colossal_degree > 1:
            return self._streamed(phase, moves)
        before, after = self._around_attention(phase, moves)
        ins, out = self._projections(phase), self._out(phase)
        first, last = ([*ins], [out]) if phase == "forward" else ([out], [*ins])
        return chained(
            [*first, *self._sent(before), self._attention(phase), *self._sent(after), *last]
        )

    def _streamed(self, phase: Phase, moves: Sequence[Move]) -> list[Piece]:
        """Part by part of K and V: each gather behind the attention to the part before it."""
        gathers = [move for move in moves if move.kind == "all_gather"]
        sums = [move for move in moves if move.kind == "reduce_scatter"]
        before, after = self._around_attention(
            phase, [move for move in moves if move not in (*gathers, *sums)]
        )
        ins, out = self._projections(phase), self._out(phase)
        first, last = ([*ins], [out]) if phase == "forward" else ([out], [*ins])
        found = chained([*first, *self._sent(before)])
        core = streamed_core(
            self.price,
            self._attention(phase),
            gathers,
            sums,
            runs=3 if phase == "forward" else self.plan.colossal_degree + 1,
            merged_bytes=4 * self.tokens * self.heads * self.layer.v_head_size,
            ready=(found[-1].id,),
        )
        through = tuple(piece.id for piece in core[-1 - len(sums) :])
        return [*found, *core, *chained([*self._sent(after), *last], through)]

    def _around_attention(
        self, phase: Phase, moves: Sequence[Move]
    ) -> tuple[list[Move], list[Move]]:
        """Split the moves into those before and after attention."""
        first = (
            [m for m in moves if m.what != "out"]
            if phase == "forward"
            else [m for m in moves if m.what == "out" or m.kind == "all_gather"]
        )
        return first, [move for move in moves if move not in first]

    def _sent(self, moves: Iterable[Move], suffix: str = "") -> list[Piece]:
        """Return each move with the copies around it."""
        found: list[Piece] = []
        for move in moves:
            found += [self.price.move(move, move.name + suffix), self._copies(move, suffix)]
        return found

    def _overlapped(self, phase: Phase, moves: Sequence[Move]) -> list[Piece]:
        """Each of q, k and v travels behind the projections; what is left is in a row.

        Forward, a tensor leaves when its projection is done. Backward mirrors it: all start
        together and each projection's gradients wait for their own.
        """
        behind = self._behind(phase, moves)
        before, after = self._around_attention(
            phase, [move for move in moves if behind.get(move.what) != move]
        )
        gemms = {piece.name.split()[0]: piece for piece in self._projections(phase)}
        order = self._order(phase)
        core = [*self._sent(before), self._attention(phase), *self._sent(after)]
        found: list[Piece] = []
        if phase == "forward":
            copies: list[Piece] = []
            for name in order:  # one resource runs them in this order
                needs = ("all_gather latent",) if self._waits_for_latent(name, behind) else ()
                found.append(gemms[name].waiting(needs))
                if name in behind:
                    move = behind[name]
                    found.append(self.price.move(move).waiting((gemms[name].id,)))
                    copies.append(self._copies(move).waiting((move.name,)))
            all_here = tuple(piece.id for piece in (*found, *copies))
            return [*found, *copies, *chained([*core, self._out(phase)], all_here)]
        found = chained([self._out(phase), *core])
        ready = (found[-1].id,)
        for name in order:
            waits: tuple[str, ...] = ready
            if name in behind:
                starts = ("k projection", "v projection") if name == "latent" else ready
                found.append(self.price.move(behind[name]).waiting(starts))
                found.append(self._copies(behind[name]).waiting((found[-1].id,)))
                waits = (found[-1].id,)
            elif name == "latent":
                waits = ("k projection", "v projection")
            found.append(gemms[name].waiting(waits))
        return found

    def _behind(self, phase: Phase, moves: Sequence[Move]) -> dict[str, Move]:
        """Return the moves that run behind projections, by what they carry."""
        kind = "all_to_all"
        if self.plan.ulysses_degree == 1:
            kind = "all_gather" if phase == "forward" else "reduce_scatter"
        names = ("latent", "q", "k", "v")
        return {move.what: move for move in moves if move.kind == kind and move.what in names}

    def _order(self, phase: Phase) -> tuple[str, ...]:
        """Return the projections in the order in which they run, or their gradients do."""
        order = ("k", "v", "q") if self.plan.ulysses_degree == 1 else ("q", "k", "v")
        if self.gathers_latent:
            order = ("q", "k", "v") if phase == "forward" else ("k", "v", "q")
        if self.layer.latent_size is None:
            return order
        return ("latent", *order) if phase == "forward" else (*order, "latent")

    def _waits_for_latent(self, name: str, behind: Mapping[str, Move]) -> bool:
        return self.gathers_latent and name in ("k", "v") and "latent" in behind

    def _grouped(self, phase: Phase, moves: Sequence[Move]) -> list[Piece]:
        """Group by group, in the order of `hp_cp.grouped`; backward mirrors it.

        An exchange starts one attention ahead, in Hybrid two, for its gather follows it. Outputs
        are unpacked when all are back.
        """
        count, hybrid = self.config.head_groups, self.plan.mode == "hybrid"
        ahead = 2 if hybrid else 1
        before, after = self._around_attention(phase, moves)
        enter = [move for move in before if not hybrid or move.kind == "all_to_all"]
        gather = [move for move in before if move not in enter]
        cores = [self._attention(phase, f" #{g}") for g in range(count)]
        ins, out = self._projections(phase), self._out(phase)
        first, last = (ins, [out]) if phase == "forward" else ([out], ins)
        found = chained(first)
        ready = (found[-1].id,)

        def sends(group: Sequence[Move], g: int, needs: tuple[str, ...]) -> list[Piece]:
            named = [(move, f"{move.name} #{g}") for move in group]
            return [self.price.move(move, key).waiting(needs) for move, key in named]

        def unpacks(group: Sequence[Move], g: int) -> list[Piece]:
            return [self._copies(move, f" #{g}").waiting((f"{move.name} #{g}",)) for move in group]

        def opened(g: int) -> list[Piece]:
            """Unpack a group's heads, and start the gather of its keys."""
            here = unpacks(enter, g)
            return [*here, *sends(gather, g, tuple(piece.id for piece in here) or ready)]

        for g in range(min(1 + ahead, count)):
            found += sends(enter, g, ready)
        for g, core in enumerate(cores):
            if g > 0 and g + ahead < count:
                found += sends(enter, g + ahead, (cores[g - 1].id,))
            found += opened(g) if g == 0 or not hybrid else []
            needs = [*unpacks(enter, g), *unpacks(gather, g)]
            found += unpacks(gather, g)
            found += opened(g + 1) if hybrid and g + 1 < count else []
            found.append(core.waiting(tuple(piece.id for piece in needs) or ready))
            found += sends(after, g, (core.id,))
        back = [piece for g in range(count) for piece in unpacks(after, g)]
        ends = tuple(piece.id for piece in (*back, cores[-1]))
        return [*found, *back, *chained(last, ends)]

    def _projections(self, phase: Phase) -> list[Piece]:
        times = 1 if phase == "forward" else 2
        tokens, whole = self.tokens, self.tokens * self.workload.cp_size
        rows = whole if self.gathers_latent else tokens
        found = [
            self.price.gemm(
                f"{name} projection", rows if name in ("k", "v") else tokens, macs, times
            )
            for name, macs in self._macs()
        ]
        return [piece for piece in found if piece.name != "out projection"]

    def _out(self, phase: Phase) -> Piece:
        times = 1 if phase == "forward" else 2
        return self.price.gemm("out projection", self.tokens, dict(self._macs())["out"], times)

    def _macs(self) -> list[tuple[str, int]]:
        """Return the multiply-adds per token of each projection."""
        layer, hidden, heads, kv = self.layer, self.hidden, self.heads, self.kv_heads
        gate = hidden * heads * layer.v_head_size if layer.output_gate else 0
        q = hidden * heads * layer.head_size
        if layer.q_latent_size is not None:
            q = layer.q_latent_size * (hidden + heads * layer.head_size)
        out = [("q", q), ("out", hidden * heads * layer.v_head_size + gate)]
        if layer.latent_size is None:
            sizes = (("k", layer.head_size), ("v", layer.v_head_size))
            return [out[0], *((name, hidden * kv * size) for name, size in sizes), out[1]]
        latent = layer.latent_size - layer.rope_size
        return [
            out[0],
            ("latent", hidden * layer.latent_size),
            ("k", latent * heads * (layer.head_size - layer.rope_size)),
            ("v", latent * heads * layer.v_head_size),
            out[1],
        ]

    def _attention(self, phase: Phase, suffix: str = "") -> Piece:
        calls = 2 if self.plan.load_balance else 1
        name = "attention" if calls == 1 else "attention (2 calls)"
        return self.price.attention(
            name,
            self.pairs,
            self.heads // self.plan.ulysses_degree // self.config.head_groups,
            self.layer.head_size + self.layer.v_head_size,
            rows=self.workload.seq_len // self.plan.colossal_degree // calls,
            calls=calls,
            times=1.0 if phase == "forward" else self.price.attention_backward,
            key=name + suffix,
        )

    def _copies(self, move: Move, suffix: str = "") -> Piece:
        """Price packs and unpacks around all-to-alls, and the relayout of what was gathered.

        A gather lands with the rank in front; where the sequence is the first dim that is in order.
        """
        workload = self.workload
        in_order = workload.layout in ("SBHD", "TND") or (
            workload.layout == "BSHD" and workload.batch == 1
        )
        copies = {
            "all_to_all": 3 if workload.layout == "BNSD" else 2,
            "all_gather": 0 if in_order else 1,
            "reduce_scatter": 0 if in_order else 1,
            "p2p": 2,
        }
        key = f"copies for {move.name}{suffix}"
        if move.messages:
            return self._halo_copies(move, key)
        return self.price.copies_of(move, copies[move.kind], key)

    def _halo_copies(self, move: Move, key: str) -> Piece:
        """Price what puts fetched rows beside a rank's own: k and v, and three for each message.

        A message is packed once and lands twice, as rows of k and of v; backward mirrors it.
        """
        moved = self.description.resident_kv_bytes + sum(move.messages)
        copies = 2 + 3 * len(move.messages)
        return self.price.copy(f"copies for {move.name}", moved / copies, copies, key)
