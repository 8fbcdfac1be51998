"""Where compilers are missing, and where they misbehave: what the user reads then."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from hp_tune.errors import MissingToolsError
from hp_tune.kernels import ascend, tools
from hp_tune.kernels.ascend import Linalg
from hp_tune.kernels.tools import AscendTools

BLOCK = """
import sys
for name in ("torch", "triton", "optuna"):
    sys.modules[name] = None
import hp_tune.kernels, hp_tune.kernels._triton_door, hp_tune.kernels.ascend
import hp_tune.kernels.cuda, hp_tune.kernels.report
"""
SOURCE = Linalg(
    'func.func @k() attributes {global_kernel = "local", mix_mode = "aiv"}', "linalg", "", 0
)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Pretend that these distributions are installed, in a folder of their own."""
    versions = {"triton-ascend": "3.2.0", "ascendnpu-ir": "1.2.0", "pybind11": "3.1.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    def find_spec(name: str) -> ModuleSpec | None:
        distribution = {"ascendnpuir": "ascendnpu-ir", "triton": "triton-ascend"}.get(name, name)
        if distribution not in versions:
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(tmp_path / name)]
        return spec

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    return versions


def program(path: Path, body: str) -> None:
    """Write an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def compiler(folder: Path, body: str) -> AscendTools:
    """Return tools whose compiler is a script."""
    program(folder / "bin" / "bishengir-compile", body)
    return AscendTools(folder / "bin" / "bishengir-compile", "3.2.0", "1.2.0")


def test_the_package_imports_without_torch_and_without_triton() -> None:
    subprocess.run([sys.executable, "-c", BLOCK], check=True, timeout=600)


def test_the_compiler_is_found_where_pip_put_it(installed: dict[str, str], tmp_path: Path) -> None:
    expected = tmp_path / "ascendnpuir" / "bin" / "bishengir-compile"
    program(expected, "exit 0")

    found = tools.find_ascend_tools()

    assert found.bishengir == expected
    assert found.versions == "triton-ascend 3.2.0, ascendnpu-ir 1.2.0"


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("triton-ascend", "triton-ascend must be installed; here no triton is"),
        ("pybind11", "pybind11 must be installed"),
        ("ascendnpu-ir", "ascendnpu-ir must be installed"),
        ("", "must carry bin/bishengir-compile"),
    ],
    ids=["triton-ascend", "pybind11", "ascendnpu-ir", "program"],
)
def test_what_is_missing_is_named_with_the_way_out(
    installed: dict[str, str], missing: str, words: str
) -> None:
    installed.pop(missing, None)

    with pytest.raises(MissingToolsError) as refused:
        tools.find_ascend_tools()

    assert words in str(refused.value)
    assert refused.value.exit_code == 5
    assert refused.value.hint


def test_the_stand_in_answers_and_is_called_one(tmp_path: Path) -> None:
    tools.write_hivmc_stand_in(tmp_path)

    done = subprocess.run([tmp_path / "hivmc", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "hivmc stand-in\n")
    assert subprocess.run([tmp_path / "hivmc", "in.mlir"]).returncode == 0


def test_the_compiler_gets_a_stand_in_its_own_folder_and_no_mix_mode(tmp_path: Path) -> None:
    script = r"""
hivmc --version >&2
grep -q mix_mode "$1" && echo "error: mix_mode is still there" && exit 1
for option; do case "$option" in --save-temps=*) out="${option#--save-temps=}";; esac; done
mkdir -p "$out"
printf 'module { "UB_SIZE", 1572864 : i32 }\n' > "$out/module.hivm.opt.mlir"
echo "$@" > "$0.arguments"
"""
    found = ascend.to_hivm(SOURCE, target="Ascend910B3", tools=compiler(tmp_path, script))

    assert (found.stage, found.reason, found.mix_mode) == ("hivm", "", "aiv")
    assert (found.ub_bytes, found.ub_limit, found.double_buffered) == (0, 196608, True)
    given = (tmp_path / "bin" / "bishengir-compile.arguments").read_text()
    assert "--target=Ascend910B3" in given and "--enable-auto-multi-buffer=True" in given
    assert not Path(given.split()[0]).exists()


@pytest.mark.parametrize(
    ("script", "timeout_s", "reason"),
    [
        (
            "echo 'error: ub overflow, requires 2097152 bits while 1572864 bits available'; exit 1",
            600.0,
            "unified buffer: 262144 bytes needed, 196608 there",
        ),
        ("echo 'k.mlir:1:1: error: no such target' >&2; exit 1", 600.0, "no such target"),
        ("exec sleep 3600", 1.0, "no end after 1 s"),
        ("exit 0", 600.0, "no message"),
    ],
    ids=["overflow", "error", "hangs", "writes-nothing"],
)
def test_a_compiler_that_fails_ends_as_a_result_with_its_reason(
    tmp_path: Path, script: str, timeout_s: float, reason: str
) -> None:
    found = ascend.to_hivm(
        SOURCE, target="Ascend910B3", tools=compiler(tmp_path, script), timeout_s=timeout_s
    )

    assert (found.stage, found.reason) == ("linalg", reason)
    assert not found.compiled
    assert found.overflowed == reason.startswith("unified buffer")


def test_what_the_first_compiler_refused_is_not_given_to_the_second(tmp_path: Path) -> None:
    refused = Linalg("", "ttir", "the compiler crashed", 0.1)

    found = ascend.to_hivm(
        refused, target="Ascend910B3", tools=AscendTools(tmp_path / "none", "", "")
    )

    assert (found.stage, found.reason) == ("ttir", "the compiler crashed")
