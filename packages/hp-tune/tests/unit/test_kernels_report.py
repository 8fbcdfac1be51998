"""Tables, agreement and faults, from results made by hand: no compiler is needed."""

from __future__ import annotations

import pytest

from hp_comm.kernels.catalog import Variant
from hp_tune.kernels import report
from hp_tune.kernels.ascend import Lowering
from hp_tune.kernels.cuda import Build, widest_access
from hp_tune.kernels.report import AscendRow, CudaRow

LIMIT = 196608


def variant(kernel: str = "pack", discrete_expected: int = 0) -> Variant:
    """Return a variant of the catalogue."""
    launch = {"tile": 4096, "multibuffer": 1}
    return Variant(kernel, "32 x 128", "bf16", {}, {}, frozenset(), launch, discrete_expected)


FITS = Lowering("Ascend910B3", "hivm", "", 16384, LIMIT, double_buffered=True, mix_mode="aiv")
LATE = Lowering("Ascend910B3", "hivm", "", 131072, LIMIT, mix_mode="aiv")
FULL = Lowering("Ascend910B3", "linalg", "unified buffer: ...", 262144, LIMIT)
DEAD = Lowering("Ascend910B3", "ttir", "the compiler crashed")
LOOPS = Lowering("Ascend910B3", "hivm", "", 16384, LIMIT, True, discrete=1, extracted=1)


def row(lowering: Lowering, predicted: int, discrete_expected: int = 0) -> AscendRow:
    """Put a result beside our own prediction."""
    return AscendRow(variant("pack", discrete_expected), lowering, predicted, LIMIT)


def test_agreement_counts_the_four_cases_and_leaves_out_what_failed_before() -> None:
    rows = [row(FITS, 16384), row(FULL, 262144), row(LATE, 200000), row(FULL, 1), row(DEAD, 1)]

    counted = report.agreement(rows)

    assert (counted.both_accept, counted.both_reject) == (1, 1)
    assert (counted.only_we_reject, counted.only_compiler_rejects) == (1, 1)
    assert str(counted) == (
        "Predictor and compiler agree on 2 of 4 (1 fit, 1 do not); refused by us alone 1, "
        "by the compiler alone 1"
    )


@pytest.mark.parametrize(
    ("good", "predicted"),
    [(FITS, 16384), (FULL, 262144), (LATE, 262144)],
    ids=["fits", "refused", "careful"],
)
def test_what_agrees_or_is_refused_by_us_alone_is_no_fault(good: Lowering, predicted: int) -> None:
    assert report.ascend_faults([row(good, predicted)]) == []


@pytest.mark.parametrize(
    ("bad", "predicted", "words"),
    [
        (FULL, LIMIT, "we predict 196608 bytes of the unified buffer and accept"),
        (DEAD, 1, "stopped behind ttir: the compiler crashed"),
        (LOOPS, 16384, "discrete accesses (2) must be 0"),
    ],
    ids=["accepted-in-error", "does-not-compile", "discrete"],
)
def test_each_fault_names_the_kernel_and_says_what_is_wrong(
    bad: Lowering, predicted: int, words: str
) -> None:
    (fault,) = report.ascend_faults([row(bad, predicted)])

    assert fault.startswith("pack | 32 x 128 | bf16 | tile 4096 | Ascend910B3: ")
    assert words in fault


def test_expected_discrete_accesses_are_no_fault() -> None:
    assert report.ascend_faults([row(LOOPS, 16384, discrete_expected=2)]) == []


def test_the_ascend_table_says_what_was_reached_used_and_predicted() -> None:
    table = report.ascend_table([row(FITS, 16384), row(LATE, 262144), row(FULL, 262144)])

    head, rule, fits, late, full = table.splitlines()
    assert [cell.strip() for cell in head.split("|")][1:7] == [
        "kernel", "case", "dtype", "tile", "target", "HIVM or reason",
    ]  # fmt: skip
    assert set(rule) == {"|", "-", " "}
    assert "| HIVM " in fits and "| 16384 " in fits and "| 0 + 0 " in fits and "| aiv " in fits
    assert "HIVM, single buffer" in late and "262144 refused" in late
    assert "unified buffer: ..." in full
    assert len({len(line) for line in table.splitlines()}) == 1


def test_the_summary_has_one_line_per_kernel_and_target() -> None:
    rows = [row(FITS, 16384), row(LATE, 262144), row(FULL, 262144), row(FULL, 1)]

    head, _, line = report.ascend_summary(rows).splitlines()

    names = [cell.strip() for cell in head.strip("|").split("|")]
    values = [cell.strip() for cell in line.strip("|").split("|")]
    assert dict(zip(names, values, strict=True)) == {
        "kernel": "pack",
        "target": "Ascend910B3",
        "variants": "4",
        "HIVM": "2",
        "too large": "2",
        "largest UB bytes": "131072",
        "discrete": "0",
        "predictor agrees": "2",
        "refuses more": "1",
        "refuses less": "1",
    }


def test_the_cuda_table_and_its_faults() -> None:
    good = Build("sm_90", "cubin", "", 0, 32, 0, 16, 16, 10776)
    bad = Build("sm_90", "source", "CompilationError: arange's range must be a power of 2")
    rows = [CudaRow(variant(), good), CudaRow(variant("merge"), bad)]

    table = report.cuda_table(rows)

    assert "cubin, 10776 bytes" in table and "16 / 16" in table
    (fault,) = report.cuda_faults(rows)
    assert fault.startswith("merge | 32 x 128 | bf16 | tile 4096 | sm_90: CompilationError")


def test_a_table_without_rows_is_its_head() -> None:
    assert report.markdown(("a", "bc"), []) == "| a | bc |\n| - | -- |"


def test_the_widest_access_of_ptx_is_found_for_loads_and_stores() -> None:
    ptx = """
    @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    ld.global.b64 { %rd2 }, [ %rd3 + 0 ];
    ld.shared.v4.b64 {%rd1}, [%r1];
    @%p2 st.global.L1::no_allocate.v2.b16 [ %rd4 + 0 ], { %rs1, %rs2 };
    """

    assert widest_access(ptx) == (16, 4)
    assert widest_access("") == (0, 0)
