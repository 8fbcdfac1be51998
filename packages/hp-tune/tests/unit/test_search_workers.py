"""Many workers, signals, kills: every point is run once, whoever is stopped (B22, B23).

Trials run nothing (`_fake_search`), processes, locks and files are real.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from hp_tune.study.owner import is_gone, this_process
from hp_tune.study.studies import read_study

PROGRAM = Path(__file__).with_name("_fake_search.py")
QWEN = ["--model", "Qwen2.5-7B", "--cluster", "atlas-800t-a2", "--cp", "8", "--seq", "64K"]
SEARCH = ["search", *QWEN, "--mode", "measured", "--space", "overlap=off"]
POINTS = 4
"""Valid ones; four more are rejected."""
KILLS, SEED = 6, 20261130


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(*arguments: str, seconds: float = 0.0, stays: int = 0, out: str = "plan.json"
          ) -> subprocess.Popen[str]:  # fmt: skip
    """Start a worker of the study ``s.journal``, or where ``arguments`` say.

    Trial ``stays`` waits for a process that does not end; those before it have one each, too.
    """
    where = [] if "--storage" in arguments else ["--study", "s.journal"]
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), "log", str(seconds), str(stays),
         *SEARCH, *where, *arguments, "--out", out],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(worker: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr."""
    out, err = worker.communicate(timeout=600)
    return worker.returncode, out, err


def wait_for(condition: Any, seconds: float = 300.0) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def log(what: str) -> list[str]:
    """The configurations that the workers' trials wrote down."""
    lines = Path("log").read_text().splitlines() if Path("log").exists() else []
    return [line.split(";")[2] for line in lines if line.split(";")[0] == what]


def children() -> list[int]:
    """The processes that trials have started and written down."""
    lines = Path("log").read_text().splitlines() if Path("log").exists() else []
    return [int(line.split(";")[0].split()[1]) for line in lines if line.startswith("child ")]


def complete() -> set[str]:
    """The configurations whose end is recorded."""
    if not Path("s.journal").exists() or not Path("s.journal").stat().st_size:
        return set()
    trials = read_study(Path("s.journal"))[2]
    return {t.user_attrs["label"] for t in trials if t.state == TrialState.COMPLETE}


def states(path: str = "s.journal") -> Counter[str]:
    """How many trials are in each state; each point has one."""
    trials = read_study(Path(path))[2]
    points = Counter(trial.user_attrs["point"] for trial in trials)
    assert set(points.values()) <= {1}
    return Counter(trial.state.name for trial in trials)


DONE = Counter(COMPLETE=POINTS, PRUNED=4)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The plan of a search that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "log", "0", "0", *SEARCH, "--study", "s.journal"],
        cwd=folder, capture_output=True, timeout=600, check=True,
    )  # fmt: skip
    assert done.returncode == 0
    found: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    return found


def plan(path: str = "plan.json") -> dict[str, Any]:
    """A written plan."""
    found: dict[str, Any] = json.loads(Path(path).read_text())
    return found


def test_workers_share_the_points_of_a_measured_search(undisturbed: dict[str, Any]) -> None:
    """All exit 0 with the same plan; each point is run by one of them; one runs the finals.

    Meanwhile another process reads the file with Optuna alone, as optuna-dashboard does.
    """
    workers = [start(seconds=0.1, out=f"{i}.json") for i in range(4)]
    seen: list[int] = []
    while any(worker.poll() is None for worker in workers):
        if Path("s.journal").exists():
            seen.append(_trials_that_optuna_reads("s.journal"))
        time.sleep(0.02)
    results = [finish(worker) for worker in workers]
    seen.append(_trials_that_optuna_reads("s.journal"))

    assert [code for code, _, _ in results] == [0] * 4, results
    assert all("Traceback" not in err for _, _, err in results)
    assert Counter(log("end")) == Counter(log("begin"))
    assert len(log("begin")) == len(set(log("begin"))) == POINTS
    assert len(log("finals")) == 1
    assert states() == DONE
    assert all(plan(f"{i}.json") == undisturbed for i in range(4))
    assert seen == sorted(seen)
    assert seen[-1] == 8


def _trials_that_optuna_reads(path: str) -> int:
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(path))
    return sum(
        len(optuna.load_study(study_name=name, storage=storage).trials)
        for name in optuna.get_all_study_names(storage)
    )


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"]
)
def test_a_signal_ends_the_trial_and_its_children_and_says_what_is_best(
    number: signal.Signals, code: int, undisturbed: dict[str, Any]
) -> None:
    """The point waits again, nothing is left running, the printed command goes on from there."""
    worker = start(seconds=0.05, stays=3)
    wait_for(lambda: len(children()) == 3)
    worker.send_signal(number)
    found, _, err = finish(worker)

    assert found == code, err
    assert "Traceback" not in err
    assert "hp-tune: best so far of " in err
    assert "resume with: hp-tune search --model Qwen2.5-7B" in err
    recorded, begun = complete(), len(log("begin"))
    assert len(recorded) == 2
    assert set(states()) <= {"COMPLETE", "PRUNED", "WAITING"}  # nothing says that it runs
    for child in children():
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
    assert finish(start())[0] == 0
    assert len(log("begin")[begun:]) == POINTS - len(recorded)
    assert not recorded & set(log("begin")[begun:])
    assert states() == DONE
    assert plan() == undisturbed


def test_killed_searches_resume_with_nothing_lost_or_repeated(undisturbed: dict[str, Any]) -> None:
    """SIGKILL at moments of a seeded generator, some with a torn last line besides."""
    rng = random.Random(SEED)
    for kill in range(KILLS):
        recorded, begun = complete(), len(log("begin"))
        worker = start(seconds=0.05)
        wanted = begun + rng.randrange(3)  # while it starts, or from one of its trials on
        while len(log("begin")) < wanted and worker.poll() is None:
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.8 if wanted == begun else 0.1))
        worker.kill()
        worker.communicate(timeout=600)
        if kill % 2 and Path("s.journal").exists():
            content = Path("s.journal").read_bytes()
            torn = content + b'{"op_code":6,"worker_id":"' + bytes([97 + kill])
            Path("s.journal").write_bytes(torn)
        assert not recorded & set(log("begin")[begun:])
    recorded, begun = complete(), len(log("begin"))
    code, _, err = finish(start())

    assert code == 0, err
    assert states() == DONE
    # a trial that was cut off begins again; one whose end is recorded does not
    assert len(log("begin")[begun:]) == POINTS - len(recorded)
    assert plan() == undisturbed


def test_a_budget_is_exit_four_and_a_second_worker_ends_the_search(
    undisturbed: dict[str, Any],
) -> None:
    """The partial plan says that it is one."""
    code, out, err = finish(start("--max-trials", "3"))
    assert code == 4
    assert "hp-tune: the budget of 3 trials is used with 1 of 4 points left; best so far" in err
    assert "ended    the budget of 3 trials" in out
    assert plan()["entries"][0]["best"]["source"] == "measured"
    assert finish(start())[0] == 0
    assert plan() == undisturbed


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:///study.db",
        pytest.param(
            os.environ.get("TEST_DATABASE_URL", ""),
            marks=pytest.mark.skipif(
                "TEST_DATABASE_URL" not in os.environ,
                reason="TEST_DATABASE_URL must name an empty database, such as "
                "postgresql+psycopg://postgres@localhost/test",
            ),
            id="server",
        ),
    ],
)
def test_two_processes_share_a_database(undisturbed: dict[str, Any], url: str) -> None:
    """`--storage`: made once, points run once, no lock is left behind."""
    workers = [start("--storage", url, seconds=0.05, out=f"{i}.json") for i in range(2)]
    results = [finish(worker) for worker in workers]

    assert [code for code, _, _ in results] == [0, 0], results
    assert sorted(Counter(log("end")).values()) == [1] * POINTS
    storage = optuna.storages.RDBStorage(url)
    (name,) = optuna.get_all_study_names(storage)
    trials = optuna.load_study(study_name=name, storage=storage).get_trials()
    assert Counter(trial.state for trial in trials) == {
        TrialState.COMPLETE: POINTS, TrialState.PRUNED: 4
    }  # fmt: skip
    assert all(plan(f"{i}.json") == undisturbed for i in range(2))
    optuna.delete_study(study_name=name, storage=storage)
    storage.engine.dispose()


def test_an_owner_is_gone_when_its_process_boot_or_time_is() -> None:
    """On this machine that is seen; a claim from another one runs out."""
    me = this_process()
    assert not is_gone(me)
    assert is_gone({**me, "start_time": 1})
    assert is_gone({**me, "boot_id": "another"})
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert is_gone({**me, "pid": child.pid})
    assert not is_gone({**me, "host": "elsewhere"})
    assert is_gone({**me, "host": "elsewhere", "until": time.time() - 1})
    assert is_gone({})
