"""From results of searches to the plan that a training script loads, in buckets of lengths."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hp_tune.cost.memory import GIB
from hp_tune.plans.plan import (
    Entry,
    FailedConfig,
    MeasuredTime,
    PlanFile,
    PricedConfig,
    RejectedConfig,
    When,
    seal,
)
from hp_tune.searching.ranking import Ranked, six_digits

if TYPE_CHECKING:
    from hp_tune.measured.result import Measured
    from hp_tune.models.model import Model
    from hp_tune.searching.result import Result

__all__ = ["COST_MODEL", "make_plan"]

COST_MODEL = 5
"""Raised when a change of the formulas makes old numbers incomparable."""


def make_plan(results: Sequence[Result], made_by: Mapping[str, Any]) -> PlanFile:
    """Return the plan of searches that differ in sequence length only.

    Neighbouring lengths with the same winner are one bucket; buckets meet at the geometric mean of
    the lengths beside the border.

    Args:
        results: One per length, each with a ranking; at least one.
        made_by: How they were searched.
    """
    found = sorted(results, key=lambda result: result.workload.seq_len)
    buckets: list[list[Result]] = []
    for result in found:
        if buckets and _winner(buckets[-1][-1]) == _winner(result):
            buckets[-1].append(result)
        else:
            buckets.append([result])
    lengths = [[result.workload.seq_len for result in bucket] for bucket in buckets]
    borders = [math.isqrt(before[-1] * after[0]) for before, after in itertools.pairwise(lengths)]
    lows = [-(-lengths[0][0] // 2), *(border + 1 for border in borders)]
    highs = [*borders, 2 * lengths[-1][-1]]
    first = found[0]
    return seal(
        PlanFile(
            cost_model=COST_MODEL,
            model={
                "name": first.model.name,
                "model_type": first.model.model_type,
                "digest": first.model.digest,
                "qk_norm": first.model.qk_norm,
            },
            cluster={"name": first.cluster.name, "digest": first.cluster.digest},
            workload=first.workload,
            made_by=dict(made_by),
            notes=tuple(dict.fromkeys(note for result in found for note in result.notes)),
            entries=tuple(
                _entry(bucket, (low, high))
                for bucket, low, high in zip(buckets, lows, highs, strict=True)
            ),
        )
    )


def _winner(result: Result) -> Any:
    return result.ranking[0].config, result.workload.recompute


def _entry(bucket: Sequence[Result], seq: tuple[int, int]) -> Entry:
    result = max(bucket, key=lambda one: (one.weight, one.workload.seq_len))
    workload, best = result.workload, result.ranking[0].ms
    priced = [_priced(ranked, best, workload.cp_size) for ranked in result.ranking]
    return Entry(
        when=When(
            world_size=workload.num_ranks,
            cp_size=workload.cp_size,
            tp_size=workload.tp_size,
            seq_len=workload.seq_len,
            seq=seq,
            lengths=tuple(one.workload.seq_len for one in bucket),
            weight=six_digits(sum(one.weight for one in bucket)),
        ),
        best=priced[0],
        layout=workload.layout,
        styles="hp_dsa" if any(layer.is_sparse for layer in result.model.layers) else "hp_cp",
        windows=_windows(result.model),
        recompute=workload.recompute,
        margin=None if result.margin is None else six_digits(result.margin),
        alternatives=tuple(priced[1:4]),
        rejected=tuple(
            RejectedConfig(
                config=config,
                rule=rejection.rule,
                message=rejection.message,
                numbers=rejection.numbers,
                hint=rejection.hint,
            )
            for config, rejection in result.rejected
        ),
        front=tuple(_priced(ranked, best, workload.cp_size) for ranked in result.front),
        failed=tuple(
            FailedConfig(
                config=failed.config,
                outcome=failed.measured.outcome,
                reason=failed.measured.reason,
            )
            for failed in result.failed
        ),
        kernels={name: dict(one) for name, one in (result.kernels or {}).items()},
        outranked=len(result.outranked),
    )


def _windows(model: Model) -> tuple[tuple[int, int] | None, ...]:
    """Return what is seen in each kind of layer that a style is for, in order."""
    layers = [layer for layer, _ in model.layer_groups if layer.exchanges]
    found = ((layer.window or 0, layer.sink_tokens) if layer.slides else None for layer in layers)
    return tuple(dict.fromkeys(found))


def _priced(ranked: Ranked, best: float, cp_size: int) -> PricedConfig:
    found, measured = ranked.prediction, ranked.measured
    return PricedConfig(
        config=ranked.config,
        mode=ranked.config.label(cp_size),
        forward_ms=six_digits(found.forward * 1e3),
        backward_ms=six_digits(found.backward * 1e3),
        exposed_comm_ms=six_digits(found.exposed_comm * 1e3),
        imbalance=six_digits(found.imbalance),
        bytes_sent=found.bytes_sent,
        memory_GiB=six_digits(ranked.memory.total / GIB),
        vs_best=six_digits(ranked.ms / best),
        source="analytic" if measured is None else "measured",
        measured=None if measured is None else _measured(measured, ranked.in_finals),
    )


def _measured(found: Measured, in_finals: bool) -> MeasuredTime:
    low, high = found.interval_ms
    return MeasuredTime(
        median_ms=six_digits(found.median_ms),
        interval_ms=(six_digits(low), six_digits(high)),
        forward_ms=six_digits(found.forward_ms),
        backward_ms=six_digits(found.backward_ms),
        samples_ms=tuple(six_digits(sample) for sample in found.samples_ms),
        memory_GiB=six_digits(found.memory_bytes / GIB),
        in_finals=in_finals,
    )
