"""A new study without Optuna: the same records as Optuna's, and left to it where it is more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import optuna
import pytest

from hp_tune.clusters.cluster_files import read_cluster
from hp_tune.models.hf_config import read_model
from hp_tune.searching.engine import search
from hp_tune.searching.result import Result
from hp_tune.study import studies, trials
from hp_tune.study.place import JournalPlace
from hp_tune.workload import Workload

UNLIKE = ("worker_id", "datetime_start", "datetime_complete")
"""What differs from one search to the next."""


def searched(path: Path, objective: Literal["time", "pareto"] = "time") -> Result:
    """A search of eight points, four of them valid."""
    return search(
        read_model("Qwen2.5-7B"), read_cluster("atlas-800t-a2"),
        Workload(seq_len=65536, cp_size=8), overlap=False, objective=objective, study=path,
    )  # fmt: skip


def records(path: Path) -> list[dict[str, Any]]:
    """The lines of a Journal without what differs."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: one[key] for key in one if key not in UNLIKE} for one in lines]


@pytest.mark.parametrize("objective", ["time", "pareto"])
def test_the_file_is_the_one_that_optuna_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: Literal["time", "pareto"]
) -> None:
    """Record by record, one value or two; so is what Optuna then reads."""
    searched(tmp_path / "ours.journal", objective)
    monkeypatch.setattr(JournalPlace, "create", lambda *_: False)
    searched(tmp_path / "optunas.journal", objective)

    ours, optunas = records(tmp_path / "ours.journal"), records(tmp_path / "optunas.journal")
    assert ours == optunas
    assert [list(one) for one in ours] == [list(one) for one in optunas]
    streams = 6 if objective == "pareto" else 0  # kv_chunks=4 and 8 in three degrees
    assert len(ours) == 2 + 8 + streams
    assert len(studies.read_study(tmp_path / "ours.journal")[2]) == 8 + streams


def test_optuna_is_imported_for_what_is_more_than_a_new_study(tmp_path: Path) -> None:
    """Not for the first search, nor for the same one again; for the rest of a part of it."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from hp_tune.clusters.cluster_files import read_cluster\n"
        "from hp_tune.models.hf_config import read_model\n"
        "from hp_tune.searching.engine import search\n"
        "from hp_tune.workload import Workload\n"
        "for variants in (False, False, True):\n"
        "    result = search(read_model('Qwen2.5-7B'), read_cluster('atlas-800t-a2'),\n"
        "                    Workload(seq_len=65536, cp_size=8), variants=variants,\n"
        "                    study=Path('s.journal'))\n"
        "    found = result.study\n"
        "    print('optuna' in sys.modules, found.added > 0, found.found > 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )

    assert done.stdout.splitlines() == [
        "False True False",
        "False False True",
        "True True True",
    ]
    points = [t.user_attrs["point"] for t in studies.read_study(tmp_path / "s.journal")[2]]
    assert len(points) == len(set(points)) > 8


def test_every_other_file_is_left_to_optuna(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torn line, a record of another kind, one more study: all are read by Optuna itself."""
    path = tmp_path / "s.journal"
    searched(path)
    whole = path.read_bytes()
    opened: list[Path] = []
    real = trials.study_in
    monkeypatch.setattr(trials, "study_in", lambda *a, **k: (opened.append(path), real(*a, **k))[1])

    assert (searched(path).study.found, opened) == (8, [])
    more = b'{"op_code":8,"worker_id":"w","trial_id":0,"user_attr":{"note":"mine"}}\n'
    for content, dropped in ((whole[:-9], 1), (whole + more, 0), (b"", 0)):
        path.write_bytes(content)
        opened.clear()
        recorded = searched(path).study
        assert opened
        assert recorded.added + recorded.found == 8
        assert (recorded.dropped_bytes > 0) == bool(dropped)
        assert len(studies.read_study(path)[2]) == 8


def test_without_hard_links_optuna_makes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems have none; nothing is left beside it."""

    def refuse(*_: object) -> None:
        raise OSError("Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    recorded = searched(tmp_path / "s.journal").study

    assert recorded.added == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.journal", "s.journal.flock"]
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(tmp_path / "s.journal"))
    )
    assert len(storage.get_all_studies()) == 1


def test_what_a_killed_search_left_is_cleared_away_and_nothing_else(tmp_path: Path) -> None:
    """Killed between the two names of the file, which the user then moves: it stays whole."""
    path, left = tmp_path / "s.journal", tmp_path / ".s.journal.new"
    searched(path)
    os.link(path, left)
    path.rename(tmp_path / "kept.journal")
    whole = (tmp_path / "kept.journal").read_bytes()

    assert searched(path).study.added == 8
    assert (tmp_path / "kept.journal").read_bytes() == whole
    assert not left.exists()
