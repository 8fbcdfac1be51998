"""Check every call that our NPU code makes against the installed torch_npu; needs no device.

``nox -s npu_schema`` makes the environment and calls this. The checks are the ``check_*.py`` beside
this file, which a plain ``pytest`` does not collect: they import torch_npu, and that works only
with the stand-ins of `stub` on the loader's path. They run in a process of their own, because a
stand-in that answers wrongly ends the process, with a signal and no traceback.

It says which calls were checked. That is a statement about names, types, shapes, dtypes and
autograd; no number is computed here, and nothing runs on an NPU.
"""

from __future__ import annotations

import collections
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main", "run", "table"]

HERE = Path(__file__).parent
VARIED = ("layout", "mode", "dtype")


def main(arguments: Sequence[str]) -> int:
    sys.path.insert(0, str(HERE))
    import stub

    try:
        libraries = stub.build()
    except stub.StubError as error:
        sys.stderr.write(f"npu_schema: {error}\n")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "calls.jsonl"
        env = {
            **os.environ,
            "LD_LIBRARY_PATH": os.pathsep.join(
                filter(None, [str(libraries), os.environ.get("LD_LIBRARY_PATH")])
            ),
            # torch loads torch_npu by itself otherwise, in the middle of its own import
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "HP_NPU_SCHEMA_REPORT": str(report),
            "HP_PREFLIGHT": "off",  # ranks of a fake group have nothing to compare
            "OMP_NUM_THREADS": "1",
        }
        pytest = [sys.executable, "-m", "pytest", "-o", "python_files=check_*.py"]
        # warnings are the vendor's here, and of how torch loads it
        pytest += ["-p", "no:cacheprovider", "-o", "filterwarnings=default", "-q"]
        began = time.monotonic()
        problem = run([*pytest, *(arguments or [str(HERE)])], env)
        rows = [json.loads(line) for line in report.read_text().splitlines() if line]
    sys.stdout.write(table(rows) + "\n")
    _, version = stub.installed()
    operators = len({row["operator"] for row in rows})
    sys.stdout.write(
        f"{len(rows)} calls of {operators} operators checked against torch_npu {version}'s "
        f"schemas, not run on an NPU ({time.monotonic() - began:.0f} s)\n"
    )
    if problem:
        sys.stderr.write(f"npu_schema: {problem}\n")
    return 1 if problem else 0


def run(command: Sequence[str], env: dict[str, str]) -> str:
    """Run a command and pass its output on; return what went wrong, empty if nothing did."""
    Path(env["HP_NPU_SCHEMA_REPORT"]).touch()
    last: collections.deque[str] = collections.deque(maxlen=40)
    with subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None, "it was asked for"
        for line in process.stdout:
            sys.stdout.write(line)
            last.append(line)
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        return f"the checks aborted with signal {name}; the last lines were\n{''.join(last)}"
    if process.returncode:
        return f"the checks failed (pytest: {process.returncode})"
    return ""


def table(rows: Sequence[dict[str, str]]) -> str:
    """Lay out the checked calls: a line per operator and caller, what varied, how many."""
    groups: dict[tuple[str, str], list[dict[str, str]]] = collections.defaultdict(list)
    for row in rows:
        groups[row["operator"], row["from"]].append(row)
    lines = [("operator", *VARIED, "called by", "calls")]
    for (operator, caller), members in sorted(groups.items()):
        varied = (sorted({row[name] for row in members} - {""}) for name in VARIED)
        lines.append((operator, *map(" ".join, varied), caller, str(len(members))))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
