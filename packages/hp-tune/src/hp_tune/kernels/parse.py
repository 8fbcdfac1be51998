"""Read what the Ascend compiler writes: refusals, notes, buffer addresses, access patterns.

No triton and no compiler here: every function takes the compiler's text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = [
    "Overflow",
    "count_accesses",
    "count_element_buffers",
    "mix_mode",
    "multi_buffer_dropped",
    "overflow",
    "reason",
    "ub_bytes",
    "ub_limit_bytes",
]

BITS = {
    "bf16": 16, "f16": 16, "f32": 32, "f64": 64,
    "i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64,
}  # fmt: skip
BLOCK_BYTES = 32
"""The unit of the unified buffer: nothing in it starts or is copied in smaller steps."""

_OVERFLOW = re.compile(r"ub overflow, requires (\d+) bits while (\d+) bits available")
_CONSTANT = re.compile(r"(%c[\w-]+) = arith\.constant (\d+) : i64")
_BUFFER = re.compile(
    r"hivm\.hir\.pointer_cast\(([^)]*)\)[^:]*: "
    r"memref<([\w?x]+),(?: strided<[^>]*>,)? #hivm\.address_space<ub>>"
)
_UB_SIZE = re.compile(r'"UB_SIZE", (\d+)')


@dataclass(frozen=True, slots=True)
class Overflow:
    """A plan of the unified buffer that does not fit, in bytes."""

    required: int
    available: int


def overflow(output: str) -> Overflow | None:
    """Return the last overflow that ``bishengir-compile`` names: that of its tightest plan."""
    found = _OVERFLOW.findall(output)
    if not found:
        return None
    required, available = found[-1]
    return Overflow(int(required) // 8, int(available) // 8)


def multi_buffer_dropped(output: str) -> bool:
    """Say whether the compiler gave up the double buffering that it was asked for, to fit."""
    return "set enable-auto-multi-buffer to false; compilation then succeeded" in output


def reason(output: str) -> str:
    """Return the first complaint in the output of a compiler, on one line."""
    asserted = re.search(r"[Aa]ssertion `(.*?)' failed", output, re.DOTALL)
    if asserted:
        return " ".join(asserted[1].split())
    # that a pipeline failed is said first, why is said after it
    for error in re.findall(r"error: (.*)", output):
        if not error.startswith("Failed to run"):
            return str(error).strip()
    if "Stack dump:" in output:
        return "the compiler crashed"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


def mix_mode(linalg: str) -> str:
    """Return which cores run the kernel: ``aiv`` for vector cores, ``mix`` for both kinds."""
    found = re.search(r'mix_mode\s*=\s*"(\w+)"', linalg)
    return found[1] if found else ""


def count_accesses(linalg: str) -> tuple[int, int]:
    """Return how many accesses are ``DiscreteMemAccess`` and how many ``ExtractedLoadOrStore``.

    Both are loops over single elements or rows where one block copy would do.
    """
    return linalg.count("DiscreteMemAccess"), linalg.count("ExtractedLoadOrStore")


def count_element_buffers(hivm: str) -> int:
    """Return how many buffers hold each element of a tile in a block of 32 bytes of its own.

    That is how the compiler copies a tile whose columns do not lie side by side: ``linalg`` counts
    no discrete access, yet the copy moves one element at a time.
    """
    count = 0
    for _, shape, bits in _buffers(hivm):
        last = shape[-1] if len(shape) >= 3 else 0
        count += last is not None and last > 0 and last * bits == 8 * BLOCK_BYTES
    return count


def ub_limit_bytes(hivm: str) -> int | None:
    """Return the size of the unified buffer that the module was compiled for, in bytes."""
    found = _UB_SIZE.search(hivm)
    return int(found[1]) // 8 if found else None


def ub_bytes(hivm: str) -> int | None:
    """Return how far into the unified buffer the module reaches, in bytes.

    None where an address or a size is not a constant, which our kernels never ask for.
    """
    constants = {name: int(value) for name, value in _CONSTANT.findall(hivm)}
    end = 0
    for addresses, shape, bits in _buffers(hivm):
        elements = 1
        for size in shape:
            if size is None:
                return None
            elements *= size
        for address in addresses:
            if address not in constants:
                return None
            end = max(end, constants[address] + (elements * bits + 7) // 8)
    return end


def _buffers(hivm: str) -> list[tuple[list[str], list[int | None], int]]:
    """Return addresses, shape and bits per element of every buffer in the unified buffer."""
    found = []
    for addresses, memref in _BUFFER.findall(hivm):
        *sizes, element = memref.split("x")
        shape = [None if size == "?" else int(size) for size in sizes]
        found.append(([a.strip() for a in addresses.split(",")], shape, BITS[element]))
    return found
