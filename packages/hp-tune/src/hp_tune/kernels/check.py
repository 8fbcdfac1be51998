"""``python -m hp_tune.kernels.check npu|cuda``: compile every kernel, print a table.

Exit code 0 if everything is as it should be; 1 if a kernel does not compile, has discrete accesses
that its layout does not force on it, or is accepted by our prediction and refused by the compiler;
5 where the compilers are missing. Nothing runs on a device.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import click

from hp_comm.kernels import catalog, limits
from hp_comm.kernels.catalog import Variant
from hp_comm.kernels.config import default_launch
from hp_tune.errors import TuneError
from hp_tune.kernels import _triton_door, ascend, cuda, report
from hp_tune.kernels.report import AscendRow, CudaRow
from hp_tune.kernels.tools import AscendTools, find_ascend_tools

__all__ = ["ascend_rows", "ascend_variants", "cli", "cuda_rows", "main"]

TILES = tuple(2**n for n in range(12, 18))
"""Elements of a tile: from what always fits to what no unified buffer holds."""
TOO_LARGE = 2**17
ELEMENT_SIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
EVERY = 50
"""After how many kernels the terminal hears that work goes on."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def cli() -> None:
    """Compile every kernel of the catalogue without a device, and print a table."""


@cli.command()
@click.option("--quick", is_flag=True, help="One shape of every kernel, and a tile too large.")
@click.option("--kernel", default="", help="Only kernels whose name contains this.")
def npu(quick: bool, kernel: str) -> None:
    """Down to HIVM for Ascend, with triton-ascend and ascendnpu-ir."""
    start = time.perf_counter()
    tools = find_ascend_tools()
    variants = [one for one in ascend_variants(quick) if kernel in one.kernel]
    rows = list(ascend_rows(variants, tools))
    faults = report.ascend_faults(rows)
    click.echo(report.ascend_table(rows))
    click.echo(f"\n{report.ascend_summary(rows)}\n")
    click.echo(f"{report.agreement(rows)}.")
    click.echo("HIVM means compiled for Ascend, not run on one; UB bytes are double-buffered where")
    click.echo("that fits, predicted is what a kernel needs at least. discrete counts")
    click.echo("DiscreteMemAccess + ExtractedLoadOrStore in the linalg.")
    _end(tools.versions, start, faults)


@cli.command("cuda")
@click.option("--quick", is_flag=True, help="One shape of every kernel.")
@click.option("--kernel", default="", help="Only kernels whose name contains this.")
@click.option("--capability", default=90, show_default=True, help="90 for H100 and H200.")
def for_cuda(quick: bool, kernel: str, capability: int) -> None:
    """Down to a cubin for a GPU, with PyPI's triton."""
    start = time.perf_counter()
    version = cuda.require_cuda_compiler()
    found = catalog.variants(quick, f"cuda-sm{capability}")
    rows = list(cuda_rows([one for one in found if kernel in one.kernel], capability))
    click.echo(report.cuda_table(rows))
    counted = sum(row.build.compiled for row in rows)
    click.echo(f"{counted} of {len(rows)} have a cubin: compiled for a GPU, not run on one.")
    _end(f"triton {version}", start, report.cuda_faults(rows))


def ascend_variants(quick: bool) -> list[Variant]:
    """Return every kernel in every case, with tiles from small to too large."""
    launch = default_launch("ascend")
    tiles: Iterable[int] = {launch["tile"], TOO_LARGE} if quick else {launch["tile"], *TILES}
    found: dict[tuple[object, ...], Variant] = {}
    for kernel, case in catalog.cases(quick):
        for dtype in catalog.DTYPES[:1] if quick else catalog.DTYPES:
            for tile in sorted(tiles):
                for one in catalog.variants_of(kernel, case, dtype, {**launch, "tile": tile}):
                    # a tile is no larger than the tensor, and two layouts may be one kernel
                    key = (kernel, case.name, dtype, tuple(sorted(one.constants.items())))
                    found.setdefault(key, one)
    return list(found.values())


def ascend_rows(variants: Sequence[Variant], tools: AscendTools) -> Iterator[AscendRow]:
    """Compile variants for every target, as many at a time as there are processors."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done, rows in enumerate(pool.map(lambda one: _ascend(one, tools), variants), 1):
            yield from rows
            _tell(done, len(variants))


def _ascend(variant: Variant, tools: AscendTools) -> list[AscendRow]:
    function = _triton_door.kernel_function(variant.kernel)
    linalg = ascend.to_linalg(function, variant.signature, variant.constants)
    multibuffer = bool(variant.launch.get("multibuffer", True))
    predicted = limits.predict_ub_bytes(
        variant.kernel, ELEMENT_SIZE[variant.dtype], variant.constants
    )
    return [
        AscendRow(
            variant,
            ascend.to_hivm(linalg, target=target, tools=tools, multibuffer=multibuffer),
            predicted,
            limits.UB_BYTES,
        )
        for target in ascend.TARGETS
    ]


def cuda_rows(variants: Sequence[Variant], capability: int) -> Iterator[CudaRow]:
    """Compile variants one after the other: triton's compiler is not made for threads."""
    for done, variant in enumerate(variants, 1):
        yield CudaRow(
            variant,
            cuda.build(
                _triton_door.kernel_function(variant.kernel),
                variant.signature,
                variant.constants,
                aligned=variant.aligned,
                capability=capability,
                num_warps=variant.launch.get("num_warps", 4),
                num_stages=variant.launch.get("num_stages", 3),
            ),
        )
        _tell(done, len(variants))


def _tell(done: int, total: int) -> None:
    if done % EVERY == 0 or done == total:
        click.echo(f"{done} of {total} compiled", err=True)


def _end(versions: str, start: float, faults: Sequence[str]) -> None:
    click.echo(f"{versions}; {time.perf_counter() - start:.0f} s")
    for fault in faults:
        click.echo(f"FAULT {fault}")
    if faults:
        sys.exit(1)


def main() -> None:
    """Run the program."""
    try:
        cli.main(prog_name="python -m hp_tune.kernels.check")
    except TuneError as error:
        click.echo(f"hp_tune.kernels.check: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
