"""The study file: every point once, whatever happens to the writers."""

from __future__ import annotations

import fcntl
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from hp_tune.clusters.cluster_files import read_cluster
from hp_tune.errors import StudyError
from hp_tune.models.hf_config import read_model
from hp_tune.searching.engine import Result, search
from hp_tune.study.journal import locked, repair_tail
from hp_tune.study.studies import read_study
from hp_tune.workload import Workload


def run(
    path: Path, told: list[str] | None = None, *, overlap: bool = False, **fields: Any
) -> Result:
    """Search with a study."""
    workload = Workload(**{"seq_len": 32768, "cp_size": 8, "handoffs": True, **fields})
    return search(
        read_model("Qwen2.5-7B"), read_cluster("atlas-800t-a2"), workload,
        study=path, overlap=overlap, tell=(told if told is not None else []).append,
    )  # fmt: skip


def points(path: Path) -> Counter[str]:
    """How often each point is in the study."""
    return Counter(trial.user_attrs["point"] for trial in read_study(path)[2])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the study goes."""
    return tmp_path / "s.journal"


def test_every_point_is_a_trial_with_its_numbers_or_its_reason(path: Path) -> None:
    """Priced points are complete; rejected ones are pruned with rule, numbers and hint."""
    result = run(path)
    _, attributes, trials = read_study(path)

    by_state = Counter(trial.state for trial in trials)
    assert by_state == {
        TrialState.COMPLETE: len(result.ranking),
        TrialState.PRUNED: len(result.rejected),
    }
    assert attributes["inputs"]["workload.seq_len"] == 32768
    best = min((t for t in trials if t.value is not None), key=lambda t: t.value or 0)
    assert best.params == result.ranking[0].config.model_dump()
    assert best.user_attrs["bytes_sent"] == result.ranking[0].prediction.bytes_sent
    assert {"forward_ms", "memory", "terms", "imbalance"} <= set(best.user_attrs)
    for trial in trials:
        if trial.state == TrialState.PRUNED:
            assert {"rule", "message", "numbers", "hint"} <= set(trial.user_attrs)


def test_optuna_opens_the_file_by_itself(path: Path) -> None:
    """The file is Optuna's own format: dashboard and scripts need nothing of ours."""
    result = run(path)
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    (name,) = optuna.get_all_study_names(storage)
    study = optuna.load_study(study_name=name, storage=storage)

    assert study.best_params == result.ranking[0].config.model_dump()


def test_a_second_search_adds_nothing_and_a_larger_space_only_what_is_new(path: Path) -> None:
    """Resume is the set difference of points; async joining the space keeps old results."""
    first, again = run(path).study, run(path).study
    assert first is not None
    assert again is not None
    assert (first.added, first.found, again.added, again.found) == (8, 0, 0, 8)

    grown = run(path, overlap=True).study
    assert grown is not None
    assert grown.found == 8
    assert grown.added == 7
    assert set(points(path).values()) == {1}


def test_any_torn_tail_is_cut_and_its_point_comes_back(path: Path, tmp_path: Path) -> None:
    """Cut the file at 25 random bytes: the next search ends with every point once."""
    run(path)
    whole, expected = path.read_bytes(), set(points(path))
    rng = random.Random(5)
    for cut in [1, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(23))]:
        torn = tmp_path / "torn.journal"
        torn.write_bytes(whole[:cut])
        told: list[str] = []
        run(torn, told)
        assert set(points(torn)) == expected
        assert set(points(torn).values()) == {1}
        ends = whole[:cut].endswith(b"\n") or whole[cut : cut + 1] == b"\n"
        assert bool(told) == (not ends)


def test_a_tail_of_zeros_after_a_power_cut_is_cut_too(path: Path) -> None:
    """Some file systems leave the length and lose the bytes."""
    run(path)
    good = path.read_bytes()
    path.write_bytes(good + b"\0" * 100)

    assert repair_tail(path) == 100
    assert path.read_bytes() == good


def test_damage_in_the_middle_is_refused_and_left_alone(path: Path) -> None:
    """Only a tail can be torn; anything else is for a person to decide."""
    run(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"garbage\n", *lines[3:]]))
    before = path.read_bytes()

    with pytest.raises(StudyError, match=r"broken in line 4 of \d+"):
        run(path)
    assert path.read_bytes() == before


def test_foreign_files_and_foreign_studies_are_refused(path: Path, tmp_path: Path) -> None:
    """Another search, other inputs, another tool, no journal at all: named, never overwritten."""
    run(path)
    with pytest.raises(StudyError, match=r"another search .*workload\.seq_len"):
        run(path, seq_len=65536)
    with pytest.raises(StudyError, match=r"other inputs: workload\.dtype differ"):
        run(path, dtype="fp16")
    letter = tmp_path / "letter.txt"
    letter.write_text("dear diary")
    with pytest.raises(StudyError, match="is not an Optuna journal"):
        run(letter)
    assert letter.read_text() == "dear diary"
    theirs = tmp_path / "theirs.journal"
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(theirs))
    )
    optuna.create_study(study_name="theirs", storage=storage)
    with pytest.raises(StudyError, match="'theirs'"):
        run(theirs)


def test_lock_names_its_owner_and_gives_up(path: Path) -> None:
    """A held lock is waited for and said; the error names the process."""
    with (
        locked(path),
        pytest.raises(StudyError, match=f"locked by process {os.getpid()}"),
        locked(path, timeout=0.1),
    ):
        raise AssertionError("two holders")
    with locked(path, timeout=0.1):
        descriptor = os.open(f"{path}.flock", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)


def test_a_stale_link_lock_of_optuna_does_not_stop_a_search(path: Path) -> None:
    """A writer killed inside an append leaves Optuna's link; it is broken after seconds."""
    run(path)
    Path(f"{path}.lock").symlink_to(path)

    grown = run(path, overlap=True).study
    assert grown is not None
    assert grown.added == 7
