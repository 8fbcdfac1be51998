"""Timing in turns, with a clock that stands in for a device's; and the bandwidth model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hp_comm.kernels import catalog
from hp_tune.kernels.bandwidth import estimate
from hp_tune.kernels.bench import interleaved
from hp_tune.kernels.shapes import Shape

SHAPE = Shape(8192, (32, 8, 8), 128, 8)


class StandInClock:
    """A device with one stream, and a host that enqueues: both in ms, neither real."""

    def __init__(self) -> None:
        self.host = 0.0
        self.device = 0.0
        self.log: list[str] = []

    def call(self, name: str, host: float, device: Callable[[], float]) -> Callable[[], None]:
        def enqueue() -> None:
            self.host += host
            self.device = max(self.device, self.host) + device()
            self.log.append(name)

        return enqueue

    def now(self) -> float:
        self.device = max(self.device, self.host)
        return self.device

    def wait(self) -> None:
        self.host = max(self.host, self.device)

    def ms(self, start: float, end: float) -> float:
        return end - start

    def host_ms(self) -> float:
        return self.host


def test_what_is_timed_is_the_device_and_not_the_host_that_feeds_it() -> None:
    """A launch costs the host ten times what it takes: copies ahead of it hide that."""
    clock: Any = StandInClock()
    run = clock.call("run", 0.3, lambda: 0.03)
    copy = clock.call("copy", 0.002, lambda: 0.025)

    ms, copy_ms = interleaved(run, copy, clock, rounds=5)

    assert ms == pytest.approx(0.03, rel=1e-6)
    assert copy_ms == pytest.approx(0.025, rel=1e-6)


def test_a_slow_moment_of_the_device_does_not_move_the_median() -> None:
    """Every third call takes ten times as long on a clock that has been throttled for a while."""
    clock: Any = StandInClock()
    times = iter([1.0] * 20 + [10.0] * 4 + [1.0] * 1000)
    run = clock.call("run", 0.0, lambda: next(times))
    copy = clock.call("copy", 0.0, lambda: 1.0)

    ms, copy_ms = interleaved(run, copy, clock)

    assert (ms, copy_ms) == (1.0, 1.0)


def test_both_are_timed_in_every_round_and_take_turns_to_be_first() -> None:
    """What comes second finds warm caches: each is second as often, but for one round."""
    clock: Any = StandInClock()
    run = clock.call("run", 0.0, lambda: 1.0)
    copy = clock.call("copy", 0.0, lambda: 1.0)
    interleaved(run, copy, clock, rounds=4)

    assert "".join(name[0] for name in clock.log[-12:]) == "ccr" + "crc" + "ccr" + "crc"


def modelled(kernel: str = "pack", **changes: Any) -> float:
    """Return the modelled time of one launch."""
    launch = {"tile": 4096, "programs": 40, **changes.pop("launch", {})}
    known: dict[str, Any] = {
        "num_bytes": SHAPE.bytes(kernel),
        "element_size": 2,
        "cores": 40,
        "double_buffered": True,
        "by_element": False,
    }
    launches = catalog.launches(kernel, SHAPE.case(kernel), launch)
    return estimate(kernel, launches, **{**known, **changes}).ms


def test_the_model_prefers_what_a_device_would() -> None:
    """Larger tiles, double buffering, blocks and not elements, cores that are all busy."""
    usual = modelled()

    assert modelled(launch={"tile": 16384}) < usual < modelled(launch={"tile": 1024})
    assert usual < modelled(double_buffered=False)
    assert 10 * usual < modelled(by_element=True)
    assert modelled("merge", launch={"programs": 10}) > 3 * modelled("merge")


@pytest.mark.parametrize("kernel", ["pack", "unpack", "pack_rotary", "unpack_rotary", "merge"])
def test_no_modelled_bandwidth_is_above_that_of_the_memory(kernel: str) -> None:
    """Whatever the launch."""
    for tile in (1024, 131072):
        for programs in (40, 160):
            ms = modelled(kernel, launch={"tile": tile, "programs": programs})
            assert SHAPE.bytes(kernel) / ms / 1e6 < 0.6 * 1600
