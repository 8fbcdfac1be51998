"""The same question at other sequence lengths: where does another configuration take over?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hp_tune.searching.engine import NothingValidError, Result, Settings, search
from hp_tune.steps import Step, no_step

__all__ = ["AtLength", "default_lengths", "search_lengths"]

SHORTEST = 1024


@dataclass(frozen=True, slots=True)
class AtLength:
    """A search at another length; ``result`` has an empty ranking where nothing is valid."""

    seq_len: int
    result: Result


def default_lengths(result: Result) -> tuple[int, ...]:
    """Return an eighth to four times the length of ``result``, each valid for every degree."""
    step = 2 * result.workload.cp_size
    around = [result.workload.seq_len * 2**k // 8 for k in range(6)]
    found = {-(-length // step) * step for length in around if length >= SHORTEST}
    return tuple(sorted(found | {result.workload.seq_len}))


def search_lengths(
    result: Result, lengths: Sequence[int], step: Step = no_step
) -> tuple[AtLength, ...]:
    """Return what each length comes to, with activations recomputed where they must be.

    The same part of the space is searched, by prediction.
    """
    how = replace(result.how or Settings(), mode="analytic", recompute="auto", kernels=None)
    found = []
    for done, length in enumerate(lengths):
        step(f"sequence {length}", done, len(lengths))
        if length == result.workload.seq_len:
            found.append(AtLength(length, result))
            continue
        workload = result.workload.model_copy(update={"seq_len": length})
        try:
            other = search(result.model, result.cluster, workload, settings=how)
        except NothingValidError as error:
            other = error.result
        found.append(AtLength(length, other))
    return tuple(found)
