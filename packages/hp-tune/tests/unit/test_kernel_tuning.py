"""Tuning of launches, without a device and without triton: who judges is a stand-in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from hp_comm.kernels import config
from hp_tune.errors import StudyError
from hp_tune.kernels import sampling
from hp_tune.kernels.devices import Asked
from hp_tune.kernels.shapes import Shape, parse
from hp_tune.kernels.space import Space, label, refusal, space_of, start
from hp_tune.kernels.trials import opened
from hp_tune.kernels.tuning import Settings, Tuned, tune
from hp_tune.kernels.verdict import Facts, Mode, Verdict
from hp_tune.study.studies import read_study

SHAPE = Shape(8192, (32, 8, 8), 128, 8)
GPU = Facts("cuda-sm90", "cuda", "a stand-in for a GPU", versions={"triton": "0"})
NPU = Facts("ascend910b3", "ascend", "a stand-in for an NPU", cores=40)


def stand_in_measure(launch: Mapping[str, int]) -> Verdict:
    """A measurement that no device made: best at a tile of 8192 with 4 warps."""
    off = abs(math.log2(launch["tile"] / 8192)) + abs(math.log2(launch.get("num_warps", 4) / 4))
    share = 0.85 / (1 + off)
    return Verdict("complete", 0.1 / share, numbers={"share": share, "GBps": 4000 * share})


class StandInJudge:
    """Judges by a function, and counts."""

    def __init__(
        self, measure: Callable[[Mapping[str, int]], Verdict] = stand_in_measure, facts: Facts = GPU
    ) -> None:
        self.measure, self.facts = measure, facts
        self.judged: list[str] = []

    def open(self, asked: Asked, mode: Mode) -> Facts:
        return self.facts

    def judge(self, kernel: str, shape: Shape, launch: Mapping[str, int]) -> Verdict:
        self.judged.append(label(launch))
        return self.measure(launch)

    def close(self) -> None:
        pass


def run(
    folder: Path, judge: StandInJudge, *, budget: int = 20, seed: int = 0, mode: Mode = "measure"
) -> Tuned:
    tuned = Tuned("pack", SHAPE)
    tune(tuned, Settings(mode, judge.facts, budget, seed, folder), judge)
    return tuned


def _sent(source: sampling.Proposals, ms: float) -> dict[str, int] | None:
    try:
        return source.send(ms)
    except StopIteration:
        return None


def test_every_point_is_proposed_once_and_the_untuned_launch_first() -> None:
    """TPE repeats itself on small spaces; what comes out does not, and nothing is left out."""
    space = space_of("cuda")
    first = start(space, "cuda")
    source = sampling.proposals(space, 0, first)
    seen = [next(source)]
    while (launch := _sent(source, float(seen[-1]["tile"]))) is not None:
        seen.append(launch)

    assert seen[0] == first == {"tile": 4096, "num_warps": 4, "num_stages": 3}
    assert len(seen) == len(space) == 84
    assert {label(one) for one in seen} == {label(one) for one in space}


def test_the_best_is_found_in_fewer_trials_than_there_are_points(tmp_path: Path) -> None:
    """Twenty of 84 are enough for the sampler to come within a step of it."""
    tuned = run(tmp_path, StandInJudge())

    assert tuned.best is not None
    assert tuned.best.launch["tile"] in (4096, 8192, 16384)
    assert tuned.best.verdict.share >= 0.85 / 2
    assert tuned.ended == "budget of 20 launches used"


@pytest.mark.parametrize(
    ("family", "launch", "words"),
    [
        ("ascend", {"tile": 131072, "programs": 40, "multibuffer": 0}, "unified buffer"),
        ("cuda", {"tile": 65536, "num_warps": 2, "num_stages": 1}, "registers of a thread"),
    ],
)
def test_what_cannot_fit_is_refused_with_its_numbers(
    family: str, launch: dict[str, int], words: str
) -> None:
    """V13 names what is needed and what there is."""
    found = refusal("pack", SHAPE, launch, family)  # type: ignore[arg-type]

    assert found is not None
    assert found.rule == "V13" and words in found.message
    assert min(found.numbers.values()) > 0


def test_launches_that_come_to_the_same_are_judged_once(tmp_path: Path) -> None:
    """64 rows of 64 numbers are in all: larger tiles are the same launch."""
    judge = StandInJudge()
    for _ in range(2):
        tuned = Tuned("merge", Shape(32, (2,), 64, 2))
        tune(tuned, Settings("measure", GPU, 1000, 0, tmp_path), judge)

        same = [one for one in tuned.trials if one.verdict.rule == "same"]
        assert {one.launch["tile"] for one in same} <= {4096, 8192, 16384, 32768, 65536}
        assert len(same) == 4 * 12  # all but one of these five tiles, with warps and stages
        assert "it comes to what tile=" in same[0].verdict.reason
    assert len(judge.judged) == len(set(judge.judged)) == 84 - len(same)


@pytest.mark.parametrize("kernel", config.KERNELS)
@pytest.mark.parametrize("family", ["cuda", "ascend", "cpu"])
def test_the_untuned_launch_is_in_the_space_and_fits(kernel: str, family: str) -> None:
    """What runs without a file is the first trial of every study on a device."""
    for cores in (40, 48):
        space = space_of(family, cores)  # type: ignore[arg-type]
        first = start(space, family)  # type: ignore[arg-type]

        if family == "cpu":
            assert first is None
            return
        assert first is not None
        assert first.items() >= config.default_launch(family).items()
    assert refusal(kernel, SHAPE, first, family) is None  # type: ignore[arg-type]


def test_what_is_refused_is_recorded_and_never_judged(tmp_path: Path) -> None:
    """A pruned trial costs no budget, and says why in the study."""
    judge = StandInJudge(facts=NPU)
    tuned = run(tmp_path, judge, budget=1000)

    refused = [one for one in tuned.trials if one.verdict.state == "pruned"]
    assert refused and tuned.ended == "all 64 launches tried or refused"
    assert not {label(one.launch) for one in refused} & set(judge.judged)
    assert tuned.study is not None
    _, attributes, trials = read_study(tuned.study)
    pruned = [trial for trial in trials if trial.state.name == "PRUNED"]
    assert len(pruned) == len(refused) and len(trials) == 64
    assert {trial.user_attrs["rule"] for trial in pruned} == {"V13"}
    assert all(trial.user_attrs["numbers"]["ub_bytes"] > 196608 for trial in pruned)
    assert attributes["inputs"]["kernel_hash"] == config.kernel_hash()


def test_tuning_stops_at_nine_tenths_of_the_copy_bandwidth_and_says_so(tmp_path: Path) -> None:
    """Nothing is left to win: no hours for the last percent."""

    def fast(launch: Mapping[str, int]) -> Verdict:
        share = 0.93 if launch["num_warps"] == 8 else 0.5
        return Verdict("complete", 1 / share, numbers={"share": share})

    judge = StandInJudge(fast)
    tuned = run(tmp_path, judge, budget=80)

    assert len(judge.judged) < 20
    assert tuned.best is tuned.trials[-1] and tuned.best.launch["num_warps"] == 8
    assert "reaches 93% of the copy bandwidth, at least 90%" in tuned.ended


def test_a_model_never_stops_the_search(tmp_path: Path) -> None:
    """Only a measured share of a copy counts; a model has none."""

    def modelled(launch: Mapping[str, int]) -> Verdict:
        return Verdict("complete", 1.0, numbers={"source": "compiled, not measured"})

    tuned = run(tmp_path, StandInJudge(modelled, NPU), budget=9, mode="compile")

    assert tuned.ended == "budget of 9 launches used"


def test_as_fast_as_untuned_means_untuned(tmp_path: Path) -> None:
    """A file says something else only where that is faster by more than noise."""

    def flat(launch: Mapping[str, int]) -> Verdict:
        return Verdict("complete", 1.0 - launch["tile"] * 1e-8, numbers={"share": 0.4})

    tuned = run(tmp_path, StandInJudge(flat))

    assert tuned.best is tuned.trials[0]


def test_failures_are_trials_with_reasons_and_end_nothing(tmp_path: Path) -> None:
    """Out of memory, a wrong result, a hang, a crash: each is a state, the search goes on."""
    rules = ["memory", "wrong", "time", "crash", "compile"]

    def failing(launch: Mapping[str, int]) -> Verdict:
        if launch["num_warps"] == 4:
            return stand_in_measure(launch)
        rule = rules[launch["num_stages"] % len(rules)]
        return Verdict("failed", rule=rule, reason=f"a stand-in's {rule}")

    tuned = run(tmp_path, StandInJudge(failing), budget=60)

    assert tuned.best is not None and tuned.best.launch["num_warps"] == 4
    assert tuned.study is not None
    failed = [t for t in read_study(tuned.study)[2] if t.state.name == "FAIL"]
    assert {t.user_attrs["rule"] for t in failed} == {"wrong", "time", "crash", "compile"}
    assert all("a stand-in's" in t.user_attrs["message"] for t in failed)


def test_the_same_seed_gives_the_same_study_and_another_one_another(tmp_path: Path) -> None:
    """Launches in the same order, for the same answers."""
    one, two, other = (
        [label(trial.launch) for trial in run(tmp_path / name, StandInJudge(), seed=seed).trials]
        for name, seed in (("one", 3), ("two", 3), ("other", 4))
    )

    assert one == two != other


def test_a_stopped_study_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    """Interrupted after seven judgements: nothing is judged twice, the end is the same."""
    whole = run(tmp_path / "whole", StandInJudge())

    def stops(launch: Mapping[str, int]) -> Verdict:
        if len(judge.judged) > 7:
            raise KeyboardInterrupt
        return stand_in_measure(launch)

    judge = StandInJudge(stops)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", judge)
    rest = StandInJudge()
    resumed = run(tmp_path / "cut", rest)

    assert [one.launch for one in resumed.trials] == [one.launch for one in whole.trials]
    assert [one.verdict for one in resumed.trials] == [one.verdict for one in whole.trials]
    assert not set(rest.judged) & set(judge.judged[:7])
    assert len(rest.judged) == 20 - 7
    again = StandInJudge()
    assert run(tmp_path / "cut", again).best == resumed.best
    assert again.judged == []


def test_a_torn_last_line_loses_one_trial_at_most(tmp_path: Path) -> None:
    """A killed writer leaves half a record: it is cut off, said, and judged again."""
    tuned = run(tmp_path, StandInJudge())
    assert tuned.study is not None
    content = tuned.study.read_bytes()
    tuned.study.write_bytes(content[:-20])
    said: list[str] = []
    again = Tuned("pack", SHAPE)
    judge = StandInJudge()

    tune(again, Settings("measure", GPU, 20, 0, tmp_path), judge, said.append)

    assert any("dropped" in line for line in said)
    assert len(judge.judged) <= 1
    assert [one.launch for one in again.trials] == [one.launch for one in tuned.trials]


def test_other_inputs_have_another_study(tmp_path: Path) -> None:
    """A new version of the compiler, another device or another shape: nothing old is believed."""
    first = run(tmp_path, StandInJudge()).study
    newer = Facts("cuda-sm90", "cuda", "a stand-in for a GPU", versions={"triton": "1"})
    second = run(tmp_path, StandInJudge(facts=newer)).study

    assert first != second and first is not None and second is not None
    assert first.is_file() and second.is_file()


def test_a_file_of_another_study_is_refused(tmp_path: Path) -> None:
    """Whatever is under that name was not made from these inputs."""
    space = Space({"tile": (1024, 2048)})
    with opened(tmp_path / "s.journal", "s", {"seed": 0}, space) as record:
        record.add({"tile": 1024}, Verdict("complete", 1.0))

    with (
        pytest.raises(StudyError, match="other inputs: seed differ"),
        opened(tmp_path / "s.journal", "s", {"seed": 1}, space),
    ):
        pass


def test_a_check_is_made_again_each_time_and_leaves_no_study(tmp_path: Path) -> None:
    """What was right yesterday is compared again today; on a CPU there is nothing to remember."""

    def right(launch: Mapping[str, int]) -> Verdict:
        return Verdict("complete", numbers={"source": "interpreted"})

    facts = Facts("cpu", "cpu", "TRITON_INTERPRET=1")
    for _ in range(2):
        judge = StandInJudge(right, facts)
        tuned = run(tmp_path, judge, budget=5, mode="check")
        assert len(judge.judged) == 5 == tuned.count("complete")
    assert list(tmp_path.iterdir()) == []


def test_shapes_are_read_as_they_are_written() -> None:
    """A shape survives being printed."""
    text = "S8192-H32:8:8-D128-P8,S1001-H12:12-D80-P4-B2-BNSD-fp16,S64-H4-D64-P8-rows"
    found = parse(text)

    assert ",".join(map(str, found)) == text
    assert found[1] == Shape(1001, (12, 12), 80, 4, 2, "BNSD", "fp16")
    assert found[2].dim == "rows"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"must name a shape"),
        ("S8192-H32-D128", r"must have P"),
        ("H32", r"must have S, D, P"),
        ("S8-H32-D128-P8-Q3", r"'Q3' is not known"),
        ("S8-H30-D128-P8", r"H \(30\) must be divisible by P \(8\)"),
        ("S9-H32-D128-P8-rows", r"S \(9\) must be divisible by P \(8\)"),
        ("S8-H32:3-D128-P8", r"H \(3\) must divide P \(8\)"),
        ("S8-H8-D128-P8-TND-B2", r"TND has no batch"),
        ("S8-H8-D27-P8", r"D \(27\) must be even"),
        ("S8-H8-D32-P8-fp16-fp32", r"'fp16' and 'fp32' contradict each other"),
        ("S8-H8-D32-P8-BSHD-BNSD", r"'BSHD' and 'BNSD' contradict each other"),
        ("S8-H8-D32-P8-rows-heads", r"'rows' and 'heads' contradict each other"),
        ("S8-S16-H8-D32-P8", r"'S8' and 'S16' contradict each other"),
        ("S8-H8-H8:8-D32-P8", r"'H8' and 'H8:8' contradict each other"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_with_its_part(text: str, words: str) -> None:
    """The message has the shape as it was typed, and the number."""
    with pytest.raises(ValueError, match=words):
        parse(text)


@pytest.mark.parametrize("kernel", config.KERNELS)
def test_sizes_and_bytes_of_a_shape_are_those_of_the_launch(kernel: str) -> None:
    """The runtime asks for rows, inner and element_size of the largest piece."""
    sizes = SHAPE.sizes(kernel)
    assert set(sizes) == {"rows", "inner", "element_size"} and min(sizes.values()) > 0
    own = 8192 * 128 * 2 * (48 if kernel in ("pack", "unpack") else 32)
    assert SHAPE.bytes(kernel) >= 2 * own


def test_a_head_that_two_ranks_need_is_counted_twice() -> None:
    """MQA on four ranks: one head of k and v is read once and sent four times."""
    shape = Shape(2048, (8, 1, 1), 128, 4)
    assert shape.bytes("pack") == 2048 * 128 * 2 * ((8 + 1 + 1) + (8 + 4 + 4))
