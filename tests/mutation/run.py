"""Do the tests notice? Put a small fault into the sources, run the tests that reach it, repeat.

A copy of the packages is changed, never the working tree; a run that was stopped goes on. Which
tests reach a line is measured once (coverage of each test); a fault runs those, the quick ones
first, until one of them fails. What survives is printed: either a test is missing, or the change
changes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mutants import Mutant, sample

ROOT = Path(__file__).parents[2]
PACKAGES = ("hp-comm", "hp-cp")
LEFT_OUT = ("_triton.py", "launch.py", "launch_heads.py", "launch_merge.py")
"""Run on devices and under the interpreter only, which these tests do not start."""
SECONDS_OF_TESTS = 30.0
"""Recorded time of the tests that one fault runs; where more reach it, a part drawn by chance."""


def main() -> int:
    """Run the mutants; return 0: survivors are for people to judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one mutant")
    parser.add_argument("--work", type=Path, default=ROOT / ".mutation", help="folder of the copy")
    parser.add_argument("--only", default="", help="part of the paths of the sources to change")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the fault is taken out on the way
    copy = asked.work / "copy"
    if not (asked.work / "coverage.json").is_file():
        _copy(copy)
        _measure(copy, asked.work)
    reached = json.loads((asked.work / "coverage.json").read_text())
    cost = json.loads((asked.work / "seconds.json").read_text())
    sources = [
        path
        for package in PACKAGES
        for path in sorted((copy / "packages" / package / "src").rglob("*.py"))
        if path.name not in LEFT_OUT and asked.only in str(path)
    ]
    _warm(copy)
    results: Counter[str] = Counter()
    path = asked.work / f"results-{asked.seed}.jsonl"
    with path.open("a+", encoding="utf-8") as record:
        record.seek(0)
        there = {row["number"]: row for row in map(json.loads, record)}  # of a run that was stopped
        results.update(row["outcome"] for row in there.values())
        for number, mutant in enumerate(sample(sources, asked.count, asked.seed)):
            if number in there:
                continue
            where = str(mutant.path.relative_to(copy))
            lines = reached.get(where, {})
            # a line that runs at import is reached by no test alone, and by all of its file's
            reaching = lines.get(str(mutant.line)) or sorted(
                {t for ts in lines.values() for t in ts}
            )
            tests = _chosen(reaching, cost, f"{asked.seed}-{number}")
            start = time.monotonic()
            outcome = _run(mutant, tests, asked.timeout, asked.work) if tests else "not reached"
            results[outcome] += 1
            row = {
                "number": number, "outcome": outcome,
                "where": f"{where}:{mutant.line}", "change": mutant.change(),
                "operator": mutant.operator, "tests": len(tests),
                "seconds": round(time.monotonic() - start, 1),
            }  # fmt: skip
            record.write(json.dumps(row) + "\n")
            record.flush()
            if outcome in ("survived", "not reached"):
                print(f"{outcome:11}  {row['where']}  {row['change']}", flush=True)
    total = sum(results.values())
    print(f"{total} mutants, seed {asked.seed}: {dict(results)}")
    return 0


def _copy(copy: Path) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    for name in ("packages", "conftest.py", "pyproject.toml"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, copy / name)


def _tests(copy: Path) -> list[str]:
    return [str(copy / "packages" / package / "tests") for package in PACKAGES]


def _measure(copy: Path, work: Path) -> None:
    """Run all tests once; write which of them reach each line, and how long each takes."""
    data, report = work / "coverage.sqlite", work / "seconds.xml"
    sources = [f"--cov={copy / 'packages' / package / 'src'}" for package in PACKAGES]
    env = {**os.environ, "COVERAGE_FILE": str(data), "PYTHONPATH": _python_path(copy)}
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *sources,
        "--cov-context=test", "--cov-report=", f"--junitxml={report}", *_tests(copy),
    ]  # fmt: skip
    code = subprocess.run(command, cwd=copy, env=env, check=False).returncode
    if code not in (0, 1):
        raise SystemExit(f"the tests could not be run: pytest ended with {code}")
    _write_measured(copy, work, data, report)


def _write_measured(copy: Path, work: Path, data: Path, report: Path) -> None:
    from coverage import CoverageData

    seconds, failed = {}, set()
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name', '')}"
        seconds[name] = float(case.get("time", "0"))
        if case.find("failure") is not None or case.find("error") is not None:
            failed.add(name)  # too slow under coverage, say: it can't tell a fault from itself
    found = CoverageData(str(data))
    found.read()
    reached: dict[str, dict[str, list[str]]] = {}
    for path in found.measured_files():
        contexts = found.contexts_by_lineno(path)
        reached[str(Path(path).relative_to(copy))] = {
            str(line): sorted({test.partition("|")[0] for test in tests if test} - failed)
            for line, tests in contexts.items()
        }
    if failed:
        print(f"not used, since they fail without a fault: {', '.join(sorted(failed))}")
    (work / "coverage.json").write_text(json.dumps(reached))
    (work / "seconds.json").write_text(json.dumps(seconds))


def _python_path(copy: Path) -> str:
    return os.pathsep.join(str(path) for path in sorted((copy / "packages").glob("*/src")))


def _chosen(tests: Sequence[str], cost: dict[str, float], seed: str) -> list[str]:
    """Return tests of at most `SECONDS_OF_TESTS`, the quickest first.

    Half of the time is for the quickest of all: each of those says something else. The slow ones
    run the same whole steps in many variants, of which some are drawn.
    """
    quickest = sorted(tests, key=lambda test: cost.get(test, 1.0))
    drawn = random.Random(seed).sample(list(tests), len(tests))
    kept: dict[str, float] = {}
    for order, limit in ((quickest, SECONDS_OF_TESTS / 2), (drawn, SECONDS_OF_TESTS)):
        for test in order:
            seconds = cost.get(test, 1.0)
            if not kept or sum(kept.values()) + seconds <= limit:
                kept.setdefault(test, seconds)
    return sorted(kept, key=kept.__getitem__)


def _warm(copy: Path) -> None:
    """Import what is slow and not ours once; a fork of this process starts with it."""
    sys.path[:0] = _python_path(copy).split(os.pathsep)
    os.environ["PYTHONPATH"] = _python_path(copy)  # of the processes that tests start
    os.chdir(copy)
    import pytest  # noqa: F401
    import torch.distributed.tensor
    import torch.testing  # noqa: F401

    assert not [name for name in sys.modules if name.startswith("hp_")], "ours must be read anew"


def _run(mutant: Mutant, tests: list[str], timeout: float, work: Path) -> str:
    original = mutant.path.read_text()
    mutant.path.write_text(mutant.code())
    try:
        child = os.fork()
        if child == 0:
            _child(tests, work / "last.log")
        return _verdict(child, timeout)
    finally:
        mutant.path.write_text(original)


def _child(tests: list[str], log: Path) -> None:
    """Run the tests and leave; never returns."""
    code = 3
    try:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        import pytest

        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))
    except BaseException:  # whatever it is, it goes to the log: a fork must not return from here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _verdict(child: int, timeout: float) -> str:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            # 1: a test failed; 2 and 4: a test file or a conftest could not import the changed code
            if code in (3, 5):
                raise SystemExit(f"pytest itself ended with {code}: see the log beside the results")
            return "survived" if code == 0 else "killed"
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "killed (no end)"


if __name__ == "__main__":
    raise SystemExit(main())
