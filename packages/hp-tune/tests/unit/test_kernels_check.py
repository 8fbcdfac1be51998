"""The program that compiles the catalogue: what it compiles, prints and exits with."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from hp_comm.kernels import limits
from hp_comm.kernels.config import KERNELS
from hp_tune.errors import MissingToolsError
from hp_tune.kernels import _triton_door, ascend, check, cuda
from hp_tune.kernels.ascend import Linalg, Lowering
from hp_tune.kernels.cuda import Build
from hp_tune.kernels.tools import AscendTools

TOO_LARGE = f"unified buffer: 262144 bytes needed, {limits.UB_BYTES} there"
BLOCKED = """
import sys
for name in ("torch", "triton", "ascendnpuir"):
    sys.modules[name] = None
from hp_tune.kernels.check import main
sys.argv[1:] = [sys.argv[1], "--quick"]
main()
"""


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> dict[str, Any]:
    """Compilers that take what our own prediction takes, unless told otherwise."""
    behaviour: dict[str, Any] = {"ub_bytes": 4096, "discrete": 0, "accepts": None}
    sizes: list[int] = []

    def to_linalg(function: Any, signature: Any, constants: Any) -> Linalg:
        sizes.append(limits.predict_ub_bytes(function, 2, constants))
        return Linalg(str(sizes[-1]), "linalg", "", 0.0)

    def to_hivm(linalg: Linalg, *, target: str, **_: Any) -> Lowering:
        fits = int(linalg.text) <= limits.UB_BYTES
        if fits if behaviour["accepts"] is None else behaviour["accepts"]:
            found = {"ub_bytes": behaviour["ub_bytes"], "discrete": behaviour["discrete"]}
            return Lowering(target, "hivm", "", ub_limit=limits.UB_BYTES, **found)
        return Lowering(target, "linalg", TOO_LARGE, ub_bytes=262144, ub_limit=limits.UB_BYTES)

    monkeypatch.setattr(_triton_door, "kernel_function", lambda name: name)
    monkeypatch.setattr(ascend, "to_linalg", to_linalg)
    monkeypatch.setattr(ascend, "to_hivm", to_hivm)
    monkeypatch.setattr(check, "find_ascend_tools", lambda: AscendTools(tmp_path, "3.2", "1.2"))
    return behaviour


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Run in this process; return exit code and stdout."""
    with pytest.raises(SystemExit) as stopped:
        check.cli.main(list(arguments), prog_name="check")
    code = stopped.value.code
    assert code is None or isinstance(code, int)
    return code or 0, capsys.readouterr().out


def test_the_quick_check_has_every_kernel_with_a_tile_that_fits_and_one_that_does_not() -> None:
    found = check.ascend_variants(quick=True)

    for kernel in KERNELS:
        own = [one for one in found if one.kernel == kernel]
        sizes = [limits.predict_ub_bytes(kernel, 2, one.constants) for one in own]
        assert min(sizes) <= limits.UB_BYTES < max(sizes)


def test_the_whole_check_has_every_kernel_dtype_and_tile_once() -> None:
    found = check.ascend_variants(quick=False)

    assert {one.kernel for one in found} == set(KERNELS)
    assert {one.dtype for one in found} == {"bf16", "fp16", "fp32"}
    assert {one.launch["tile"] for one in found} >= {4096, 2**17}
    keys = [
        (one.kernel, one.case, one.dtype, tuple(sorted(one.constants.items()))) for one in found
    ]
    assert len(set(keys)) == len(keys)


def test_agreement_is_printed_and_exits_0(
    capsys: pytest.CaptureFixture[str], compilers: dict[str, Any]
) -> None:
    code, out = run(capsys, "npu", "--quick")

    assert code == 0
    assert "HIVM means compiled for Ascend, not run on one" in out
    assert "refused by us alone 0, by the compiler alone 0." in out
    assert TOO_LARGE in out
    assert "triton-ascend 3.2, ascendnpu-ir 1.2" in out


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [({"accepts": False}, "and accept; the compiler needs 262144"), ({"discrete": 3}, "(3)")],
    ids=["we-accept-too-much", "discrete"],
)
def test_a_fault_is_named_and_exits_1(
    capsys: pytest.CaptureFixture[str],
    compilers: dict[str, Any],
    behaviour: dict[str, Any],
    words: str,
) -> None:
    compilers.update(behaviour)

    code, out = run(capsys, "npu", "--quick", "--kernel", "merge_backward")

    assert code == 1
    faults = [line for line in out.splitlines() if line.startswith("FAULT merge_backward | ")]
    assert len(faults) == len(ascend.TARGETS)
    assert words in faults[0]


def test_cuda_compiles_with_the_launch_of_its_own_device(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    def build(function: Any, signature: Any, constants: Any, **options: Any) -> Build:
        seen.append(options)
        return Build("sm_90", "cubin", "", 0, 32, 0, 16, 16, 1024)

    monkeypatch.setattr(_triton_door, "kernel_function", lambda name: name)
    monkeypatch.setattr(cuda, "require_cuda_compiler", lambda: "3.7.1")
    monkeypatch.setattr(cuda, "build", build)

    code, out = run(capsys, "cuda", "--quick")

    assert code == 0
    assert "compiled for a GPU, not run on one" in out
    assert {one["capability"] for one in seen} == {90}
    assert all("num_warps" in one for one in seen)


def test_missing_compilers_are_an_error_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> AscendTools:
        raise MissingToolsError("triton-ascend must be installed", "nox -s npu_compile")

    monkeypatch.setattr(check, "find_ascend_tools", missing)
    monkeypatch.setattr(sys, "argv", ["check", "npu", "--quick"])

    with pytest.raises(SystemExit) as stopped:
        check.main()

    assert stopped.value.code == 5


@pytest.mark.parametrize("name", ["npu", "cuda"])
def test_without_compilers_the_program_says_what_to_install(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, name], capture_output=True, text=True, timeout=600
    )

    assert done.returncode == 5
    assert done.stdout == ""
    assert f"nox -s {name}_compile" in done.stderr
    assert "Traceback" not in done.stderr
