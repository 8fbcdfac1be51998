"""``--device cpu`` for real: every kernel against its reference, interpreted, wrong ones found.

Needs a triton that can be imported; `nox -s npu_compile` and `nox -s cuda_compile` have one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("triton", reason="no triton here; nox -s npu_compile and cuda_compile have one")
# triton reads it when it is imported, so a test cannot set it; the nox sessions do
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernels run on a CPU only under TRITON_INTERPRET=1", allow_module_level=True)

from hp_comm.kernels import launch, launch_heads, launch_merge
from hp_comm.kernels.config import KERNELS
from hp_tune.kernels import judges, shapes
from hp_tune.kernels.devices import Asked
from hp_tune.kernels.judges import LocalJudge

# triton-ascend's interpreter makes numbers of one-element arrays, which numpy will forbid
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")

LAUNCH = {"tile": 64, "programs": 3}


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalJudge]:
    """A judge of this process, whose launch configs end with the test."""
    for module in (launch, launch_heads, launch_merge):
        monkeypatch.setattr(module, "launch_of", module.launch_of)
    found = LocalJudge()
    facts = found.open(Asked.parse("cpu"), "check")
    assert facts.name == "cpu" and "torch" in facts.versions
    yield found
    found.close()
    for module in (launch, launch_heads, launch_merge):
        module._planned.cache_clear()


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_is_right_at_every_default_shape(judge: LocalJudge, kernel: str) -> None:
    """Odd sizes, GQA and MQA, two layouts, bf16 and fp32; tiles smaller than a row."""
    for shape in shapes.defaults("cpu"):
        verdict = judge.judge(kernel, shape, LAUNCH)
        assert (verdict.state, verdict.reason) == ("complete", "")
        assert verdict.ms is None


@pytest.mark.parametrize("module", [launch, launch_heads, launch_merge])
def test_an_element_that_is_not_written_is_a_wrong_result(
    judge: LocalJudge, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is poisoned first, so what an earlier launch left there does not pass."""
    kernel, name = {
        launch: ("pack", "pack"),
        launch_heads: ("pack_rotary", "pack_heads"),
        launch_merge: ("merge", "merge"),
    }[module]
    right = getattr(module, name)

    def leaves_one_out(*args: Any) -> Any:
        found = right(*args)
        first = found[0] if isinstance(found, tuple) else found
        first.view(-1)[-1] = first.new_empty(1)[0]
        return found

    shape = shapes.defaults("cpu")[0]
    assert judge.judge(kernel, shape, LAUNCH).state == "complete"
    monkeypatch.setattr(module, name, leaves_one_out)
    verdict = judge.judge(kernel, shape, LAUNCH)

    assert (verdict.state, verdict.rule) == ("failed", "wrong")
    assert "output 0" in verdict.reason and not verdict.broken


def test_an_error_of_a_launch_is_a_verdict(
    judge: LocalJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it raises; the process is not trusted afterwards."""

    def breaks(*args: Any) -> Any:
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(launch, "pack", breaks)
    verdict = judge.judge("pack", shapes.defaults("cpu")[0], LAUNCH)

    assert (verdict.state, verdict.rule, verdict.broken) == ("failed", "error", True)
    assert verdict.reason == "RuntimeError: illegal memory access"


class HostClock:
    """Stands in for a device's clock: on a CPU what is called is done."""

    def __init__(self, device: str) -> None:
        assert device == "cpu"

    def now(self) -> float:
        return time.perf_counter() * 1e3

    host_ms = now

    def wait(self) -> None:
        pass

    def ms(self, start: float, end: float) -> float:
        return end - start


def test_what_is_timed_has_its_bandwidth_and_that_of_a_copy(
    judge: LocalJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of a device, with the host's clock: the numbers say nothing, their relations do."""
    monkeypatch.setattr(judges, "Clock", HostClock)
    monkeypatch.setattr(judge._judge, "_times", True, raising=True)
    shape = shapes.defaults("cpu")[0]
    verdict = judge.judge("merge", shape, {"tile": 65536})

    assert verdict.state == "complete", verdict.reason
    numbers = {name: float(n) for name, n in verdict.numbers.items() if name != "source"}
    assert verdict.ms is not None and verdict.numbers["source"] == "measured"
    assert numbers["GBps"] == pytest.approx(shape.bytes("merge") / verdict.ms / 1e6)
    assert numbers["share"] == pytest.approx(numbers["GBps"] / numbers["copy_GBps"])
    assert 0 < numbers["share"] < 0.9  # an interpreter
