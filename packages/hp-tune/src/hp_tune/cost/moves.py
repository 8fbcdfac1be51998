"""The moves of one kind of layer: what its style sends, and over which ranks.

Latent attention (MLA) exchanges K and V like others, after their up-projection. That the latent
could be gathered instead is priced too, for no style does it yet: ``Config.gather="latent"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hp_cp.description import Collective, Description
from hp_cp.halo import fetched_by
from hp_cp.plan import Plan
from hp_tune.cost.described import latent_bytes
from hp_tune.cost.halo import busiest_messages
from hp_tune.cost.pricing import Move
from hp_tune.cost.term import Phase
from hp_tune.models.model import Attention
from hp_tune.workload import Config, Workload

__all__ = ["gathers_latent", "layer_moves"]


def gathers_latent(layer: Attention, config: Config) -> bool:
    """Return whether the latent of a layer is gathered in place of its K and V."""
    return config.gather == "latent" and layer.latent_size is not None


def layer_moves(
    description: Description, layer: Attention, plan: Plan, workload: Workload, config: Config
) -> list[Move]:
    """Return the moves of a layer, forward before backward, each phase in the order of the style.

    Args:
        description: What its busiest rank sends (`hp_tune.cost.described`).
        layer: The layer.
        plan: Of its style.
        workload: What is run.
        config: Of its style (`hp_tune.cost.halo.layer_config`).
    """
    moves = [_over(row, plan, workload) for row in description.collectives]
    if config.halo:
        moves = _both_ways(moves, _messages(description, layer, plan, workload), plan, workload)
    if gathers_latent(layer, config):
        moves = _with_latent(moves, latent_bytes(layer, workload), workload)
    return moves


def _over(row: Collective, plan: Plan, workload: Workload) -> Move:
    """Return the move that a collective is, with the ranks of its axis."""
    tp, u = workload.tp_size, plan.ulysses_degree
    size, stride = {
        "ulysses": (u, tp),
        "colossal": (plan.colossal_degree, u * tp),
        "cp": (plan.cp_size, tp),
    }[row.axis]
    return Move(row.phase, row.kind, row.what, row.count, row.bytes_sent, size, stride)


def _both_ways(
    moves: Sequence[Move], messages: tuple[int, ...], plan: Plan, workload: Workload
) -> list[Move]:
    """Return the moves with those of a window in both phases: all ranks wait for them.

    The rank that sends most may do so forward only, or send nothing of its own in backward::

        c = 2    forward    rank 0 sends      rank 1 fetches
                 backward   rank 0 fetches    rank 1 sends gradients
    """
    found: list[Move] = []
    phases: tuple[Phase, ...] = ("forward", "backward")
    for phase in phases:
        own = [
            replace(move, what="window of k,v", messages=messages) if move.kind == "p2p" else move
            for move in moves
            if move.phase == phase
        ]
        if messages and not any(move.messages for move in own):
            window = _over(Collective(phase, "p2p", "colossal", 0, "k,v", 0), plan, workload)
            at = len(own) - (plan.ulysses_degree > 1)  # before heads are traded back
            own.insert(at, replace(window, what="window of k,v", messages=messages))
        found += own
    return found


def _messages(
    description: Description, layer: Attention, plan: Plan, workload: Workload
) -> tuple[int, ...]:
    """Return the bytes of each message of the rank that is done last."""
    c = plan.colossal_degree
    assert layer.window is not None, "only sliding layers fetch a window"
    facts = (workload.seq_len // c, layer.window, layer.sink_tokens)
    held = sum(stop - start for start, stop in fetched_by(c - 1, *facts))
    row = description.resident_kv_bytes // held  # no rank holds more than the last
    return tuple(row * number for number in busiest_messages(c, *facts))


def _with_latent(moves: Sequence[Move], latent: int, workload: Workload) -> list[Move]:
    """Replace the gathers of K and V by one of the latent, and their reduce-scatters likewise."""
    others = [move for move in moves if move.kind not in ("all_gather", "reduce_scatter")]
    P = workload.cp_size
    if P == 1:
        return others
    found = [
        Move("forward", "all_gather", "latent", 1, latent * (P - 1), P, workload.tp_size),
        Move("backward", "reduce_scatter", "latent", 1, latent * (P - 1), P, workload.tp_size),
    ]
    return [*others, *found]
