"""Tables of what compiled and what did not, and whether our prediction agrees with the compiler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hp_comm.kernels.catalog import Variant
from hp_tune.kernels.ascend import Lowering
from hp_tune.kernels.cuda import Build

__all__ = [
    "Agreement",
    "AscendRow",
    "CudaRow",
    "agreement",
    "ascend_faults",
    "ascend_summary",
    "ascend_table",
    "cuda_faults",
    "cuda_table",
    "markdown",
]


@dataclass(frozen=True, slots=True)
class AscendRow:
    """One variant on one target; ``predicted`` is our own estimate of the buffer, in bytes."""

    variant: Variant
    lowering: Lowering
    predicted: int
    limit: int

    @property
    def we_accept(self) -> bool:
        """Whether our own prediction lets this launch through."""
        return self.predicted <= self.limit


@dataclass(frozen=True, slots=True)
class CudaRow:
    """One variant for one CUDA architecture."""

    variant: Variant
    build: Build


@dataclass(frozen=True, slots=True)
class Agreement:
    """How often our prediction and the compiler say the same about the unified buffer."""

    both_accept: int
    both_reject: int
    only_we_reject: int
    only_compiler_rejects: int

    def __str__(self) -> str:
        """Say it in one sentence."""
        total = (
            self.both_accept + self.both_reject + self.only_we_reject + self.only_compiler_rejects
        )
        return (
            f"Predictor and compiler agree on {self.both_accept + self.both_reject} of {total} "
            f"({self.both_accept} fit, {self.both_reject} do not); refused by us alone "
            f"{self.only_we_reject}, by the compiler alone {self.only_compiler_rejects}"
        )


def agreement(rows: Iterable[AscendRow]) -> Agreement:
    """Count agreement over everything that got as far as the unified buffer."""
    seen = [row for row in rows if row.lowering.compiled or row.lowering.overflowed]
    both = [(row.we_accept, row.lowering.compiled) for row in seen]
    return Agreement(
        both_accept=both.count((True, True)),
        both_reject=both.count((False, False)),
        only_we_reject=both.count((False, True)),
        only_compiler_rejects=both.count((True, False)),
    )


def ascend_faults(rows: Iterable[AscendRow]) -> list[str]:
    """Return what must not be, one sentence each: then the check fails."""
    faults = []
    for row in rows:
        lowering, variant = row.lowering, row.variant
        name = f"{_name(variant)} | {lowering.target}"
        if not lowering.compiled and not lowering.overflowed:
            faults.append(f"{name}: stopped behind {lowering.stage}: {lowering.reason}")
        if lowering.overflowed and row.we_accept:
            faults.append(
                f"{name}: we predict {row.predicted} bytes of the unified buffer and accept; "
                f"the compiler needs {lowering.ub_bytes}"
            )
        if lowering.compiled:
            single = lowering.discrete + lowering.extracted
            if single != variant.discrete_expected:
                faults.append(
                    f"{name}: discrete accesses ({single}) must be {variant.discrete_expected}"
                )
    return faults


def _name(variant: Variant) -> str:
    tile = variant.launch["tile"]
    return f"{variant.kernel} | {variant.case} | {variant.dtype} | tile {tile}"


def cuda_faults(rows: Iterable[CudaRow]) -> list[str]:
    """Return what must not be, one sentence each."""
    return [
        f"{_name(row.variant)} | {row.build.arch}: {row.build.reason}"
        for row in rows
        if not row.build.compiled
    ]


def ascend_table(rows: Iterable[AscendRow]) -> str:
    """Return the table of the Ascend check."""
    lines = []
    for row in rows:
        lowering = row.lowering
        ends = "HIVM" if lowering.compiled else lowering.reason
        if lowering.compiled and row.variant.launch.get("multibuffer", True):
            ends += "" if lowering.double_buffered else ", single buffer"
        single = f"{lowering.discrete} + {lowering.extracted}"
        lines.append(
            (
                row.variant.kernel,
                row.variant.case,
                row.variant.dtype,
                str(row.variant.launch["tile"]),
                lowering.target,
                ends,
                "" if lowering.ub_bytes is None else str(lowering.ub_bytes),
                f"{row.predicted}{'' if row.we_accept else ' refused'}",
                single if lowering.compiled else "",
                str(lowering.element_buffers) if lowering.compiled else "",
                lowering.mix_mode,
            )
        )
    head = ("kernel", "case", "dtype", "tile", "target", "HIVM or reason", "UB bytes", "predicted")
    return markdown((*head, "discrete", "by element", "cores"), lines)


def ascend_summary(rows: Sequence[AscendRow]) -> str:
    """Return one line per kernel and target: how many fit, and what the largest of them takes."""
    lines = []
    for kernel, target in sorted({(row.variant.kernel, row.lowering.target) for row in rows}):
        own = [r for r in rows if (r.variant.kernel, r.lowering.target) == (kernel, target)]
        fit = [row.lowering for row in own if row.lowering.compiled]
        counted = agreement(own)
        lines.append(
            (
                kernel,
                target,
                str(len(own)),
                str(len(fit)),
                str(sum(row.lowering.overflowed for row in own)),
                str(max((one.ub_bytes or 0 for one in fit), default=0)),
                str(sum(one.discrete + one.extracted for one in fit)),
                str(counted.both_accept + counted.both_reject),
                str(counted.only_we_reject),
                str(counted.only_compiler_rejects),
            )
        )
    head = ("kernel", "target", "variants", "HIVM", "too large", "largest UB bytes", "discrete")
    return markdown((*head, "predictor agrees", "refuses more", "refuses less"), lines)


def cuda_table(rows: Iterable[CudaRow]) -> str:
    """Return the table of the CUDA check."""
    lines = []
    for row in rows:
        build = row.build
        lines.append(
            (
                row.variant.kernel,
                row.variant.case,
                row.variant.dtype,
                str(row.variant.launch["tile"]),
                build.arch,
                f"cubin, {build.cubin_bytes} bytes" if build.compiled else build.reason,
                "" if build.registers is None else str(build.registers),
                "" if build.spilled_bytes is None else str(build.spilled_bytes),
                str(build.shared_bytes),
                f"{build.load_bytes} / {build.store_bytes}",
            )
        )
    head = ("kernel", "case", "dtype", "tile", "arch", "cubin or reason", "registers", "spilled")
    return markdown((*head, "shared bytes", "widest load / store"), lines)


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with columns that line up in a log too."""
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    rule = ["-" * width for width in widths]
    rows = [head, rule, *lines]
    return "\n".join(
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    )
