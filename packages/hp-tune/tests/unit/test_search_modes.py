"""Searches that measure, with a measurer that runs nothing: what is run, who wins, what is kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from hp_tune.clusters.cluster import Cluster
from hp_tune.clusters.cluster_files import read_cluster
from hp_tune.errors import AllFailedError, BudgetError, StudyError
from hp_tune.measured.result import Measured
from hp_tune.models.hf_config import read_model
from hp_tune.models.model import Model
from hp_tune.plans.plan_file import load, write
from hp_tune.searching.budget import Budget
from hp_tune.searching.engine import search
from hp_tune.searching.requirement import read_requirement
from hp_tune.searching.result import (
    NothingMeasuredError,
    NothingValidError,
    OutOfBudgetError,
    Result,
)
from hp_tune.study.records import measured_from, measured_to
from hp_tune.study.studies import read_study
from hp_tune.workload import Config, Workload

from ._fake_measurer import FakeMeasurer

WORKLOAD = Workload(seq_len=65536, cp_size=8)
BALANCED = Config(ulysses_degree=1, load_balance=True)
PLAIN, TWO, FOUR = (Config(ulysses_degree=u) for u in (1, 2, 4))


@pytest.fixture(scope="module")
def model() -> Model:
    """Four valid configurations of eight: no Ulysses on 8 ranks, no balance above degree 1."""
    return read_model("Qwen2.5-7B")


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    """One node of eight."""
    return read_cluster("atlas-800t-a2")


@pytest.fixture
def run(model: Model, cluster: Cluster) -> Any:
    """A search of four valid points."""

    def searched(mode: str, measurer: FakeMeasurer, **options: Any) -> Result:
        return search(
            model, cluster, WORKLOAD, mode=mode, measurer=measurer, overlap=False, **options
        )

    return searched


def order(ranked: Sequence[Any]) -> list[Config]:
    """The configurations of a ranking."""
    return [one.config for one in ranked]


def test_measured_runs_every_valid_point_the_cheapest_predicted_first(
    run: Any, model: Model, cluster: Cluster
) -> None:
    """And ranks by what was measured, with the predicted numbers beside it."""
    predicted = search(model, cluster, WORKLOAD, overlap=False)
    fake = FakeMeasurer({BALANCED: 40, FOUR: 30, TWO: 20, PLAIN: 10})
    result = run("measured", fake)

    assert fake.ran == order(predicted.ranking)
    assert order(result.ranking) == [PLAIN, TWO, FOUR, BALANCED]
    assert [one.ms for one in result.ranking] == [10, 20, 30, 40]
    assert result.margin == pytest.approx(1.0)
    assert result.flips == ()
    assert {one.config: one.prediction for one in result.ranking} == {
        one.config: one.prediction for one in predicted.ranking
    }
    assert order(r for r in predicted.ranking if r.config == BALANCED) == [BALANCED]
    assert not fake.finalists  # nothing is near the best


def test_finalists_run_together_and_their_times_decide(run: Any) -> None:
    """What is within a tenth of the fastest trial is timed again, in turns; the rest is behind."""
    trials = {BALANCED: 10.0, FOUR: 10.5, TWO: 10.9, PLAIN: 11.2}
    fake = FakeMeasurer(trials, final_times={BALANCED: 12.0, FOUR: 9.0, TWO: 13.0})
    result = run("measured", fake)

    assert fake.finalists == [[BALANCED, FOUR, TWO]]
    assert order(result.ranking) == [FOUR, BALANCED, TWO, PLAIN]
    assert [one.in_finals for one in result.ranking] == [True, True, True, False]
    assert result.plan.entries[0].best.measured.in_finals


def test_a_tie_goes_to_the_simpler(run: Any) -> None:
    """Within one percent, or three where the intervals meet; further apart the faster wins."""
    for behind, spread, winner in ((1.009, 0.001, FOUR), (1.02, 0.02, FOUR), (1.02, 0.001, TWO)):
        # fewer collectives: 4 is a hybrid as 2 is, and holds less
        fake = FakeMeasurer({TWO: 10, FOUR: 10 * behind, BALANCED: 30, PLAIN: 30}, spread=spread)
        result = run("measured", fake)
        assert result.ranking[0].config == winner, (behind, spread)
        assert any("as fast as" in note for note in result.notes) == (winner == FOUR)


def test_hybrid_runs_what_is_predicted_near_the_best(run: Any) -> None:
    """Within a factor, and a few at least; the others are named, and pruned in the study."""
    fake = FakeMeasurer()
    narrow = run("hybrid", fake, within=1.0, keep=1)
    assert fake.ran == [BALANCED]
    assert order(narrow.outranked) == [FOUR, TWO, PLAIN]
    assert narrow.plan.entries[0].outranked == 3
    three = FakeMeasurer()
    run("hybrid", three, within=1.0, keep=3)
    assert len(three.ran) == 3
    wide = FakeMeasurer()
    run("hybrid", wide, within=10.0, keep=1)
    assert len(wide.ran) == 4


def test_hybrid_runs_what_an_assumed_number_would_put_first(model: Model, cluster: Cluster) -> None:
    """A rival that wins if an assumption is off by three is measured however slow it looks."""
    close = Workload(seq_len=16384, cp_size=16)
    llama = read_model("Llama-3.1-8B")
    flips = {flip.winner for flip in search(llama, cluster, close, overlap=False).flips}
    fake = FakeMeasurer()
    search(llama, cluster, close, overlap=False, mode="hybrid", measurer=fake, within=1.0, keep=1)

    assert flips
    assert set(fake.ran) >= flips


def test_failures_are_data(run: Any, tmp_path: Path) -> None:
    """Each is a failed trial with its class; the rest is ranked; the plan says what failed."""
    failures = {
        BALANCED: Measured("oom", "rank 3 ran out of memory"),
        FOUR: Measured("wrong", "output differs by 0.3"),
    }
    result = run("measured", FakeMeasurer(failures=failures), study=tmp_path / "s.journal")

    assert {one.config: one.measured.outcome for one in result.failed} == {
        BALANCED: "oom",
        FOUR: "wrong",
    }
    assert order(result.ranking) == [PLAIN, TWO]
    assert {(f.outcome, f.reason) for f in result.plan.entries[0].failed} == {
        ("oom", "rank 3 ran out of memory"), ("wrong", "output differs by 0.3")
    }  # fmt: skip
    trials = read_study(tmp_path / "s.journal")[2]
    failed = [trial for trial in trials if trial.state == TrialState.FAIL]
    assert {trial.user_attrs["outcome"] for trial in failed} == {"oom", "wrong"}
    assert all(trial.user_attrs["message"] and trial.value is None for trial in failed)


def test_a_finalist_that_fails_in_the_finals_does_not_win(run: Any) -> None:
    """It is failed, and the others keep their times of the finals."""

    class Fails(FakeMeasurer):
        def finals(self, configs: Sequence[Config]) -> dict[Config, Measured]:
            found = dict(super().finals(configs))
            return {**found, configs[0]: Measured("crash", "rank 1 exited")}

    result = run("measured", Fails({BALANCED: 10, FOUR: 10.5, TWO: 30, PLAIN: 30}))
    assert order(result.ranking)[0] == FOUR
    assert order(result.failed) == [BALANCED]


def test_when_everything_fails_it_is_exit_six_with_the_first_reason(run: Any) -> None:
    """No plan, no winner by prediction in disguise."""
    crash = Measured("crash", "rank 0: Segmentation fault", folder=Path("logs"))
    with pytest.raises(AllFailedError, match=r"all 4 measured trials failed \(crash\).*Segment"
                       ) as error:  # fmt: skip
        run("measured", FakeMeasurer(failures=dict.fromkeys((BALANCED, PLAIN, TWO, FOUR), crash)))
    assert isinstance(error.value, NothingMeasuredError)
    assert error.value.exit_code == 6
    assert error.value.result.plan is None
    assert "logs" in error.value.hint


def test_a_budget_ends_it_with_what_it_has_and_the_same_search_goes_on(
    run: Any, tmp_path: Path
) -> None:
    """Exit code 4, a partial plan; then only the rest is run, and the result is that of one go."""
    path, fake = tmp_path / "s.journal", FakeMeasurer()
    with pytest.raises(BudgetError, match=r"budget of 2 trials is used with 2 of 4 points left"
                       ) as error:  # fmt: skip
        run("measured", fake, study=path, budget=Budget(trials=2))
    assert isinstance(error.value, OutOfBudgetError)
    assert error.value.exit_code == 4
    assert error.value.result.plan is not None
    assert "best so far" in error.value.message
    again = FakeMeasurer()
    resumed = run("measured", again, study=path)
    whole = run("measured", FakeMeasurer())

    assert sorted(map(repr, fake.ran + again.ran)) == sorted(map(repr, order(whole.ranking)))
    assert resumed.plan == whole.plan
    with pytest.raises(BudgetError, match=r"budget of 1e-09 s is used with 4 of 4"):
        run("measured", FakeMeasurer(), budget=Budget(seconds=1e-9))


def test_a_measured_study_keeps_every_number_and_runs_nothing_twice(
    run: Any, tmp_path: Path
) -> None:
    """The value is what was measured; predictions are attributes; finals are kept, too."""
    path, fake = (
        tmp_path / "s.journal",
        FakeMeasurer({BALANCED: 10, FOUR: 10.4, TWO: 20, PLAIN: 21}),
    )
    first = run("hybrid", fake, study=path, keep=2, within=1.0)
    again = FakeMeasurer()
    second = run("hybrid", again, study=path, keep=2, within=1.0)
    _, attributes, trials = read_study(path)

    assert not again.ran
    assert not again.finalists
    assert second.plan == first.plan
    assert second.study.found == 8
    by_state = {state: [t for t in trials if t.state == state] for state in TrialState}
    assert {t.value for t in by_state[TrialState.COMPLETE]} == {10, 10.4}
    assert all(t.user_attrs["predicted_ms"] > 1000 for t in by_state[TrialState.COMPLETE])
    assert {t.user_attrs["rule"] for t in by_state[TrialState.PRUNED]} == {
        "outranked",
        "V03",
        "V05",
    }
    assert len(attributes["finals"]) == 2
    assert attributes["inputs"]["measurer.backend"] == "fake"
    assert not by_state[TrialState.RUNNING] + by_state[TrialState.WAITING]


def test_studies_of_other_modes_measurers_and_choices_are_not_mixed(
    run: Any, tmp_path: Path
) -> None:
    """Predicted and measured values in one study would be ranked together."""
    path = tmp_path / "s.journal"
    run("hybrid", FakeMeasurer(), study=path)

    with pytest.raises(StudyError, match="other inputs: keep differ"):
        run("hybrid", FakeMeasurer(), study=path, keep=2)
    with pytest.raises(StudyError, match=r"another search .*different in mode"):
        run("measured", FakeMeasurer(), study=path)


def test_a_measured_plan_reads_back_and_says_where_its_numbers_are_from(
    run: Any, tmp_path: Path
) -> None:
    """Samples and intervals of every configuration that ran; predictions beside them."""
    plan = run("measured", FakeMeasurer({TWO: 5})).plan
    write(plan, tmp_path / "plan.json")
    found = load(tmp_path / "plan.json").entries[0]

    assert found.best.source == "measured"
    assert found.best.config == TWO
    assert found.best.measured.median_ms == 5
    assert len(found.best.measured.samples_ms) == 3
    assert found.best.forward_ms > 100
    assert found.alternatives[0].vs_best == pytest.approx(
        found.alternatives[0].measured.median_ms / 5
    )
    assert load(tmp_path / "plan.json").made_by["mode"] == "measured"


def test_measurements_survive_a_file() -> None:
    """Numbers that are none, folders, missing counts."""
    for one in (
        FakeMeasurer().trial(TWO),
        Measured("oom", "no room", folder=Path("a") / "b"),
    ):
        again = measured_from(json.loads(json.dumps(measured_to(one))))
        assert repr(again) == repr(one)  # NaN equals nothing, itself included


def test_the_front_is_what_no_other_beats_in_time_and_memory(
    model: Model, cluster: Cluster
) -> None:
    """Two values in the study, one front in the plan; every other point is beaten in both."""
    result = search(model, cluster, WORKLOAD, overlap=False, objective="pareto")
    front = {one.config for one in result.front}

    assert len(front) > 1
    assert result.front[0].config == result.ranking[0].config
    for one in result.ranking:
        beaten = any(
            other.ms <= one.ms and other.memory_bytes <= one.memory_bytes and other is not one
            for other in result.front
        )
        assert beaten == (one.config not in front)
    assert [p.config for p in result.plan.entries[0].front] == [r.config for r in result.front]


def test_pareto_studies_have_two_directions(
    model: Model, cluster: Cluster, run: Any, tmp_path: Path
) -> None:
    """Optuna finds the same front in the file."""
    import optuna

    path = tmp_path / "s.journal"
    result = search(model, cluster, WORKLOAD, overlap=False, objective="pareto", study=path)
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    (study,) = [optuna.load_study(study_name=name, storage=storage)
                for name in optuna.get_all_study_names(storage)]  # fmt: skip

    assert {tuple(sorted(t.params.items())) for t in study.best_trials} == {
        tuple(sorted(one.config.model_dump().items())) for one in result.front
    }
    measured = run("measured", FakeMeasurer(), objective="pareto", study=tmp_path / "m.journal")
    assert {len(t.values) for t in read_study(tmp_path / "m.journal")[2] if t.values} == {2}
    assert measured.front


def test_what_is_required_of_predictions_and_of_measurements(
    run: Any, model: Model, cluster: Cluster
) -> None:
    """Rejected with the rule R01 before it is run, or after, by what was measured."""
    require = read_requirement("imbalance < 1.6")
    predicted = search(model, cluster, WORKLOAD, overlap=False, require=require)
    assert order(predicted.ranking) == [BALANCED, FOUR]
    broken = [r for _, r in predicted.rejected if r.rule == "R01"]
    assert len(broken) == 2
    assert "must keep to imbalance < 1.6" in broken[0].message

    limit = read_requirement("time_ms < 10000 and memory_gib < 45")
    slow = {BALANCED: 20000.0, FOUR: 100.0, TWO: 200.0, PLAIN: 300.0}
    measured = run("measured", FakeMeasurer(slow), require=limit)
    assert order(measured.ranking) == [FOUR, TWO, PLAIN]
    assert [c for c, r in measured.rejected if r.rule == "R01"] == [BALANCED]
    with pytest.raises(NothingValidError, match="R01"):
        search(model, cluster, WORKLOAD, overlap=False, require=read_requirement("time_ms < 1"))


def test_what_is_interrupted_in_the_finals_says_what_is_best_too(run: Any) -> None:
    """All trials are over then; the same search goes on with the finals."""

    class Stopped(FakeMeasurer):
        def finals(self, configs: Sequence[Config]) -> dict[Config, Measured]:
            raise KeyboardInterrupt

    told: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run("measured", Stopped({BALANCED: 10, FOUR: 10.5, TWO: 30, PLAIN: 30}), tell=told.append)
    assert told[-1] == "best so far of 4 measured: colossal u=1 load_balance, 10 ms"


def test_who_waits_is_shown_each_step(run: Any) -> None:
    """What runs, how many are done, of how many: before each trial, at the end, in the finals."""
    steps: list[tuple[str, int, int]] = []
    fake = FakeMeasurer({BALANCED: 10, FOUR: 10.5, TWO: 30, PLAIN: 30})
    run("measured", fake, step=lambda *step: steps.append(step))

    labels = [config.label(8) for config in fake.ran]
    shown = [(label, done, 4) for done, label in enumerate(labels)]
    assert steps == [*shown, ("done", 4, 4), ("finals of 2", 0, 1)]
