"""verify_ranks: one small collective, one verdict on all ranks, and no hang for who has no plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from hp_comm.agreement import HEADER_BYTES
from hp_mesh.testing import count_collectives, ranks
from hp_tune import RankMismatchError, load, search, verify_ranks
from hp_tune.clusters.cluster_files import read_cluster
from hp_tune.models.hf_config import read_model
from hp_tune.plans.plan import PlanFile
from hp_tune.plans.plan_file import write
from hp_tune.workload import Workload


def plan(seq_len: int = 65536) -> PlanFile:
    """The plan of Qwen2.5-7B on one Atlas node."""
    model, cluster = read_model("Qwen2.5-7B"), read_cluster("atlas-800t-a2")
    found = search(model, cluster, Workload(seq_len=seq_len, cp_size=8), overlap=False).plan
    assert found is not None
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A written plan."""
    found = tmp_path / "plan.json"
    write(plan(), found)
    return found


def verdicts(errors: list[BaseException | None]) -> set[str]:
    """What the ranks raised, which must be the one type."""
    assert all(type(error) is RankMismatchError for error in errors), errors
    return {error.message for error in errors if isinstance(error, RankMismatchError)}


def test_equal_plans_cost_one_small_all_gather(path: Path) -> None:
    """A plan in memory and the path of the same one agree; every rank gets the plan back."""
    held = load(path)

    def on(rank: int) -> str:
        with count_collectives() as counted:
            found = verify_ranks(held if rank == 0 else path)
        assert (counted.count(), counted.count("preflight")) == (0, 1), "only the comparison"
        assert counted.bytes("preflight") == 2 * HEADER_BYTES
        return found.digest

    assert set(ranks(3).run(on)) == {held.digest}


def test_another_plan_on_some_ranks_is_one_error_that_names_them(path: Path) -> None:
    """Digests and ranks, the same words everywhere."""
    other = plan(32768)

    def on(rank: int) -> None:
        verify_ranks(other if rank in (1, 3) else path)

    (text,) = verdicts(ranks(4).errors(on))
    assert text == (
        "verify_ranks: the plan's digest must be the same on all 4 ranks, not "
        f"{load(path).digest[:12]} on ranks 0, 2 and {other.digest[:12]} on ranks 1, 3"
    )


def test_one_edited_byte_on_one_rank_is_found(path: Path, tmp_path: Path) -> None:
    """The copy no longer matches its own digest; who has it and why is said on every rank."""
    copy = tmp_path / "copy.json"
    copy.write_text(path.read_text().replace('"load_balance": true', '"load_balance": false', 1))

    def on(rank: int) -> None:
        verify_ranks(copy if rank == 2 else path)

    (text,) = verdicts(ranks(3).errors(on))
    assert "one that cannot be used" in text and "changed after it was written" in text
    assert text.endswith("on rank 2")


def test_a_rank_without_a_plan_does_not_hang_the_others(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No path and no HP_TUNE_PLAN, a file that is not there, and something that is no plan."""
    monkeypatch.delenv("HP_TUNE_PLAN", raising=False)

    def on(rank: int) -> None:
        verify_ranks([path, None, tmp_path / "none.json", 7][rank])  # type: ignore[arg-type]

    (text,) = verdicts(ranks(4).errors(on))
    assert "none (HP_TUNE_PLAN is not set) on rank 1" in text
    assert "none.json: cannot be read" in text and "int is no plan" in text
    (text,) = verdicts(ranks(2).errors(lambda _: verify_ranks()))
    assert text.endswith("not none (HP_TUNE_PLAN is not set) on ranks 0, 1")


def test_the_environment_names_the_plan(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HP_TUNE_PLAN for load and verify_ranks alike; one process alone is enough."""
    monkeypatch.setenv("HP_TUNE_PLAN", str(path))

    assert load().digest == load(path).digest == verify_ranks().digest
    assert {found.digest for found in ranks(2).run(lambda _: verify_ranks())} == {load().digest}
