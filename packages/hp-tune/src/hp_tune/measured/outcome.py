"""From what a job left to what is said of each of its configurations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from hp_tune.measured.result import Measured, Outcome
from hp_tune.measured.statistics import interval
from hp_tune.torchrun import FailedRank, Job
from hp_tune.torchrun.job import tail

__all__ = ["failure", "measured"]

OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|bad_alloc|alloc failed", re.I
)
FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$')
OWN_CODE = "hp_tune/torchrun/"
SIGKILL = -9


def measured(found: Mapping[str, Any], job: Job) -> Measured:
    """Return what a job says of a configuration that it finished."""
    sent = found.get("traffic") or {}
    said = Measured(
        outcome=found["outcome"],
        reason=found.get("reason", ""),
        collectives={kind: calls for kind, (calls, _) in sent.items()},
        bytes_sent={kind: size for kind, (_, size) in sent.items()},
        memory_bytes=found.get("memory_bytes", 0),
        checked_len=found.get("checked_len", 0),
        folder=job.folder,
    )
    samples = found.get("samples_ms")
    if said.outcome != "ok" or not samples:
        return said
    forward = median(found["forward_ms"])
    backward = [total - ahead for total, ahead in zip(samples, found["forward_ms"], strict=True)]
    return replace(
        said,
        samples_ms=tuple(samples),
        forward_ms=forward,
        backward_ms=median(backward),
        median_ms=median(samples),
        interval_ms=interval(samples),
    )


def failure(job: Job, timeout: float) -> Measured:
    """Return what is said of the configuration that was at work when a job failed."""
    outcome, reason = _failure(job, timeout)
    details = job.failed_ranks[0].traceback if job.failed_ranks else ""
    stage = (job.answer or {}).get("stage", "start")
    return Measured(
        outcome=outcome,
        reason=f"{reason} (stage: {stage})",
        details=details or job.stderr_tail,
        folder=job.folder,
    )


def _failure(job: Job, timeout: float) -> tuple[Outcome, str]:
    if job.timed_out:
        return "timeout", f"the job had not ended after {timeout:g} s{_where_ranks_stood(job)}"
    for rank in job.failed_ranks:
        if _is_out_of_memory(rank):
            return "oom", str(rank)
    if job.failed_ranks:
        first = job.failed_ranks[0]
        if first.exit_code == SIGKILL and not first.error:
            # nobody here sends it: the system does, to whoever takes its last memory
            return "oom", f"{first}, as the system does when memory runs out"
        return "crash", str(first)
    last = job.stderr_tail.splitlines()[-1:] or ["it left no word"]
    return "crash", f"torchrun ended with exit code {job.exit_code}: {last[0]}"


def _is_out_of_memory(rank: FailedRank) -> bool:
    named = rank.error in ("OutOfMemoryError", "MemoryError")
    return named or OUT_OF_MEMORY.search(rank.message) is not None


def _where_ranks_stood(job: Job) -> str:
    """Return the innermost frame of each rank, which it wrote before it was ended."""
    stood = []
    for path in sorted(job.folder.glob("rank*.err")):
        _, _, stack = tail(path).rpartition("(most recent call first):")
        frames = [match for match in map(FRAME.match, stack.splitlines()) if match]
        if frames and OWN_CODE not in frames[0]["file"]:
            file = frames[0]["file"].rpartition("/")[2]
            stood.append(f"{path.stem} in {frames[0]['name']} ({file}:{frames[0]['line']})")
    return "; " + ", ".join(stood) if stood else ""
