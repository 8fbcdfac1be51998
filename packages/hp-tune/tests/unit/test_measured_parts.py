"""The parts of measured trials that need no torch: requests, statistics, classes of failures."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hp_tune.errors import UsageError
from hp_tune.measured.measurer import TorchrunMeasurer
from hp_tune.measured.options import measurer_from
from hp_tune.measured.outcome import failure
from hp_tune.measured.request import JobRequest, check_length, layer_shapes, style_call
from hp_tune.measured.result import Measured
from hp_tune.measured.statistics import FEWEST_ROUNDS, enough, interval, ratio_interval
from hp_tune.measured.ties import is_tie
from hp_tune.models.model import Attention, Model
from hp_tune.plans.plan import Entry
from hp_tune.torchrun import FailedRank, Job, Launcher
from hp_tune.workload import Config, Workload

FULL = Attention(num_heads=12, num_kv_heads=4, head_size=6, v_head_size=5)
MODEL = Model(name="tiny", model_type="tiny", hidden_size=20, layers=(FULL, FULL))
GATHER, HYBRID, ULYSSES = (Config(ulysses_degree=u) for u in (1, 2, 4))


class FakeLauncher(Launcher):
    """Answers as ``reply`` says, for the labels of a job's configurations."""

    def __init__(self, reply: Callable[[list[str]], Job], ranks: int = 4) -> None:
        super().__init__(nproc_per_node=ranks)
        object.__setattr__(self, "reply", reply)
        object.__setattr__(self, "asked", [])

    def run(self, module: str, request: Mapping[str, Any], *, folder: Path, timeout: float) -> Job:
        found = JobRequest.from_json(json.loads(json.dumps(request)))
        labels = [style.label for style in found.styles]
        self.asked.append((labels, timeout))  # type: ignore[attr-defined]
        job: Job = self.reply(labels)  # type: ignore[attr-defined]
        return job


def job(answer: dict[str, Any] | None, *failed: FailedRank, timed_out: bool = False) -> Job:
    """Return a job that left this."""
    code = 1 if failed else 0
    return Job(code, timed_out, answer, "the end", tuple(failed), Path("logs"))


def done(labels: list[str], **changes: Any) -> Job:
    """Return a job in which every configuration ran in as many ms as its label has letters."""
    configs = [
        {
            "outcome": "ok", "reason": "", "traffic": {"all_gather": [2, 80]},
            "samples_ms": [float(len(label))] * 3, "forward_ms": [1.0] * 3,
            "memory_bytes": 7, "checked_len": 48, **changes,
        }
        for label in labels
    ]  # fmt: skip
    return job({"at": -1, "stage": "timed rounds", "done": True, "configs": configs})


def measurer(reply: Callable[[list[str]], Job], **workload: Any) -> TorchrunMeasurer:
    """Return a measurer whose jobs are ``reply``'s."""
    given = {"seq_len": 4096, "cp_size": 4, **workload}
    return TorchrunMeasurer(MODEL, Workload(**given), FakeLauncher(reply), Path("logs"), timeout=50)


def test_a_job_constructs_what_the_plans_entry_does() -> None:
    """The same arguments, for the styles of hp_cp and for those of hp_dsa."""
    config = Config(ulysses_degree=2, overlap=True, head_groups=2, keep_kv=False)
    workload = Workload(seq_len=48, cp_size=4, layout="BNSD")
    call = style_call(config, workload)
    best: Any = SimpleNamespace(config=config)
    entry = Entry.model_construct(best=best, layout="BNSD", styles="hp_cp")
    assert call.dense.kwargs == entry.style_kwargs()
    assert call.dense.name == "AsyncContextParallel"
    assert (call.dense.kwargs["seq_dim"], call.dense.kwargs["head_groups"]) == (2, 2)
    assert {at: style.name for at, style in call.sparse.items()} == {
        "indexer": "AsyncDSAIndexerContextParallel",
        "attention": "AsyncDSASparseAttentionContextParallel",
        "indexer_loss": "AsyncDSAIndexerLossContextParallel",
    }
    assert call.sparse["attention"].kwargs == {"layout": "BSND", "keep_keys": False}


def test_a_request_comes_back_from_json_as_it_went() -> None:
    """Nothing is lost on the way to the ranks; heads are those of one TP rank."""
    asked = measurer(done, tp_size=2, cp_size=2)._request([GATHER])
    assert JobRequest.from_json(json.loads(json.dumps(asked.to_json()))) == asked
    (shape,) = asked.layers
    assert (shape.count, shape.num_heads, shape.num_kv_heads) == (2, 6, 2)
    assert layer_shapes(MODEL, 8)[0].num_kv_heads == 1


def test_finals_have_three_times_the_rounds_and_the_time_of_each_trial() -> None:
    """Trials choose who is measured again, and the finals decide."""
    one, two = (measurer(done)._request(configs) for configs in ([GATHER], [GATHER, ULYSSES]))
    assert two.protocol.rounds == 3 * one.protocol.rounds
    assert two.protocol.budget_s == 2 * one.protocol.budget_s


@pytest.mark.parametrize(
    ("seq_len", "cp_size", "length"),
    [(48, 4, 48), (4096, 4, 384), (4098, 3, 384), (2**20, 256, 512)],
)
def test_the_comparison_is_of_a_length_that_all_configurations_can_cut(
    seq_len: int, cp_size: int, length: int
) -> None:
    """The whole if it is short; else a multiple of 2 P near the limit, or 2 P itself."""
    asked = measurer(done, cp_size=4)._request([GATHER])
    changed = {**asked.to_json(), "seq_len": seq_len, "cp_size": cp_size}
    assert check_length(JobRequest.from_json(changed)) == length


def test_windows_and_selections_still_cut_a_short_sequence() -> None:
    """Else a comparison on a short sequence would compare full attention."""
    sliding = FULL.model_copy(update={"kind": "sliding", "window": 4096})
    sparse = FULL.model_copy(
        update={"latent_size": 9, "rope_size": 3, "index_topk": 2048, "num_kv_heads": 12}
    )
    model = MODEL.model_copy(update={"layers": (sliding, sparse)})
    window, topk = (shape.shortened(384) for shape in layer_shapes(model, 1))
    assert window.window == 128
    assert topk.index_topk == 128
    assert layer_shapes(model, 1)[0].shortened(2**20).window == 4096


def test_intervals_are_the_same_for_the_same_samples() -> None:
    """A fixed seed; the interval holds the median, and one value gives itself."""
    samples = [10.0, 11.0, 10.5, 30.0, 10.2]
    assert interval(samples) == interval(samples)
    low, high = interval(samples)
    assert 10.0 <= low <= 10.5 <= high <= 30.0
    assert interval([5.0] * 4) == (5.0, 5.0)


def test_rounds_in_turns_see_through_a_machine_that_slows_down() -> None:
    """Both drift by a factor of two, one is 5 % faster in every round: the ratio is narrow."""
    drift = [1.0, 1.2, 1.3, 1.5, 1.7, 2.0]
    slow, fast = [105 * x for x in drift], [100 * x for x in drift]
    assert interval(slow)[0] < interval(fast)[1]
    assert ratio_interval(slow, fast) == pytest.approx((1.05, 1.05))
    assert enough({0: slow, 1: fast}, 0.01)


@pytest.mark.parametrize(
    ("samples", "answer"),
    [
        ({0: [1.0] * 5}, False),
        ({0: [1.0] * 5, 1: [1.5] * 5}, False),
        ({0: [1.0] * 5 + [1.001]}, True),
        ({0: [1.0, 1.2] * 3}, False),
        ({0: [1.0] * 6, 1: [1.5, 1.9, 1.2] * 2}, True),
        ({0: [1.0] * 6, 1: [1.02, 0.9, 1.1] * 2}, False),
    ],
)
def test_rounds_end_when_more_would_change_nothing(
    samples: dict[int, list[float]], answer: bool
) -> None:
    """Too few; sure; unsure of one; surely slower, however unsure by how much; unsure who wins."""
    assert enough(samples, 0.01) is answer


def test_the_first_look_seldom_calls_one_of_two_equals_the_slower() -> None:
    """Some 6 % of the searches, as intervals of 95 % are; after three rounds it was a quarter."""
    drawn = random.Random(1)

    def wrong(rounds: int) -> bool:
        pair = {key: [drawn.gauss(100, 10) for _ in range(rounds)] for key in (0, 1)}
        return enough(pair, 0.01)

    assert sum(wrong(FEWEST_ROUNDS) for _ in range(400)) <= 0.12 * 400


def timed(*samples: float, folder: str | None = None) -> Measured:
    """Return a configuration that took this long."""
    middle = sorted(samples)[len(samples) // 2]
    return Measured(
        "ok", samples_ms=samples, median_ms=middle, interval_ms=interval(samples),
        folder=None if folder is None else Path(folder),
    )  # fmt: skip


def test_ties_are_what_measuring_cannot_tell_apart() -> None:
    """Less than 1 %; or less than 3 % and not surely slower, in turns by the ratio."""
    best = timed(100.0, 101.0, 99.0, folder="a")
    assert is_tie(timed(100.9, 101.9, 99.9), best)
    assert is_tie(timed(102.0, 99.0, 104.0), best), "intervals meet"
    assert not is_tie(timed(102.0, 102.1, 102.2), best), "intervals do not meet"
    assert not is_tie(timed(102.0, 103.0, 101.0, folder="a"), best), "slower in every round"
    assert not is_tie(timed(105.0, 80.0, 130.0), best), "noise ties nothing that is far off"


def test_a_trial_says_what_ran() -> None:
    """Halves, interval, traffic, memory and the length of the comparison."""
    said = measurer(done).trial(GATHER)
    assert (said.outcome, said.median_ms, said.forward_ms) == ("ok", 12.0, 1.0)
    assert said.backward_ms == 11.0
    assert (said.collectives, said.bytes_sent) == ({"all_gather": 2}, {"all_gather": 80})
    assert (said.memory_bytes, said.checked_len) == (7, 48)


def test_a_finalist_that_ends_the_job_costs_only_itself() -> None:
    """The rest is one job again, with as much time as it has members."""

    def reply(labels: list[str]) -> Job:
        if "hybrid u=2" not in labels:
            return done(labels)
        answer = {"at": labels.index("hybrid u=2"), "stage": "warm-up", "configs": []}
        return job(answer, FailedRank(1, "n1", 1, "RuntimeError", "lost", "its traceback"))

    runner = measurer(reply)
    found = runner.finals([ULYSSES, HYBRID, GATHER])
    assert [found[c].outcome for c in (ULYSSES, HYBRID, GATHER)] == ["ok", "crash", "ok"]
    assert found[HYBRID].reason == "rank 1 on n1 raised RuntimeError: lost (stage: warm-up)"
    assert found[HYBRID].details == "its traceback"
    assert [timeout for _, timeout in runner.launcher.asked] == [150, 100]  # type: ignore[attr-defined]


def test_finals_that_fail_in_the_timed_rounds_fail_together() -> None:
    """Nobody knows whose turn it was; what was found out before stays."""

    def reply(labels: list[str]) -> Job:
        configs = [{"outcome": "ok"}, {"outcome": "inactive", "reason": "sent nothing"}]
        return job({"at": -1, "stage": "timed rounds", "configs": configs}, timed_out=True)

    found = measurer(reply).finals([ULYSSES, GATHER])
    assert [said.outcome for said in found.values()] == ["timeout", "inactive"]
    assert found[GATHER].reason == "sent nothing"


@pytest.mark.parametrize(
    ("rank", "outcome"),
    [
        (FailedRank(0, error="OutOfMemoryError", message="CUDA out of memory"), "oom"),
        (FailedRank(0, error="MemoryError"), "oom"),
        (FailedRank(0, error="RuntimeError", message="[enforce fail at alloc_cpu.cpp:124] "
                    "DefaultCPUAllocator: can't allocate memory"), "oom"),
        (FailedRank(0, error="RuntimeError", message="NPU out of memory. Tried to"), "oom"),
        (FailedRank(0, exit_code=-9, message="SIGKILL"), "oom"),
        (FailedRank(0, exit_code=-11, message="SIGSEGV"), "crash"),
        (FailedRank(0, error="ValueError", message="no"), "crash"),
    ],
    ids=str,
)  # fmt: skip
def test_failures_have_classes(rank: FailedRank, outcome: str) -> None:
    """By the exception, by the words of the allocators, or by the signal."""
    assert failure(job(None, rank), 50).outcome == outcome


def test_a_torchrun_that_fails_by_itself_is_a_crash_with_its_last_words() -> None:
    """No rank has failed, as when no port is free."""
    said = failure(Job(1, False, None, "one\ntwo", (), Path("logs")), 50)
    assert said.outcome == "crash"
    assert said.reason == "torchrun ended with exit code 1: two (stage: start)"


@pytest.mark.parametrize(
    ("workload", "ranks", "message"),
    [
        ({}, 3, r"ranks of a trial \(3\) must be cp_size \(4\), or a multiple"),
        ({"tp_size": 2}, 12, r"ranks of a trial \(12\) must be .* cp_size x tp_size \(8\)"),
        ({"documents": ((64, 1.0),)}, 4, "must have one document per sequence"),
        ({"layout": "TND", "batch": 2}, 4, r"batch \(2\) must be 1"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_any_trial(
    workload: dict[str, Any], ranks: int, message: str
) -> None:
    """Wrong use, exit code 2."""
    given = Workload(**{"seq_len": 4096, "cp_size": 4, **workload})
    with pytest.raises(UsageError, match=message):
        TorchrunMeasurer(MODEL, given, FakeLauncher(done, ranks), Path("logs"))


def test_a_model_without_attention_has_nothing_to_measure() -> None:
    """Linear layers are the same under every configuration."""
    linear = MODEL.model_copy(update={"layers": (FULL.model_copy(update={"kind": "linear"}),)})
    with pytest.raises(UsageError, match="no layer that context parallelism touches"):
        TorchrunMeasurer(linear, Workload(seq_len=64, cp_size=4), FakeLauncher(done), Path("logs"))


def test_options_describe_the_hosts() -> None:
    """The ranks of a host are its share of --cp, unless they are said."""
    told: list[str] = []
    options = {
        "cp": 4, "hosts": ("ssh a", "ssh b"), "nproc_per_node": None, "backend": "cpu-gloo",
        "master_addr": "10.0.0.1", "trial_timeout": 60.0, "rounds": 5, "warmup": 2,
    }  # fmt: skip
    make = measurer_from(MODEL, options, logs=lambda _: Path("logs"), tell=told.append)
    made = make(Workload(seq_len=64, cp_size=4))
    assert (made.launcher.nproc_per_node, made.launcher.world_size) == (2, 4)
    assert made.identity["hosts"] == ["ssh a", "ssh b"]
    assert told == [
        "backend cpu-gloo: times are those of these machines' CPUs and not transferable"
    ]
    with pytest.raises(UsageError, match=r"--cp \(5\) must be divisible by the number of --host"):
        measurer_from(MODEL, {**options, "cp": 5}, logs=lambda _: Path("logs"))
