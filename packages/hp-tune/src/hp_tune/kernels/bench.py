"""One kernel on real tensors: run it as the runtime does, compare it, and time it beside a copy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from hp_comm.kernels import catalog
from hp_tune.kernels import _torch_door
from hp_tune.kernels.shapes import Shape

__all__ = ["Bench", "Clock", "interleaved"]

ROUNDS, WARM_UP = 11, 3
SAMPLE_MS = 1.0
"""A sample is as many calls as take about this long, so that events resolve them."""
MOST_CALLS = 50

TORCH_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class Bench:
    """A kernel, its inputs, and what its outputs must be.

    Args:
        kernel: Name of the kernel.
        shape: Its layout.
        device: As torch names it.
    """

    def __init__(self, kernel: str, shape: Shape, device: str) -> None:
        self._torch = _torch_door.torch()
        self._device = device
        self._random = self._torch.Generator(device=device).manual_seed(0)
        self._dtype = getattr(self._torch, TORCH_DTYPES[shape.dtype])
        self.kernel, self.shape, self.case = kernel, shape, shape.case(kernel)
        self._run, self._define = self._merge() if kernel.startswith("merge") else self._move()
        self._expected: list[Any] | None = None

    def run(self) -> list[Any]:
        """Call the kernel once; return its outputs."""
        found: list[Any] = self._run()
        return found

    def compare(self) -> None:
        """Raise `AssertionError` unless the outputs are right, every element of them written."""
        testing = _torch_door.testing()
        if self._expected is None:
            self._expected = self._define()
        with testing.poison_empty():
            found = self.run()
        kind = "grad" if self.kernel in ("unpack_rotary", "merge_backward") else "forward"
        for i, (actual, expected) in enumerate(zip(found, self._expected, strict=True)):
            if self.kernel in ("pack", "unpack") and not self._is_summed:
                assert self._torch.equal(actual, expected), f"output {i} is not bit-equal"
                continue
            if self.kernel == "unpack_rotary" and expected.ndim == 1:  # a sum over all rows
                scale = expected.abs().max()
                actual, expected = actual / scale, expected / scale
            testing.assert_close(actual, expected, kind=kind, name=f"output {i}")

    @property
    def _is_summed(self) -> bool:
        shared = any(heads % self.case.ranks for heads in self.case.heads)
        return self.kernel == "unpack" and self.case.dim == "heads" and shared

    def copy(self) -> Callable[[], Any]:
        """Return a copy that reads and writes the bytes that the kernel does."""
        size = self.shape.bytes(self.kernel) // 2
        source, target = (
            self._torch.zeros(size, dtype=self._torch.uint8, device=self._device) for _ in range(2)
        )
        return lambda: target.copy_(source)

    def _randn(self, *size: int, dtype: Any = None) -> Any:
        return self._torch.randn(
            size, dtype=dtype or self._dtype, device=self._device, generator=self._random
        )

    def _move(self) -> tuple[Callable[[], list[Any]], Callable[[], list[Any]]]:
        """Return how packing and unpacking run, and how they are defined."""
        shapes, strides, cut = catalog.layout_of(self.case)
        xs = []
        for size, stride in zip(shapes, strides, strict=True):
            x = self._torch.empty_strided(size, stride, dtype=self._dtype, device=self._device)
            xs.append(x.copy_(self._randn(*size)))
        dims, counts, index, joined = map(list, cut)
        lists = [list(size) for size in shapes]
        reference = _torch_door.reference()
        work = self._work()
        if self.kernel == "pack":
            return (
                lambda: [_torch_door.launcher("launch").pack(xs, dims, counts, index, joined)],
                lambda: [reference.pack(xs, dims, counts, index, joined)],
            )
        buffer = self._randn(reference.pack(xs, dims, counts, index, joined).numel())
        if self.kernel == "unpack":
            return (
                lambda: list(
                    _torch_door.launcher("launch").unpack(
                        buffer, lists, dims, counts, index, joined
                    )
                ),
                lambda: list(reference.unpack(buffer, lists, dims, counts, index, joined)),
            )
        works = [work] * len(xs)
        if self.kernel == "pack_rotary":

            def pack(kernels: Any) -> list[Any]:
                return [kernels.pack_heads(xs, works, dims, counts, index, joined, 1)]

            return (
                lambda: pack(_torch_door.launcher("launch_heads")),
                lambda: pack(_torch_door.arithmetic()),
            )

        def unpack(kernels: Any) -> list[Any]:
            outs, weights = kernels.unpack_heads(
                buffer, xs, works, lists, dims, counts, index, joined, 1
            )
            return [*outs, *weights]

        return (
            lambda: unpack(_torch_door.launcher("launch_heads")),
            lambda: unpack(_torch_door.arithmetic()),
        )

    def _work(self) -> Any:
        """Return QK-norm and a rotary embedding over whole heads."""
        if self.case.work is None:
            return None
        wide = self._torch.float32
        angles = self._randn(1, self.case.rows, 1, self.case.size // 2, dtype=wide)
        weight = self._randn(self.case.size, dtype=wide)
        return _torch_door.arithmetic().HeadWork(
            weight=weight.to(self._dtype), cos=angles.cos(), sin=angles.sin()
        )

    def _merge(self) -> tuple[Callable[[], list[Any]], Callable[[], list[Any]]]:
        """Return how merging runs, and how it is defined."""
        case, wide = self.case, self._torch.float32
        rows = (case.batch, case.rows, case.heads[0])
        outs = [self._randn(*rows, case.size) for _ in range(2)]
        lses = [self._randn(*rows, dtype=wide) for _ in range(2)]
        given = [outs[0], lses[0], outs[1], lses[1]]
        if self.kernel == "merge_backward":
            given += [self._randn(*rows, case.size), self._randn(*rows, dtype=wide)]

        def merge(kernels: Any) -> list[Any]:
            return list(getattr(kernels, self.kernel)(*given))

        return (
            lambda: merge(_torch_door.launcher("launch_merge")),
            lambda: merge(_torch_door.arithmetic()),
        )


class Clock:
    """The device's own clock: time between two points of its stream.

    Args:
        device: As torch names it.
    """

    def __init__(self, device: str) -> None:
        self._module = _torch_door.torch().get_device_module(device.partition(":")[0])

    def now(self) -> Any:
        """Mark a point in the stream."""
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Wait until the device has done everything."""
        self._module.synchronize()

    def ms(self, start: Any, end: Any) -> float:
        """Return the time between two points that the device has passed."""
        return float(start.elapsed_time(end))

    def host_ms(self) -> float:
        """Return the host's time."""
        return time.perf_counter() * 1e3


def interleaved(
    run: Callable[[], Any], copy: Callable[[], Any], clock: Clock, rounds: int = ROUNDS
) -> tuple[float, float]:
    """Return the median time of a call and of a copy, in ms, measured in turns.

    In every round both are timed one after the other, so that what the clocks of the device do
    meets both. The host must stay ahead of the device, or the gaps between launches are measured:
    copies that nobody times come first, and give it that time.
    """
    for _ in range(WARM_UP):
        run()
        copy()
    clock.wait()
    host, start = clock.host_ms(), clock.now()
    for _ in range(WARM_UP):
        run()
    enqueue_ms, middle = (clock.host_ms() - host) / WARM_UP, clock.now()
    for _ in range(WARM_UP):
        copy()
    end = clock.now()
    clock.wait()
    run_ms, copy_ms = clock.ms(start, middle) / WARM_UP, clock.ms(middle, end) / WARM_UP
    calls = max(1, min(MOST_CALLS, round(SAMPLE_MS / max(copy_ms, 1e-3))))
    if run_ms > 10 * copy_ms:  # slow beyond rescue: once a round will do
        calls = 1
    ahead = max(1, round(1.5 * enqueue_ms * calls / max(copy_ms, 1e-3)))
    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(rounds):
        for _ in range(min(ahead, 20 * MOST_CALLS)):
            copy()
        order = [(True, run), (False, copy)] if turn % 2 else [(False, copy), (True, run)]
        points = [clock.now()]
        for _, call in order:
            for _ in range(calls):
                call()
            points.append(clock.now())
        clock.wait()
        for (is_run, _), (first, last) in zip(order, pairwise(points), strict=True):
            times[is_run].append(clock.ms(first, last) / calls)
    return statistics.median(times[True]), statistics.median(times[False])
