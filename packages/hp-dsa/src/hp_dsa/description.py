"""Predict what one DSA layer sends: kind, count and bytes of each collective. No torch.

Bytes are those that leave one rank; its own share is not counted. Gradients are those of sparse
training: the language-model loss reaches the latent through attention, the indexer's own loss
reaches the index key, and nothing else reaches either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hp_mesh.window import mirror_rank

if TYPE_CHECKING:
    from hp_dsa.plan import DSAPlan

__all__ = ["Collective", "Description", "describe"]

Phase = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective.

    Attributes:
        phase: ``"forward"`` or ``"backward"``.
        kind: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"`` or ``"p2p"``.
        boundary: ``"indexer"``, ``"attention"`` or ``"loss"``.
        what: The tensors that travel in it, joined by ``|``.
        bytes_sent: Bytes that leave this rank.
    """

    phase: Phase
    kind: str
    boundary: str
    what: str
    bytes_sent: int


@dataclass(frozen=True, slots=True)
class Description:
    """What one layer sends on one rank, forward and backward.

    Attributes:
        collectives: In the order in which they start.
        bytes_per_token: Bytes of keys that are gathered for a token, forward.
        gathered_bytes: Gathered keys that live until backward.
        indexer_work: Work of the slowest rank's causal indexer over the mean.
    """

    collectives: tuple[Collective, ...]
    bytes_per_token: int
    gathered_bytes: int
    indexer_work: float

    def totals(self) -> Mapping[str, tuple[int, int]]:
        """Return ``{kind: (calls, bytes sent)}``, sorted by kind."""
        kinds = sorted({row.kind for row in self.collectives})
        rows = {k: [r.bytes_sent for r in self.collectives if r.kind == k] for k in kinds}
        return {kind: (len(sent), sum(sent)) for kind, sent in rows.items()}


def describe(
    plan: DSAPlan,
    *,
    seq_len: int,
    batch: int,
    element_size: int,
    latent: int,
    rope: int,
    index_dim: int,
    index_heads: int,
    topk: int,
    shared: bool,
    keep_keys: bool,
    rank: int,
) -> Description:
    """See `DSAPlan.describe`."""
    P = plan.cp_size
    tokens = batch * seq_len // P
    kv, index = "key|key_rope" if rope else "key", "key_index"
    width = {kv: (latent + rope) * element_size, index: index_dim * element_size}
    gathers = [("indexer", index), ("attention", kv)]
    if not shared:
        gathers += [("loss", kv), ("loss", index)]
    rows: list[Collective] = []

    def add(phase: Phase, kind: str, boundary: str, what: str, sent: int) -> None:
        if P > 1:
            rows.append(Collective(phase, kind, boundary, what, sent))

    def move(phase: Phase, kind: str, boundary: str, what: str) -> None:
        add(phase, kind, boundary, what, (P - 1) * tokens * width[what])

    for boundary, what in gathers:
        if boundary == "indexer" and plan.swaps_tails and mirror_rank(rank, P) != rank:
            half = tokens // 2
            query = half * index_heads * index_dim * element_size
            add("forward", "p2p", boundary, "query", query)
            add("forward", "p2p", boundary, "weights", half * index_heads * element_size)
            move("forward", "all_gather", boundary, what)
            add("forward", "p2p", boundary, "indices", half * topk * 4)
            continue
        move("forward", "all_gather", boundary, what)
    scalar = 2 * max(element_size, 4) * (P - 1) // P
    add("forward", "all_reduce", "loss", "loss", scalar)
    move("backward", "reduce_scatter", "loss", index)
    if not keep_keys:
        move("backward", "all_gather", "attention", kv)
    move("backward", "reduce_scatter", "attention", kv)
    return Description(
        collectives=tuple(rows),
        bytes_per_token=sum(width[what] for _, what in gathers),
        gathered_bytes=0 if not keep_keys else batch * seq_len * width[kv],
        indexer_work=_slowest_over_mean(plan),
    )


def _slowest_over_mean(plan: DSAPlan) -> float:
    P = plan.cp_size
    length = 2 * P * 1024  # long: the diagonal does not count
    work = [sum((b - a) * (a + b) for a, b in plan.rows(rank, length)) for rank in range(P)]
    return max(work) * P / sum(work)
