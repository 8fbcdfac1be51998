"""Compile one kernel for Ascend as far as a machine without CANN can: TTIR, linalg, HIVM.

``triton-ascend`` lowers to linalg, ``bishengir-compile`` to optimised HIVM, in which the unified
buffer is laid out and synchronisation inserted. What comes after, HIVM to a binary, needs ``hivmc``
of CANN. So HIVM means *compiled for Ascend, not run on one*.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hp_tune.kernels import _triton_door, parse
from hp_tune.kernels.tools import AscendTools, write_hivmc_stand_in

__all__ = ["TARGETS", "Linalg", "Lowering", "lower", "to_hivm", "to_linalg"]

TARGETS = ("Ascend910B3", "Ascend910_9392")
"""Atlas 800T A2 and A3."""
TIMEOUT_S = 120.0

Stage = Literal["source", "ttir", "linalg", "hivm"]
_MIX_MODE = re.compile(r', mix_mode\s*=\s*"[^"]*"')


@dataclass(frozen=True, slots=True)
class Linalg:
    """A kernel between the two compilers; ``text`` is empty where the first one refused it."""

    text: str
    stage: Stage
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Lowering:
    """How far a kernel got, and what the compilers say about it.

    Attributes:
        target: As in ``bishengir-compile --target``.
        stage: The last form that was reached; ``hivm`` is the end.
        reason: Why it went no further, one line; empty at ``hivm``.
        ub_bytes: Use of the unified buffer, in bytes; where it overflows, what is needed.
        ub_limit: Its size, in bytes.
        double_buffered: Whether copies overlap with the rest, as asked: the compiler drops this
            before it refuses a kernel.
        discrete: Accesses of single elements or rows in the linalg, ``DiscreteMemAccess``.
        extracted: Loops over elements in the linalg, ``ExtractedLoadOrStore``.
        element_buffers: Tiles that are copied element by element for their stride.
        mix_mode: ``aiv`` where vector cores run it alone.
        seconds: Both compilers.
    """

    target: str
    stage: Stage
    reason: str
    ub_bytes: int | None = None
    ub_limit: int | None = None
    double_buffered: bool = False
    discrete: int = 0
    extracted: int = 0
    element_buffers: int = 0
    mix_mode: str = ""
    seconds: float = 0.0

    @property
    def compiled(self) -> bool:
        """Whether HIVM was reached."""
        return self.stage == "hivm"

    @property
    def overflowed(self) -> bool:
        """Whether the unified buffer was too small."""
        return not self.compiled and self.ub_limit is not None


def lower(
    function: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, int | bool | float],
    *,
    target: str,
    tools: AscendTools,
    multibuffer: bool = True,
) -> Lowering:
    """Compile a jit function down to HIVM.

    Args:
        function: The ``triton.jit`` function.
        signature: Types of what is not constant, by name: ``*bf16``, ``i32``, ``*i64``.
        constants: ``constexpr`` arguments, and others that are fixed, by name.
        target: One of `TARGETS`, or another that ``bishengir-compile`` knows.
        tools: The second compiler.
        multibuffer: Ask for double buffering.
    """
    return to_hivm(
        to_linalg(function, signature, constants),
        target=target,
        tools=tools,
        multibuffer=multibuffer,
    )


def to_linalg(
    function: Any, signature: Mapping[str, str], constants: Mapping[str, int | bool | float]
) -> Linalg:
    """Run the first compiler, whose result serves every target."""
    start = time.perf_counter()
    try:
        text, complaint = _triton_door.ascend_linalg(function, signature, constants)
    except _triton_door.failures() as error:
        return Linalg("", "source", _first_line(error), time.perf_counter() - start)
    seconds = time.perf_counter() - start
    if text:
        return Linalg(text, "linalg", "", seconds)
    return Linalg("", "ttir", parse.reason(complaint), seconds)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


def to_hivm(
    linalg: Linalg,
    *,
    target: str,
    tools: AscendTools,
    multibuffer: bool = True,
    timeout_s: float = TIMEOUT_S,
) -> Lowering:
    """Run the second compiler in a folder of its own."""
    if not linalg.text:
        return Lowering(target, linalg.stage, linalg.reason, seconds=linalg.seconds)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="hp-tune-") as name:
        output, hivm = _bishengir(linalg.text, Path(name), target, tools, multibuffer, timeout_s)
    seconds = linalg.seconds + time.perf_counter() - start
    discrete, extracted = parse.count_accesses(linalg.text)
    known: dict[str, Any] = {
        "discrete": discrete,
        "extracted": extracted,
        "mix_mode": parse.mix_mode(linalg.text),
        "seconds": seconds,
    }
    if hivm:
        return Lowering(
            target,
            "hivm",
            "",
            ub_bytes=parse.ub_bytes(hivm),
            ub_limit=parse.ub_limit_bytes(hivm),
            double_buffered=multibuffer and not parse.multi_buffer_dropped(output),
            element_buffers=parse.count_element_buffers(hivm),
            **known,
        )
    too_much = parse.overflow(output)
    if too_much is None:
        return Lowering(target, "linalg", parse.reason(output), **known)
    text = f"unified buffer: {too_much.required} bytes needed, {too_much.available} there"
    return Lowering(
        target, "linalg", text, ub_bytes=too_much.required, ub_limit=too_much.available, **known
    )


def _bishengir(
    linalg: str, folder: Path, target: str, tools: AscendTools, multibuffer: bool, timeout_s: float
) -> tuple[str, str]:
    """Return what the compiler wrote to its output, and the HIVM module or ""."""
    write_hivmc_stand_in(folder)
    source = folder / "kernel.mlir"
    # the compiler infers mix_mode and does not know the attribute
    source.write_text(_MIX_MODE.sub("", linalg), encoding="utf-8")
    command = [
        str(tools.bishengir),
        str(source),
        f"--target={target}",
        f"--enable-auto-multi-buffer={multibuffer}",
        "--enable-auto-bind-sub-block=True",
        "--enable-hfusion-compile=true",
        "--enable-hivm-compile=true",
        "--enable-triton-kernel-compile=true",
        f"--save-temps={folder / 'stages'}",
        "-o",
        str(folder / "kernel.o"),
    ]
    path = os.pathsep.join([str(folder), str(tools.bishengir.parent), os.environ.get("PATH", "")])
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env={**os.environ, "PATH": path},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"error: no end after {timeout_s:.0f} s", ""
    module = folder / "stages" / "module.hivm.opt.mlir"
    hivm = module.read_text(encoding="utf-8") if done.returncode == 0 and module.is_file() else ""
    return done.stdout + done.stderr, hivm
