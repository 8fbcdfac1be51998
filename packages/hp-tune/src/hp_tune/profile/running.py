"""Start the ranks that measure, and write what they found."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_tune.clusters.cluster import Cluster
from hp_tune.clusters.cluster_files import read_cluster
from hp_tune.errors import AllFailedError, UsageError
from hp_tune.output import require_place
from hp_tune.profile.overlay import describe
from hp_tune.profile.writing import as_said_in, write_cluster
from hp_tune.steps import Step
from hp_tune.torchrun import Backend, Launcher
from hp_tune.workload import Dtype

__all__ = ["Effort", "profile"]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured.

    Attributes:
        rounds: Timed rounds of everything; the median counts.
        smallest, largest: Bytes that a rank sends in one collective.
        lengths: Sequence lengths of attention.
        copied: Bytes of a copy.
        gemm: Rows and columns of the largest matrix product.
    """

    rounds: int = 9
    smallest: int = 4096
    largest: int = 256 * 2**20
    lengths: tuple[int, ...] = (2048, 4096, 8192)
    copied: int = 256 * 2**20
    gemm: int = 8192

    @classmethod
    def of(cls, backend: Backend) -> Effort:
        """Return what is usual: a CPU is measured with what it does in some milliseconds."""
        if backend == "cpu-gloo":
            return cls(largest=8 * 2**20, lengths=(256, 512, 1024), copied=2**23, gemm=512)
        return cls()


def profile(
    launcher: Launcher,
    out: Path,
    *,
    name: str,
    base: str | None = None,
    dtype: Dtype | None = None,
    effort: Effort | None = None,
    timeout: float = 900.0,
    tell: Callable[[str], None] = lambda _: None,
    step: Step | None = None,
) -> tuple[Cluster, Mapping[str, Any]]:
    """Measure, and write the description of the cluster.

    Args:
        launcher: How many ranks on which hosts.
        out: The YAML file to write.
        name: Name of the description.
        base: Preset or file that it extends; None makes a whole one.
        dtype: Of products and attention; fp32 on CPUs and bf16 elsewhere by default.
        effort: How much is measured.
        timeout: Seconds after which all ranks are ended.
        tell: Receives one sentence when the ranks start.
        step: Receives what is measured now, how many rounds are done, and of how many.

    Returns:
        The cluster as the file says it, and what the ranks found.

    Raises:
        UsageError: Too few ranks to measure a network; a file that cannot be written.
        MissingToolsError: A host has no such backend, or too few devices.
        AllFailedError: A rank failed, or the time was up.
    """
    effort = effort or Effort.of(launcher.backend)
    if base is None and launcher.world_size < 2:
        raise UsageError(
            f"profile: nproc_per_node ({launcher.nproc_per_node}) must be at least 2 to measure "
            "collectives",
            "use --nproc-per-node 2 or more, or --cluster BASE to measure the device alone",
        )
    require_place(out)
    known = None if base is None else read_cluster(base)
    base = None if base is None else as_said_in(out, base)
    launcher.check()
    tell(f"{launcher.world_size} ranks measure collectives, products, copies and attention")
    request = {
        "backend": launcher.backend,
        "dtype": dtype or ("fp32" if launcher.backend == "cpu-gloo" else "bf16"),
        "rounds": effort.rounds,
        "smallest": effort.smallest,
        "largest": effort.largest,
        "lengths": list(effort.lengths),
        "copied": effort.copied,
        "gemm": effort.gemm,
    }
    with tempfile.TemporaryDirectory(prefix="hp-tune-profile-") as folder:
        job = launcher.run(
            "hp_tune.profile.worker",
            request,
            folder=Path(folder) / "job",
            timeout=timeout,
            step=step,
        )
        if not job.ok or job.answer is None:
            why = f"after {timeout:g} s" if job.timed_out else "a rank failed"
            if job.failed_ranks:
                why = str(job.failed_ranks[0])
            raise AllFailedError(f"profile did not end: {why}", job.stderr_tail[-500:])
    content = describe(job.answer, name=name, base=base, known=known)
    heading = (
        "Written by hp-tune profile. Numbers are medians of interleaved rounds, of the rank that\n"
        "took longest, while all ranks did the same."
    )
    return write_cluster(content, out, heading=heading), job.answer
