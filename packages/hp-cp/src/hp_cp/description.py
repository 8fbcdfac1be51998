"""Predict what a plan sends: kind, count and bytes of every collective, forward and backward.

Read `Plan.describe` for the way in. Bytes are those that leave one rank; its own share is not
counted. A group of one rank sends nothing and has no row. Nothing here knows a mode: the numbers
are read from the head table and the two group sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hp_cp.gathers import backward_parts
from hp_cp.halo import fetched_by, passed_rows
from hp_mesh.window import mirror_rank

if TYPE_CHECKING:
    from hp_cp.heads import HeadTable
    from hp_cp.plan import Mode, Plan

__all__ = ["Collective", "Description", "describe"]

Phase = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Collective:
    """One row of a description.

    Attributes:
        phase: ``"forward"`` or ``"backward"``.
        kind: ``"all_to_all"``, ``"all_gather"``, ``"reduce_scatter"`` or ``"p2p"``.
        axis: The group it runs on: ``"ulysses"``, ``"colossal"`` or ``"cp"`` (tail swaps where
            no heads are traded).
        count: How many calls carry these tensors.
        what: The tensors, comma separated.
        bytes_sent: Bytes that leave this rank in all of these calls.
    """

    phase: Phase
    kind: str
    axis: str
    count: int
    what: str
    bytes_sent: int


@dataclass(frozen=True, slots=True)
class Description:
    """What one forward and backward of one attention layer sends on one rank.

    Attributes:
        mode: The plan's mode.
        groups: For each axis, the CP ranks of this rank's group, in order.
        collectives: Rows in the order they are started.
        peak_extra_bytes: Upper bound of what the exchanges hold at one moment beside the layer's
            own inputs: send and receive buffers, the gathered K and V and one relayout of them.
        resident_kv_bytes: K and V as attention sees them, before any `HeadTable.kv_expand`; with
            ``kv_chunks`` those of the two parts that are in memory, with ``sliding_window`` the
            rows that this rank has and fetches.
        saved_kv_bytes: What the layer holds of K and V between forward and backward: as attention
            sees them, or with ``keep_kv=False`` or ``kv_chunks`` as they are before the gather.
    """

    mode: Mode
    groups: Mapping[str, tuple[int, ...]]
    collectives: tuple[Collective, ...]
    peak_extra_bytes: int
    resident_kv_bytes: int
    saved_kv_bytes: int

    def count(self, kind: str | None = None, phase: Phase | None = None) -> int:
        """Return the number of calls of ``kind`` in ``phase`` (None takes all)."""
        return sum(row.count for row in self._select(kind, phase))

    def bytes(self, kind: str | None = None, phase: Phase | None = None) -> int:
        """Return the bytes sent by ``kind`` in ``phase`` (None takes all)."""
        return sum(row.bytes_sent for row in self._select(kind, phase))

    def totals(self) -> dict[str, tuple[int, int]]:
        """Return ``{kind: (calls, bytes sent)}`` over forward and backward, sorted by kind."""
        kinds = sorted({row.kind for row in self.collectives})
        return {kind: (self.count(kind), self.bytes(kind)) for kind in kinds}

    def _select(self, kind: str | None, phase: Phase | None) -> list[Collective]:
        return [
            row
            for row in self.collectives
            if kind in (None, row.kind) and phase in (None, row.phase)
        ]


def describe(
    plan: Plan,
    heads: HeadTable,
    *,
    num_heads: int,
    local_length: int,
    kv_length: int,
    head_size: int,
    v_head_size: int,
    batch: int,
    element_size: int,
    rank: int,
    overlap: bool,
    repeat: int = 1,
    keep_kv: bool = True,
    kv_chunks: int = 1,
    sliding_window: int | None = None,
    sink_tokens: int = 0,
    kv_is_whole: bool = False,
) -> Description:
    """Return the description of ``plan`` for one rank; sizes as in `Plan.describe`.

    Heads are those of one group, of which there are ``repeat``; ``kv_length`` is the number of rows
    of K and V that a rank comes with.
    """
    u, c = plan.ulysses_degree, plan.colossal_degree
    parts = kv_chunks if c > 1 else 1
    parts_again = backward_parts(parts, local_length * u)
    co, ds = plan.coordinates(rank)
    token = batch * local_length * element_size  # one feature of this rank's tokens
    key = batch * kv_length * element_size  # one feature of its keys
    keys = key if kv_is_whole else key * plan.cp_size  # of all that attention sees
    local_heads = num_heads // u
    received = len(heads.kv_sent[ds])
    seen = received if heads.kv_expand is None else local_heads
    gathered = received if parts == 1 else seen  # what is streamed is as attention sees it
    fetches = sliding_window is not None and c > 1
    gathers = c > 1 and not fetches and not kv_is_whole
    sent_away = sum(len(kv) for d, kv in enumerate(heads.kv_sent) if d != ds)
    sizes = {"q": head_size, "k": head_size, "v": v_head_size, "out": v_head_size}

    # sequence -> heads: this rank's tokens of every other rank's heads leave
    away = {name: key * sent_away * sizes[name] for name in ("k", "v")}
    away |= {name: token * (num_heads - local_heads) * sizes[name] for name in ("q", "out")}
    # heads -> sequence: this rank's heads of every other rank's tokens leave
    back = {name: key * (u - 1) * received * sizes[name] for name in ("k", "v")}
    back |= {name: token * (u - 1) * local_heads * sizes[name] for name in ("q", "out")}
    # the Colossal group passes on what this rank holds after the exchange: u * kv_length rows
    passed_on = {name: key * u * gathered * sizes[name] * (c - 1) for name in ("k", "v")}
    held, sends, fetched = 0, list[int](), list[int]()  # rows of K and V here; rows per message
    if sliding_window is not None and fetches:
        facts = (local_length * u, sliding_window, sink_tokens)
        held = sum(stop - start for start, stop in fetched_by(co, *facts))
        sends, fetched = passed_rows(co, c, *facts)
    # what is fetched is as attention sees it; a row of it
    row = {name: batch * element_size * seen * sizes[name] for name in ("k", "v")}
    tail = {name: token * num_heads // 2 * sizes[name] for name in ("q", "out")}

    rows: list[Collective] = []

    def add(
        phase: Phase, kind: str, axis: str, names: str, volume: Mapping[str, int], times: int = 1
    ) -> None:
        volume_sent = repeat * sum(volume[n] for n in names.split(","))
        rows.append(Collective(phase, kind, axis, repeat * times, names, volume_sent))

    def add_messages(phase: Phase, messages: list[int]) -> None:
        if messages:  # k and v of one rank travel in one
            volume_sent = repeat * sum(messages) * (row["k"] + row["v"])
            count = repeat * len(messages)
            rows.append(Collective(phase, "p2p", "colossal", count, "k,v", volume_sent))

    exchanged = ("q",) if kv_is_whole else ("q", "k", "v") if overlap else ("q,k,v",)
    swaps = plan.load_balance and mirror_rank(co, c) != co
    swapped_over = "cp" if u == 1 else "colossal"
    if u > 1:
        for names in exchanged:
            add("forward", "all_to_all", "ulysses", names, away)
    if gathers:
        add("forward", "all_gather", "colossal", "k", passed_on, parts)
        add("forward", "all_gather", "colossal", "v", passed_on, parts)
    add_messages("forward", sends)
    if swaps:
        add("forward", "p2p", swapped_over, "q", tail)
        add("forward", "p2p", swapped_over, "out", tail)
    if u > 1:
        add("forward", "all_to_all", "ulysses", "out", back)
    if gathers and parts == 1 and not keep_kv:  # started when the output's gradient arrives
        add("backward", "all_gather", "colossal", "k", passed_on)
        add("backward", "all_gather", "colossal", "v", passed_on)
    if u > 1:
        add("backward", "all_to_all", "ulysses", "out", away)
    if swaps:
        add("backward", "p2p", swapped_over, "out", tail)
        add("backward", "p2p", swapped_over, "q", tail)
    if parts > 1:
        add("backward", "all_gather", "colossal", "k", passed_on, parts_again)
        add("backward", "all_gather", "colossal", "v", passed_on, parts_again)
    add_messages("backward", fetched)
    if gathers:
        times = parts_again if parts > 1 else 1
        add("backward", "reduce_scatter", "colossal", "k", passed_on, times)
        add("backward", "reduce_scatter", "colossal", "v", passed_on, times)
    if u > 1:
        for names in exchanged:
            add("backward", "all_to_all", "ulysses", names, back)

    feature = key * u * received  # one feature of the KV rows and heads after the exchange
    resident = keys * received * (head_size + v_head_size)
    saved = (keys * seen if keep_kv or kv_is_whole else feature) * (head_size + v_head_size)
    if parts > 1:
        rows_of_part = -(-local_length * u // parts)
        part = batch * rows_of_part * element_size * gathered * (head_size + v_head_size)
        resident, saved = 2 * c * part, key * u * gathered * (head_size + v_head_size)
    kv_sent = key * sum(map(len, heads.kv_sent)) * (head_size + v_head_size)
    exchange = 2 * token * num_heads * head_size + kv_sent + feature * (head_size + v_head_size)
    gather = resident + feature * c * max(head_size, v_head_size)
    if parts > 1:  # as they arrive they are attended; one slice is on its way, one comes back
        gather = resident + 2 * part
    if fetches:  # messages out and in beside the rows that they become
        resident = saved = held * (row["k"] + row["v"])
        gather = resident + (sum(sends) + sum(fetched)) * (row["k"] + row["v"])
    if u > 1:  # the exchanged q, k, v stay, and K and V are made dense before they are gathered
        gather += token * num_heads * head_size + 2 * feature * (head_size + v_head_size)
    if kv_is_whole:  # q is exchanged, and the heads of K and V that are needed are cut out
        exchange, gather = 2 * token * num_heads * head_size + resident, 0
    if swaps:  # tail halves of q and of the output, sent and received
        gather += 2 * tail["q"] + 2 * tail["out"]
    return Description(
        mode=plan.mode,
        groups={
            "ulysses": tuple(co * u + d for d in range(u)),
            "colossal": tuple(i * u + ds for i in range(c)),
            "cp": tuple(range(plan.cp_size)),
        },
        collectives=tuple(rows),
        peak_extra_bytes=max(exchange if u > 1 else 0, gather if c > 1 else 0),
        resident_kv_bytes=resident,  # of the group at work
        saved_kv_bytes=repeat * saved,
    )
