"""What a layer sends and holds, from the plan of its style."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from hp_cp.description import Description
from hp_cp.plan import Plan
from hp_tune.cost.halo import busiest_ranks
from hp_tune.models.model import Attention
from hp_tune.workload import Config, Workload

__all__ = ["described", "latent_bytes"]


def described(layer: Attention, plan: Plan, workload: Workload, config: Config) -> Description:
    """Return what the rank that sends most sends in one layer, and the most that any rank holds.

    Ranks differ where neighbours share KV heads, and in the keys of a window.

    Args:
        layer: The layer.
        plan: Of its style.
        workload: What is run.
        config: Of its style (`hp_tune.cost.halo.layer_config`).
    """
    tp = workload.tp_size
    heads = (layer.num_heads // tp, max(1, layer.num_kv_heads // tp))
    window = (layer.window, layer.sink_tokens) if config.halo else (None, 0)
    return _busiest(plan, heads, workload, (layer.head_size, layer.v_head_size), config, window)


@lru_cache(maxsize=4096)
def _busiest(
    plan: Plan,
    heads: tuple[int, int],
    workload: Workload,
    sizes: tuple[int, int],
    config: Config,
    window: tuple[int | None, int],
) -> Description:
    """Return `described`; kept, because a search asks again and again with other clusters."""
    num_heads, kv_heads = heads
    u, (sliding_window, sinks) = plan.ulysses_degree, window
    groups: tuple[int, ...] = (0,)
    if sliding_window is not None:
        shard = workload.seq_len // plan.colossal_degree
        groups = busiest_ranks(plan.colossal_degree, shard, sliding_window, sinks)
    found = [
        plan.describe(
            num_heads=num_heads,
            num_kv_heads=kv_heads,
            seq_len=workload.seq_len,
            head_size=sizes[0],
            v_head_size=sizes[1],
            batch=workload.batch,
            element_size=workload.element_size,
            rank=group * u + rank,
            overlap=config.overlap and config.head_groups == 1,
            head_groups=config.head_groups,
            keep_kv=config.keep_kv,
            kv_chunks=config.kv_chunks,
            sliding_window=sliding_window,
            sink_tokens=sinks,
        )
        for group in groups
        for rank in range(u if kv_heads % u else 1)
    ]
    most = max(found, key=lambda description: description.bytes())
    return replace(
        most,
        peak_extra_bytes=max(one.peak_extra_bytes for one in found),
        resident_kv_bytes=max(one.resident_kv_bytes for one in found),
        saved_kv_bytes=max(one.saved_kv_bytes for one in found),
    )


def latent_bytes(layer: Attention, workload: Workload) -> int:
    """Return the bytes of one rank's latents."""
    tokens = workload.batch * workload.seq_len // workload.cp_size
    return tokens * (layer.latent_size or 0) * workload.element_size
