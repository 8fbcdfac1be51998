"""Compile one kernel for CUDA without a GPU: TTGIR, PTX, and the cubin that ``ptxas`` makes."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hp_tune.errors import MissingToolsError
from hp_tune.kernels import _triton_door

__all__ = ["Build", "build", "require_cuda_compiler", "widest_access"]

_ACCESS = re.compile(r"\b(ld|st)\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.[bsuf](\d+)\b")
_USAGE = re.compile(r"REG:(\d+).*?LOCAL:(\d+)")


@dataclass(frozen=True, slots=True)
class Build:
    """How far a kernel got, and what it takes of the device.

    Attributes:
        arch: ``sm_90`` for example.
        stage: ``cubin`` is the end.
        reason: Why it went no further, one line; empty at ``cubin``.
        shared_bytes: Shared memory of a program.
        registers: Of a thread; None where the tool that counts them is missing.
        spilled_bytes: Local memory of a thread, which is what does not fit the registers.
        load_bytes: Widest load of a thread from global memory; 16 is the best.
        store_bytes: Widest store of a thread.
        cubin_bytes: Size of the binary.
        seconds: All of it.
    """

    arch: str
    stage: Literal["source", "cubin"]
    reason: str
    shared_bytes: int = 0
    registers: int | None = None
    spilled_bytes: int | None = None
    load_bytes: int = 0
    store_bytes: int = 0
    cubin_bytes: int = 0
    seconds: float = 0.0

    @property
    def compiled(self) -> bool:
        """Whether there is a binary."""
        return self.stage == "cubin"


def require_cuda_compiler() -> str:
    """Return triton's version, or say that it is missing or the one for Ascend."""
    if _triton_door.cuda_tools() is None:
        raise MissingToolsError(
            "PyPI's triton must be installed to compile for CUDA",
            "nox -s cuda_compile makes an environment with it; triton-ascend has no CUDA",
        )
    return _triton_door.version()


def build(
    function: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, int | bool | float],
    *,
    aligned: Collection[str] = (),
    capability: int = 90,
    num_warps: int = 4,
    num_stages: int = 3,
) -> Build:
    """Compile a jit function to a cubin.

    Args:
        function: As in `hp_tune.kernels.ascend.lower`, like the next two.
        signature: See there.
        constants: See there.
        aligned: Integers that a launch would find divisible by 16; pointers are taken to be, as
            torch allocates them so.
        capability: 90 for H100 and H200.
        num_warps: Of a program.
        num_stages: Of pipelined loops.
    """
    pointers = [name for name, kind in signature.items() if kind.startswith("*")]
    arch = f"sm_{capability}"
    start = time.perf_counter()
    try:
        kernel = _triton_door.cuda_kernel(
            function,
            signature,
            constants,
            aligned={*pointers, *aligned},
            capability=capability,
            num_warps=num_warps,
            num_stages=num_stages,
        )
    except _triton_door.failures() as error:
        text = " ".join(str(error).split())
        return Build(arch, "source", f"{type(error).__name__}: {text[-200:]}")
    registers, spilled = _usage(kernel.asm["cubin"])
    load, store = widest_access(kernel.asm["ptx"])
    return Build(
        arch,
        "cubin",
        "",
        shared_bytes=int(kernel.metadata.shared),
        registers=registers,
        spilled_bytes=spilled,
        load_bytes=load,
        store_bytes=store,
        cubin_bytes=len(kernel.asm["cubin"]),
        seconds=time.perf_counter() - start,
    )


def widest_access(ptx: str) -> tuple[int, int]:
    """Return the bytes of the widest load and of the widest store of global memory in PTX."""
    widest = {"ld": 0, "st": 0}
    for kind, vector, bits in _ACCESS.findall(ptx):
        widest[kind] = max(widest[kind], int(vector or 1) * int(bits) // 8)
    return widest["ld"], widest["st"]


def _usage(cubin: bytes) -> tuple[int | None, int | None]:
    """Return registers and local bytes of a thread, read by the ``cuobjdump`` in triton's wheel."""
    folder = _triton_door.cuda_tools()
    if folder is None or not (folder / "cuobjdump").is_file():
        return None, None
    with tempfile.TemporaryDirectory(prefix="hp-tune-") as name:
        path = Path(name) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(folder / "cuobjdump"), "--dump-resource-usage", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    found = _USAGE.search(done.stdout)
    return (int(found[1]), int(found[2])) if found else (None, None)
