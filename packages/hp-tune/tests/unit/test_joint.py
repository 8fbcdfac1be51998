"""Configurations and launches together: the whole space where it is small, a sample where not."""

from __future__ import annotations

from pathlib import Path

import pytest

from hp_tune.clusters.cluster_files import read_cluster
from hp_tune.errors import UsageError
from hp_tune.models.hf_config import read_model
from hp_tune.searching import joint
from hp_tune.searching.engine import search
from hp_tune.searching.joint import MOST_SAMPLED, search_joint
from hp_tune.searching.restriction import read_restriction
from hp_tune.searching.result import Result
from hp_tune.study.studies import read_study
from hp_tune.workload import Workload


@pytest.fixture(scope="module")
def result() -> Result:
    """Colossal and one hybrid: 1 + 64 x 64 points."""
    workload = Workload(seq_len=65536, cp_size=8)
    return search(
        read_model("Qwen2.5-7B"), read_cluster("atlas-800t-a2"), workload, overlap=False,
        only=read_restriction("u=1,4 lb=off", 8),
    )  # fmt: skip


def test_a_small_space_is_priced_whole_and_recorded_once(result: Result, tmp_path: Path) -> None:
    """A second search adds nothing; the best launch of each kernel is the best of its own."""
    path = tmp_path / "s.journal"
    found = search_joint(result, "ascend910b3", study=path)
    again = search_joint(result, "ascend910b3", study=path)
    trials = read_study(path)[2]

    assert found == again
    assert found.size == found.recorded == len(trials) == 64 * 64 + 1
    values = {t.user_attrs["point"]: t.value for t in trials if t.value is not None}
    assert min(values.values()) == found.ranking[0].ms
    hybrid = next(p for p in found.ranking if p.ranked.config.ulysses_degree == 4)
    assert set(hybrid.launches) == {"pack", "unpack"}
    assert any(t.state.name == "PRUNED" for t in trials)  # tiles that do not fit on the chip


def test_a_large_space_is_sampled_the_same_with_the_same_seed(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most so many points, and near the best of all."""
    whole = search_joint(result, "ascend910b3")
    monkeypatch.setattr(joint, "MOST_PRICED", 100)
    monkeypatch.setattr(joint, "MOST_SAMPLED", 60)
    first, second = (
        search_joint(result, "ascend910b3", seed=3, study=tmp_path / f"{i}.journal")
        for i in range(2)
    )
    points = [
        [(t.user_attrs["point"], t.value) for t in read_study(tmp_path / f"{i}.journal")[2]]
        for i in range(2)
    ]

    assert first == second
    assert points[0] == points[1]
    assert first.recorded <= 60 < MOST_SAMPLED
    assert first.ranking[0].ms <= whole.ranking[0].ms * 1.02


def test_the_plan_has_the_launches_of_its_best() -> None:
    """By kernel, as hp-comm's launch configs name them; a note says what they rest on."""
    found = search(
        read_model("Qwen2.5-7B"), read_cluster("atlas-800t-a2"),
        Workload(seq_len=65536, cp_size=8), overlap=False, kernels="ascend910b3",
        only=read_restriction("u=4 lb=off", 8),
    )  # fmt: skip
    assert found.plan is not None
    kernels = found.plan.entries[0].kernels

    assert set(kernels) == {"pack", "unpack"}
    assert set(kernels["pack"]) == {"tile", "programs", "multibuffer"}
    assert any("launches: 4096 of 4096 points priced" in note for note in found.notes)
    with pytest.raises(UsageError, match=r"--kernels \(cuda\) must be an Ascend"):
        search_joint(found, "cuda")
    with pytest.raises(UsageError, match=r"--kernels \('ascend910b33'\).*did you mean"):
        search_joint(found, "ascend910b33")


def test_who_waits_is_shown_what_is_priced_asked_and_recorded(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Configurations, then points; a sampled space has its questions instead of all points."""
    steps: list[tuple[str, int, int]] = []
    search_joint(result, "ascend910b3", study=tmp_path / "s.journal",
                 step=lambda *step: steps.append(step))  # fmt: skip
    labels = [ranked.config.label(8) for ranked in result.ranking]
    size = 64 * 64 + 1

    assert steps[:2] == [(labels[0], 0, 2), (labels[1], 1, 2)]
    assert steps[2:] == [("points recorded", done, size) for done in range(0, size, 100)]
    monkeypatch.setattr(joint, "MOST_PRICED", 100)
    steps.clear()
    search_joint(result, "ascend910b3", step=lambda *step: steps.append(step))
    assert steps[-1] == ("launches asked of TPE", MOST_SAMPLED, MOST_SAMPLED)
