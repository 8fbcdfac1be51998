"""``hp-tune kernels``: what it prints, writes and exits with; who judges is a stand-in."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hp_comm.kernels import config
from hp_tune.cli import main
from hp_tune.commands import cli
from hp_tune.errors import MissingToolsError, TuneError
from hp_tune.kernels import command
from hp_tune.kernels.devices import Asked
from hp_tune.kernels.shapes import Shape
from hp_tune.kernels.verdict import Facts, Mode, Verdict
from hp_tune.kernels.worker import Worker
from hp_tune.torchrun.processes import is_running

SMALL = "S1024-H8:2:2-D64-P2"
TWO = f"{SMALL},S16384-H8:2:2-D64-P2"


class StandInJudge:
    """Answers for a device that is not here."""

    def __init__(self) -> None:
        self.closed = False
        self.count = 0
        self.interrupt_after = 0
        self.failing = False

    def open(self, asked: Asked, mode: Mode) -> Facts:
        self.mode = mode
        if asked.family == "cpu":
            return Facts("cpu", "cpu", "TRITON_INTERPRET=1")
        if asked.family == "ascend":
            return Facts(asked.name, "ascend", "a stand-in", 40, {"triton-ascend": "0"})
        return Facts("cuda-sm90", "cuda", "a stand-in", versions={"triton": "0"})

    def judge(self, kernel: str, shape: Shape, launch: Mapping[str, int]) -> Verdict:
        self.count += 1
        if self.count == self.interrupt_after:
            raise KeyboardInterrupt
        if self.failing:
            return Verdict("failed", rule="wrong", reason="output 0 is not bit-equal")
        if self.mode == "check":
            return Verdict("complete", numbers={"source": "interpreted"})
        share = 0.8 if launch["tile"] == (8192 if shape.rows == 1024 else 16384) else 0.4
        if self.mode == "compile":
            return Verdict("complete", 1 - share, numbers={"GBps": 900 * share, "ub_bytes": 5})
        numbers = {"GBps": 4000 * share, "copy_GBps": 4000.0, "share": share}
        return Verdict("complete", 1 / share, numbers=numbers)

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> StandInJudge:
    stand_in = StandInJudge()
    monkeypatch.setattr(command, "_judge", lambda _: stand_in)
    return stand_in


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["kernels", *arguments])


def code_of(result: Result) -> int:
    """Return what the program exits with: `hp_tune.cli` turns our errors into their codes."""
    error = result.exception
    return error.exit_code if isinstance(error, TuneError) else result.exit_code


CUDA = ["--device", "cuda", "--kernel", "pack", "--shapes", TWO, "--budget", "30"]


def test_a_tuned_kernel_is_written_with_where_it_is_from(judge: StandInJudge, folder: Path) -> None:
    """File, command, date, versions, GB/s and the share of a copy; the runtime chooses by size."""
    result = run(*CUDA)

    assert code_of(result) == 0 and judge.closed
    found = config.read(folder / "configs" / "pack.cuda-sm90.json")
    assert config.choose(found, {"rows": 1024, "inner": 256, "element_size": 2})["tile"] == 8192
    assert config.choose(found, {"rows": 16384, "inner": 256, "element_size": 2})["tile"] == 16384
    assert found.kernel_hash == config.kernel_hash()
    assert found.found_by.startswith(
        "measured: hp-tune kernels --device cuda-sm90 --kernel pack --shapes S1024-H8:2:2-D64-P2,"
    )
    for words in ("triton 0", "20", "3200 GB/s, 80% of a copy"):
        assert words in found.found_by
    assert "2.00 times as fast as untuned (tile=4096 num_warps=4 num_stages=3)" in result.output
    assert "HP_KERNEL_CONFIGS=configs" in result.output


def test_json_is_one_object_with_every_trial(judge: StandInJudge) -> None:
    """Sizes, bytes, states and reasons, for programs."""
    result = run(*CUDA, "--json")
    found = json.loads(result.stdout)

    assert found["mode"] == "measure" and found["device"] == "cuda-sm90"
    first = found["kernels"][0]
    assert first["sizes"] == {"rows": 1024, "inner": 256, "element_size": 2}
    assert first["best"]["tile"] == 8192
    states = {trial["state"] for trial in first["trials"]}
    assert states == {"complete", "pruned"}
    assert all(trial["reason"] for trial in first["trials"] if trial["state"] == "pruned")
    assert found["files"] == {"pack": "configs/pack.cuda-sm90.json"}


def test_a_cpu_is_checked_and_not_tuned(judge: StandInJudge, folder: Path) -> None:
    """No file, no study, a sentence that says so, exit code 0: every launch was right."""
    result = run("--device", "cpu", "--budget", "3", "--kernel", "merge")

    assert code_of(result) == 0
    assert "this is no tuning, no file is written" in result.stdout
    assert "nothing was tuned" in result.stderr
    assert list(folder.iterdir()) == []


def test_a_file_asked_of_a_cpu_is_refused(judge: StandInJudge) -> None:
    """Exit code 2, before anything runs."""
    for option in (["--out", "configs"], ["--apply"]):
        result = run("--device", "cpu", *option)
        assert code_of(result) == 2 and "an interpreter says nothing about speed" in str(
            result.exception
        )
    assert judge.count == 0


def test_a_wrong_result_on_a_cpu_is_exit_code_7(judge: StandInJudge) -> None:
    """How many, and the reason of each kind once."""
    judge.failing = True
    result = run("--device", "cpu", "--budget", "3", "--kernel", "merge")

    assert code_of(result) == 7
    assert "6 of 6 launches are not right" in str(result.exception)
    assert "output 0 is not bit-equal" in result.stdout


def test_no_launch_that_works_is_exit_code_3_and_no_file(judge: StandInJudge, folder: Path) -> None:
    """The reasons are printed; the runtime keeps its defaults."""
    judge.failing = True
    result = run(*CUDA)

    assert code_of(result) == 3
    assert "no launch works on cuda-sm90 for pack at S1024" in str(result.exception)
    assert "best     none: the default launch stays" in result.stdout
    assert list((folder / "configs").iterdir()) == []


def test_compiled_is_not_called_measured(judge: StandInJudge, folder: Path) -> None:
    """In the output, and in the file."""
    arguments = ["--device", "ascend910b3", "--compile-only", "--kernel", "pack"]
    result = run(*arguments, "--shapes", SMALL, "--budget", "9")

    assert code_of(result) == 0, result.exception
    assert "mode     compiled, not measured" in result.stdout and "assumed" in result.stdout
    assert "GB/s" in result.stdout and "share of copy" not in result.stdout
    found = config.read(folder / "configs" / "pack.ascend910b3.json")
    assert found.found_by.startswith("compiled, not measured: hp-tune kernels")
    assert "by a model" in found.found_by and "--compile-only" in found.found_by


def test_a_model_does_not_write_over_what_was_measured(judge: StandInJudge, folder: Path) -> None:
    """Measured on the device once, the file is safe from a machine without one."""
    path = folder / "configs" / "pack.ascend910b3.json"
    entry = config.Entry({}, {"tile": 4096})
    config.write(config.KernelConfig("pack", "ascend910b3", (entry,), "measured: here"), path)
    before = path.read_bytes()

    result = run("--device", "ascend910b3", "--compile-only", "--kernel", "pack")

    assert code_of(result) == 2 and "not found by a model" in str(result.exception)
    assert path.read_bytes() == before and judge.count == 0


def test_the_installed_package_is_written_only_where_apply_says_so(
    judge: StandInJudge, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naming its folder is not enough."""
    monkeypatch.setattr(config, "FOLDER", folder / "installed")
    result = run(*CUDA, "--out", "installed")
    assert code_of(result) == 2 and "say --apply" in str(result.exception)

    result = run(*CUDA, "--apply")
    assert code_of(result) == 0 and (folder / "installed" / "pack.cuda-sm90.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "tpu"], r"--device \('tpu'\) must be cuda"),
        (["--device", "ascend910b5"], "did you mean 'ascend910b"),
        (["--device", "cuda", "--kernel", "pakc"], r"--kernel \('pakc'\) must be one of merge"),
        (["--device", "cuda", "--shapes", "S8"], "must have D, P, H"),
        (["--device", "cuda", "--compile-only"], "ranks for an Ascend, not for cuda"),
        (["--device", "npu", "--compile-only"], "must know which Ascend"),
        (["--device", "cuda", "--apply", "--out", "x"], "name two places"),
    ],
)
def test_wrong_use_is_exit_code_2_before_anything_runs(
    judge: StandInJudge, arguments: list[str], words: str
) -> None:
    """One sentence with the option as it was typed."""
    result = run(*arguments)

    assert code_of(result) == 2
    with pytest.raises(TuneError, match=words):
        raise result.exception or AssertionError("no error")
    assert judge.count == 0


def test_shapes_that_the_runtime_cannot_tell_apart_are_tuned_once(judge: StandInJudge) -> None:
    """BSHD with other KV heads has the same largest piece: a note says which one counts."""
    twins = f"{SMALL},S1024-H8:1:1-D64-P2"
    result = run("--device", "cuda", "--kernel", "pack", "--shapes", twins, "--budget", "2")

    assert (
        "note     pack: S1024-H8:1:1-D64-P2 has the sizes of S1024-H8:2:2-D64-P2" in result.output
    )


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_tried(
    judge: StandInJudge, folder: Path
) -> None:
    """Not after hours."""
    (folder / "file").touch()
    result = run(*CUDA, "--out", "file/configs")

    assert code_of(result) == 2 and "file/configs cannot be written" in str(result.exception)
    assert judge.count == 0


def test_an_interrupt_prints_the_best_so_far(judge: StandInJudge, folder: Path) -> None:
    """What was found is said, no file is written, and a second run takes it up."""
    judge.interrupt_after = 12
    result = run(*CUDA)

    assert result.exit_code == 1
    assert "stopped before its end" in result.stdout and "best     tile=" in result.stdout
    assert judge.closed and not (folder / "configs" / "pack.cuda-sm90.json").exists()

    judge.interrupt_after = 0
    judge.count = 0
    result = run(*CUDA)
    assert "has 1" in result.stderr and "they are not tried again" in result.stderr
    assert code_of(result) == 0


def test_the_program_says_how_to_resume_after_a_signal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGINT: exit code 130, the best so far, and the command that goes on."""
    stand_in = StandInJudge()
    judge_as_before = stand_in.judge

    def judge(kernel: str, shape: Shape, launch: Mapping[str, int]) -> Verdict:
        if stand_in.count == 5:
            signal.raise_signal(signal.SIGINT)
        return judge_as_before(kernel, shape, launch)

    monkeypatch.setattr(stand_in, "judge", judge)
    monkeypatch.setattr(command, "_judge", lambda _: stand_in)
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(SystemExit) as stopped:
            main(["kernels", *CUDA])
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    captured = capsys.readouterr()

    assert stopped.value.code == 130
    assert "best     tile=" in captured.out
    assert "resume with: hp-tune kernels --device cuda" in captured.err


def _judge_of(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a judge as a new process can find it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))  # a spawned process has our path
    return f"_dying_judges.{name}"


def test_a_judge_that_dies_or_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a verdict with a reason; the next launch finds a new process, and no orphan."""
    worker = Worker(300.0, _judge_of("DyingJudge", monkeypatch))
    shape = Shape(8, (2,), 8, 2)
    try:
        worker.open(Asked("cuda"), "measure")
        first = worker.judge("pack", shape, {"tile": 4})
        died = worker.judge("pack", shape, {"tile": 1})
        second = worker.judge("pack", shape, {"tile": 5})
        worker.timeout_s = 0.5
        hung = worker.judge("pack", shape, {"tile": 2})
        worker.timeout_s = 300.0
        third = worker.judge("pack", shape, {"tile": 3})
        fourth = worker.judge("pack", shape, {"tile": 4})
    finally:
        worker.close()

    assert (died.rule, died.reason) == ("crash", "its process was ended by SIGKILL")
    assert (hung.rule, hung.reason) == ("time", "no answer after 0.5 s")
    child = int(Path("child.pid").read_text())
    for _ in range(6000):  # the system ends it when it comes to it
        if not is_running(child):
            break
        time.sleep(0.01)
    assert not is_running(child)
    assert len({one.ms for one in (first, second, third, fourth)}) == 4


def test_what_is_missing_there_is_said_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error crosses the process with its hint."""
    worker = Worker(300.0, _judge_of("MissingJudge", monkeypatch))
    with pytest.raises(MissingToolsError, match="no device; bring one"):
        worker.open(Asked("cuda"), "measure")


def _program(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hp_tune", "kernels", *arguments],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


def _has(module: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(module) is not None


def _no_gpu() -> bool:
    import torch

    return not torch.cuda.is_available()


@pytest.mark.skipif(not _no_gpu(), reason="the error is that of a machine without a GPU")
@pytest.mark.parametrize("device", ["cuda", "npu", "ascend910b3"])
def test_a_device_that_is_not_here_is_one_sentence_and_exit_code_5(device: str) -> None:
    """No traceback, no file, and the way out."""
    done = _program("--device", device)

    assert done.returncode == 5, done.stderr
    what = "a GPU" if device == "cuda" else "an NPU"
    assert f"must find {what}" in done.stderr and "there is none" in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert len(done.stderr.splitlines()) == 2
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.skipif(_has("triton"), reason="the error is that of an environment without triton")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "cpu"], "triton must be installed to run kernels"),
        (["--device", "ascend910b3", "--compile-only"], "triton-ascend must be installed"),
    ],
)
def test_a_compiler_that_is_not_here_is_named_with_what_to_install(
    arguments: list[str], words: str
) -> None:
    """Exit code 5, and the package."""
    done = _program(*arguments)

    assert done.returncode == 5, done.stderr
    assert words in done.stderr and "pip install" in done.stderr
    assert "Traceback" not in done.stderr


def test_asking_for_help_imports_neither_torch_nor_optuna() -> None:
    """The command line answers in under a second because it loads little."""
    code = (
        "import sys\nfrom hp_tune.commands import cli\n"
        "cli.main(['kernels', '--help'], standalone_mode=False)\n"
        "heavy = {'torch', 'optuna', 'triton', 'rich', 'multiprocessing'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--compile-only" in done.stdout


def test_types_of_the_stand_in_are_those_of_a_judge() -> None:
    """What stands in has what is stood in for."""
    from hp_tune.kernels.verdict import Judge

    def takes(judge: Judge) -> Any:
        return judge

    assert takes(StandInJudge())
