"""What judges launches in a judging process: the interpreter, the Ascend compiler, or a device."""

from __future__ import annotations

import gc
import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hp_comm.kernels import catalog, limits
from hp_tune.errors import MissingToolsError
from hp_tune.kernels import _torch_door, _triton_door, ascend
from hp_tune.kernels.bandwidth import estimate
from hp_tune.kernels.bench import Bench, Clock, interleaved
from hp_tune.kernels.devices import Asked, vector_cores
from hp_tune.kernels.shapes import Shape
from hp_tune.kernels.tools import AscendTools, find_ascend_tools
from hp_tune.kernels.verdict import Facts, Judge, Mode, Verdict

__all__ = ["LocalJudge"]


class LocalJudge:
    """The `Judge` of this process."""

    def __init__(self) -> None:
        self._judge: Judge | None = None

    def open(self, asked: Asked, mode: Mode) -> Facts:
        """See `Judge.open`."""
        self._judge = judge = _Compile() if mode == "compile" else _Run()
        return judge.open(asked, mode)

    def judge(self, kernel: str, shape: Shape, launch: Mapping[str, int]) -> Verdict:
        """See `Judge.judge`."""
        assert self._judge is not None, "open comes first"
        return self._judge.judge(kernel, shape, launch)

    def close(self) -> None:
        """See `Judge.close`."""
        self._judge = None


@dataclass(frozen=True, slots=True)
class _Compiled:
    """What the Ascend compiler says of all launches of a kernel."""

    reason: str = ""
    overflowed: bool = False
    ub_bytes: int = 0
    double_buffered: bool = False
    discrete: int = 0
    element_buffers: int = 0


class _Compile:
    """Compile for Ascend, and rank by what the compiler says and a model of bandwidth."""

    def open(self, asked: Asked, mode: Mode) -> Facts:
        """See `Judge.open`."""
        self._tools: AscendTools = find_ascend_tools()
        self._target, cores = asked.target, vector_cores(asked.name)
        self._cores = cores
        self._compiled = lru_cache(maxsize=None)(self._compile)
        versions = {
            "triton-ascend": self._tools.triton_ascend,
            "ascendnpu-ir": self._tools.ascendnpu_ir,
        }
        return Facts(asked.name, "ascend", f"{asked.target}, not here", cores, versions)

    def judge(self, kernel: str, shape: Shape, launch: Mapping[str, int]) -> Verdict:
        """See `Judge.judge`."""
        asked = bool(launch.get("multibuffer", 1))
        found = self._compiled(kernel, shape, launch["tile"], asked)
        if found.reason:
            rule = "V13" if found.overflowed else "compile"
            numbers = {"ub_bytes": found.ub_bytes} if found.overflowed else {}
            return Verdict("failed", rule=rule, reason=found.reason, numbers=numbers)
        model = estimate(
            kernel,
            catalog.launches(kernel, shape.case(kernel), launch),
            num_bytes=shape.bytes(kernel),
            element_size=shape.element_size,
            cores=self._cores,
            double_buffered=found.double_buffered,
            by_element=bool(found.discrete or found.element_buffers),
        )
        return Verdict(
            "complete",
            ms=model.ms,
            numbers={
                "source": "compiled, not measured",
                "GBps": model.GBps,
                "efficiency": model.efficiency,
                "balance": model.balance,
                "tile_bytes": model.tile_bytes,
                "ub_bytes": found.ub_bytes,
                "ub_limit": limits.UB_BYTES,
                "double_buffered": found.double_buffered,
                "discrete": found.discrete,
                "element_buffers": found.element_buffers,
            },
        )

    def close(self) -> None:
        """See `Judge.close`."""

    def _compile(self, kernel: str, shape: Shape, tile: int, multibuffer: bool) -> _Compiled:
        """Compile what a tile leads to; the grid is no matter of the compiler's."""
        total = _Compiled(double_buffered=multibuffer)
        function = _triton_door.kernel_function(kernel)
        for one in catalog.variants_of(kernel, shape.case(kernel), shape.dtype, {"tile": tile}):
            found = ascend.lower(
                function,
                one.signature,
                one.constants,
                target=self._target,
                tools=self._tools,
                multibuffer=multibuffer,
            )
            if not found.compiled:
                return _Compiled(found.reason, found.overflowed, found.ub_bytes or 0)
            total = _Compiled(
                ub_bytes=max(total.ub_bytes, found.ub_bytes or 0),
                double_buffered=total.double_buffered and found.double_buffered,
                discrete=total.discrete + found.discrete + found.extracted,
                element_buffers=total.element_buffers + found.element_buffers,
            )
        return total


class _Run:
    """Run on a device, or interpreted on a CPU: right first, then how fast."""

    def open(self, asked: Asked, mode: Mode) -> Facts:
        """See `Judge.open`."""
        torch = _torch_door.torch()
        self._device, self._times = asked.torch_name, mode == "measure"
        self._bench: Bench | None = None
        if asked.family == "cpu":
            _torch_door.launcher("launch", interpreted=True)
            return Facts("cpu", "cpu", "TRITON_INTERPRET=1", versions=_versions(torch))
        description = _present(torch, asked)
        os.environ.pop("TRITON_INTERPRET", None)  # it would be the interpreter that is timed
        _torch_door.launcher("launch")
        name = _torch_door.device_name(torch.empty(1, device=self._device))
        if asked.name and asked.name != name:
            raise MissingToolsError(
                f"--device ({asked.name}) must be the device that is here, which is {name}",
                f"use --device {name}",
            )
        cores = vector_cores(name) if asked.family == "ascend" else 0
        return Facts(name, asked.family, description, cores, _versions(torch))

    def judge(self, kernel: str, shape: Shape, launch: Mapping[str, int]) -> Verdict:
        """See `Judge.judge`."""
        torch = _torch_door.torch()
        try:
            return self._judge(kernel, shape, launch)
        except torch.OutOfMemoryError as error:
            self._bench = None
            gc.collect()
            torch.get_device_module(self._device.partition(":")[0]).empty_cache()
            return _failed("memory", error)
        except AssertionError as error:
            return _failed("wrong", error)
        except _compile_failures() as error:
            return _failed("compile", error)
        except Exception as error:  # whatever a launch does is a verdict on the launch
            return _failed("error", error, broken=True)

    def close(self) -> None:
        """See `Judge.close`."""
        self._bench = None

    def _judge(self, kernel: str, shape: Shape, launch: Mapping[str, int]) -> Verdict:
        bench = self._bench
        if bench is None or (bench.kernel, bench.shape) != (kernel, shape):
            self._bench = None  # its memory first
            bench = self._bench = Bench(kernel, shape, self._device)
        _torch_door.set_launch(dict(launch))
        bench.compare()
        if not self._times:
            return Verdict("complete", numbers={"source": "interpreted"})
        ms, copy_ms = interleaved(bench.run, bench.copy(), Clock(self._device))
        num_bytes = shape.bytes(kernel)
        return Verdict(
            "complete",
            ms=ms,
            numbers={
                "source": "measured",
                "GBps": num_bytes / ms / 1e6,
                "copy_GBps": num_bytes / copy_ms / 1e6,
                "share": copy_ms / ms,
            },
        )


def _present(torch: Any, asked: Asked) -> str:
    """Return the maker's name of the device that is asked for, or say that it is not here."""
    kind = asked.torch_name.partition(":")[0]
    module = getattr(torch, kind, None)
    if module is None or not module.is_available():
        way_out = {
            "npu": "--device ascend910b3 --compile-only ranks launches without one",
            "cuda": "--device cpu checks the kernels without one",
        }
        what = "an NPU" if kind == "npu" else "a GPU"
        raise MissingToolsError(
            f"--device {asked.name or kind} must find {what} that torch {torch.__version__} "
            f"can use, and there is none",
            way_out[kind],
        )
    if (asked.index or 0) >= module.device_count():
        raise MissingToolsError(
            f"--device {asked.torch_name} must be one of {module.device_count()} that are here",
            f"use {kind}:0",
        )
    module.set_device(asked.index or 0)  # events are recorded on the current device
    return str(module.get_device_name(asked.index or 0))


def _versions(torch: Any) -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    for name in ("triton", "triton-ascend", "torch_npu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _compile_failures() -> tuple[type[Exception], ...]:
    return tuple(kind for kind in _triton_door.failures() if kind is not RuntimeError)


def _failed(rule: str, error: Exception, *, broken: bool = False) -> Verdict:
    text = " ".join(str(error).split()) or "no message"
    if rule == "error":
        text = f"{type(error).__name__}: {text}"
    return Verdict("failed", rule=rule, reason=text[:300], broken=broken)
