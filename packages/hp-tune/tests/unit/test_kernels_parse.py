"""What the Ascend compiler writes, recorded from ascendnpu-ir 1.2.0, is read as it was meant."""

from __future__ import annotations

import pytest

from hp_tune.kernels import parse
from hp_tune.kernels.parse import Overflow

DEMOTED = """\
[NOTE] Ub overflow detected; automatically set enable-code-motion to false and retrying compilation.
[NOTE] Ub overflow detected; automatically set enable-auto-multi-buffer to false and retrying.
[NOTE] Due to Ub overflow, automatically set enable-code-motion to false, \
set enable-auto-multi-buffer to false; compilation then succeeded.
"""
REFUSED = """\
[NOTE] Due to Ub overflow, automatically set enable-code-motion to false, \
set enable-auto-multi-buffer to false; compilation still failed.
loc("k.mlir":1:1): error: Failed to run BiShengHIR pipeline

loc("k.mlir":2:3): error: ub overflow, requires 2097152 bits while 1572864 bits available! \
(possible reason: tiling basic block is too large or block number is more than what user expect)
[ERROR] Failed to run BiShengIR pipeline
"""
ASSERTED = """\
triton-adapter-opt: InterleaveOptimization.cpp:113: auto recount(Builder &): Assertion \
`dyn_cast<IntegerAttr>(value).getInt() == 1 && "Arith::constant value of addi's
 operand must be 1"' failed.
PLEASE submit a bug report and include the crash backtrace.
Stack dump:
"""
CRASHED = """\
PLEASE submit a bug report and include the crash backtrace.
Stack dump:
0.\tProgram arguments: triton-adapter-opt kernel.ttir.mlir
"""
HIVM = """\
module attributes {dlti.target_system_spec = #dlti.target_system_spec<"NPU" : \
#hacc.target_device_spec<#dlti.dl_entry<"VECTOR_CORE_COUNT", 40 : i32>, \
#dlti.dl_entry<"UB_SIZE", 1572864 : i32>>>} {
    %c0_i64 = arith.constant 0 : i64
    %c8192_i64 = arith.constant 8192 : i64
    %c139264_i64 = arith.constant 139264 : i64
    %0 = hivm.hir.pointer_cast(%c0_i64) : memref<32x128xbf16, #hivm.address_space<ub>>
    %1 = hivm.hir.pointer_cast(%c8192_i64) : memref<0xf32, #hivm.address_space<ub>>
    %2 = hivm.hir.pointer_cast(%c8192_i64) : memref<32x128x16xbf16, #hivm.address_space<ub>>
    %3 = hivm.hir.pointer_cast(%c139264_i64) : memref<16x8xf32, #hivm.address_space<ub>>
    %45 = hivm.hir.pointer_cast(%44) [%c128] : memref<?xbf16, #hivm.address_space<gm>>
"""
LINALG = """\
  func.func @pack(%arg0: memref<?xi8>) attributes {global_kernel = "local", \
mix_mode = "aiv", parallel_mode = "simd"} {
    scf.for %i = %c0 to %c32 step %c1 { } {ExtractedLoadOrStore}
    memref.copy %a, %b {DiscreteMemAccess} : memref<1xf32> to memref<1xf32>
    memref.copy %c, %d {DiscreteMemAccess} : memref<1xf32> to memref<1xf32>
"""


def test_an_overflow_is_read_in_bytes() -> None:
    assert parse.overflow(REFUSED) == Overflow(required=262144, available=196608)
    assert parse.overflow(DEMOTED) is None


def test_lost_double_buffering_is_a_note_and_no_refusal() -> None:
    """Asked for too much, the compiler goes on without double buffering and says so in passing."""
    assert parse.multi_buffer_dropped(DEMOTED)
    assert not parse.multi_buffer_dropped(REFUSED)
    assert not parse.multi_buffer_dropped("")


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (REFUSED, "ub overflow, requires 2097152 bits"),
        (ASSERTED, "dyn_cast<IntegerAttr>(value).getInt() == 1"),
        (CRASHED, "the compiler crashed"),
        ("[ERROR] Cannot find hivmc under $PATH\n", "[ERROR] Cannot find hivmc under $PATH"),
        ("\n", "no message"),
    ],
    ids=["error", "assertion", "crash", "last-line", "silence"],
)
def test_the_reason_is_one_line_that_says_why(output: str, reason: str) -> None:
    found = parse.reason(output)

    assert found.startswith(reason)
    assert "\n" not in found


def test_the_end_of_the_last_buffer_is_what_is_used() -> None:
    """Addresses plus sizes, the largest of them; global memory and empty buffers do not count."""
    assert parse.ub_bytes(HIVM) == 139264 + 16 * 8 * 4
    assert parse.ub_limit_bytes(HIVM) == 196608


def test_a_buffer_of_unknown_size_makes_the_use_unknown() -> None:
    unknown = "%0 = hivm.hir.pointer_cast(%c0_i64) [%n] : memref<?xf32, #hivm.address_space<ub>>\n"

    assert parse.ub_bytes(HIVM + unknown) is None


def test_a_module_without_buffers_uses_nothing() -> None:
    assert parse.ub_bytes("module {}") == 0
    assert parse.ub_limit_bytes("module {}") is None


def test_an_element_in_a_block_of_its_own_is_seen() -> None:
    """32 x 128 elements of 2 bytes in 32 bytes each; the row scalars ``16x8xf32`` are none."""
    assert parse.count_element_buffers(HIVM) == 1


def test_discrete_accesses_and_the_kind_of_core_are_read_from_linalg() -> None:
    assert parse.count_accesses(LINALG) == (2, 1)
    assert parse.mix_mode(LINALG) == "aiv"
    assert parse.mix_mode("") == ""
