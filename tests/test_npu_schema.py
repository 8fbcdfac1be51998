"""What `nox -s npu_schema` is made of, as far as it works without torch_npu."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from .npu_schema import run, stub
from .npu_schema.recording import bind

FOLDER = Path(__file__).parent / "npu_schema"


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "HP_NPU_SCHEMA_REPORT": str(folder / "calls.jsonl")}


def test_a_process_that_aborts_is_a_failure_with_its_last_lines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A stand-in that answers wrongly ends the process without a traceback."""
    code = "import os; [print('line', i, flush=True) for i in range(100)]; os.abort()"
    problem = run.run([sys.executable, "-c", code], environment(tmp_path))
    assert "aborted with signal SIGABRT" in problem
    assert "line 99" in problem and "line 50\n" not in problem
    assert "line 50" in capfd.readouterr().out, "all of it has been passed on"


def test_a_check_that_fails_is_a_failure(tmp_path: Path) -> None:
    """And one that passes is none."""
    env = environment(tmp_path)
    assert "pytest: 3" in run.run([sys.executable, "-c", "raise SystemExit(3)"], env)
    assert run.run([sys.executable, "-c", ""], env) == ""


def test_the_table_has_a_line_for_each_operator_and_caller() -> None:
    """What varied is listed, calls are counted."""
    row = {"operator": "op", "layout": "BSH", "mode": "3", "dtype": "bfloat16", "from": "us"}
    rows = [row, {**row, "mode": "2"}, {**row, "layout": "TND"}, {**row, "operator": "other"}]
    head, first, second = run.table(rows).splitlines()
    assert head.split() == ["operator", "layout", "mode", "dtype", "called", "by", "calls"]
    assert first.split() == ["op", "BSH", "TND", "2", "3", "bfloat16", "us", "3"]
    assert second.split()[0] == "other" and second.split()[-1] == "1"


def test_the_stand_ins_count_one_device_and_have_no_memory(tmp_path: Path) -> None:
    """Compiled here, without the vendor's wheel: the names are what it would ask for."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc here, which compiles the stand-ins; without it they are an error")
    names = ["aclInit", "aclrtGetDeviceCount", "aclrtGetSocName", "aclrtMalloc", "aclrtGetMemInfo"]
    (tmp_path / "stub.c").write_text(stub.generate(names))
    library = tmp_path / "libstub.so"
    command = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-Wno-unused", "-o", str(library)]
    subprocess.run([*command, str(tmp_path / "stub.c")], check=True)
    loaded = ctypes.CDLL(str(library))
    count, pointer = ctypes.c_uint(7), ctypes.c_void_p(7)
    assert loaded.aclrtGetDeviceCount(ctypes.byref(count)) == 0 and count.value == 1
    assert loaded.aclrtMalloc(ctypes.byref(pointer)) != 0 and pointer.value is None
    loaded.aclrtGetSocName.restype = ctypes.c_char_p
    assert loaded.aclrtGetSocName() == b"Ascend910B3"
    assert loaded.aclInit() == 0


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The wheel, one of its libraries, a tool."""
    monkeypatch.setattr(stub.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(stub.StubError, match="torch_npu must be installed"):
        stub.build(tmp_path)
    with pytest.raises(stub.StubError, match=r"must hold _C\*\.so"):
        stub.symbols(tmp_path)
    monkeypatch.setattr(stub.shutil, "which", lambda name: None)
    with pytest.raises(stub.StubError, match="gcc must be on PATH"):
        stub._tool("gcc", "gcc")


def test_nothing_of_the_folder_is_collected_by_a_plain_pytest() -> None:
    """Its checks import torch_npu, which only the session's process can."""
    assert not list(FOLDER.glob("test_*.py")) and not list(FOLDER.glob("conftest.py"))
    assert len(list(FOLDER.glob("check_*.py"))) >= 6


SCHEMA = (
    'npu::op(Tensor query, int head_num, str layout="BSH", *, Tensor? mask=None, int[]? ends=None)'
    " -> Tensor"
)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((1, 2, 3, 4), {}, "4 positional arguments, of 3"),
        ((), {"atten_mask": None}, r"\['atten_mask'\] unknown"),
        ((torch.ones(1), 2), {"head_num": 2}, r"\['head_num'\] given twice"),
        ((torch.ones(1),), {}, r"\['head_num'\] missing"),
        ((torch.ones(1), 2.0), {}, r"head_num \(2.0\) must be int"),
        ((torch.ones(1), True), {}, r"head_num \(True\) must be int"),
        ((torch.ones(1), 2), {"ends": torch.ones(2)}, "ends .* must be Optional"),
    ],
)
def test_a_call_that_the_schema_does_not_take_is_refused(
    args: tuple[Any, ...], kwargs: dict[str, Any], words: str
) -> None:
    """By name, before the dispatcher has a say."""
    with pytest.raises(TypeError, match=words):
        bind(torch._C.parse_schema(SCHEMA), args, kwargs)


def test_a_call_is_bound_with_its_defaults() -> None:
    """Every argument by name, as the operator gets it."""
    x = torch.ones(1)
    given = bind(torch._C.parse_schema(SCHEMA), (x, 2), {"ends": [3, 4]})
    assert given == {"query": x, "head_num": 2, "layout": "BSH", "mask": None, "ends": [3, 4]}
