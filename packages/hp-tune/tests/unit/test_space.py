"""What is proposed, what is rejected, and why (behaviour 47)."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from hp_cp.plan import Plan, make_plan
from hp_tune.clusters.cluster_files import read_cluster
from hp_tune.errors import UsageError
from hp_tune.models.hf_config import read_model
from hp_tune.models.model import Attention, Model
from hp_tune.searching.engine import NothingValidError, Result, search
from hp_tune.searching.ranking import (
    assumed_numbers,
    ends_of,
    priced_again,
    six_digits,
    with_number,
)
from hp_tune.searching.restriction import read_restriction
from hp_tune.searching.rules import Rejection, check
from hp_tune.searching.space import async_available, enumerate_space
from hp_tune.workload import Config, Workload


def model(heads: int, kv: int, **fields: Any) -> Model:
    """A 4-layer model with heads of 128."""
    layer = Attention(num_heads=heads, num_kv_heads=kv, head_size=128, v_head_size=128, **fields)
    return Model(
        name="m", model_type="llama", hidden_size=heads * 128, layers=(layer,) * 4,
        mlp_size=512, active_mlp_size=512, vocab_size=512,
    )  # fmt: skip


def run(m: Model, cluster: str = "hgx-h100", *, overlap: bool = False, **fields: Any) -> Result:
    """Search 8 CP ranks and 32768 tokens unless ``fields`` say otherwise."""
    workload = Workload(**{"seq_len": 32768, "cp_size": 8, **fields})
    return search(m, read_cluster(cluster), workload, overlap=overlap)


def test_async_is_a_candidate_only_where_the_model_hands_off() -> None:
    """A rotary embedding behind the projections is in the way; the rule says what to mark."""
    without = run(model(32, 8), overlap=True)
    handed_off = run(model(32, 8), overlap=True, handoffs=True)

    rules = {
        rejection.rule: rejection.hint for config, rejection in without.rejected if config.overlap
    }
    assert set(rules) == {"V05", "V09"}
    assert "hp_cp.Handoff" in rules["V09"]
    assert not any(ranked.config.overlap for ranked in without.ranking)
    assert any(ranked.config.overlap for ranked in handed_off.ranking)


def test_space_is_every_divisor_with_and_without_balance() -> None:
    """None is the whole group and not a point of its own; the order is fixed."""
    points, duplicates = enumerate_space(6, overlap=False)

    assert [(p.ulysses_degree, p.load_balance) for p in points] == [
        (u, lb) for u in (1, 2, 3, 6) for lb in (False, True)
    ]
    assert not duplicates


def test_equal_configurations_are_one_point() -> None:
    """Async balance runs synchronously; one rank has one configuration."""
    points, duplicates = enumerate_space(2, overlap=True)

    assert [d.config for d in duplicates] == [
        Config(ulysses_degree=1, load_balance=True, overlap=True)
    ]
    assert duplicates[0].same_as == Config(ulysses_degree=1, load_balance=True)
    assert len(points) == 7
    assert enumerate_space(1, overlap=True)[0] == [Config(ulysses_degree=1)]


def test_async_joins_the_space_when_its_file_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked by looking for a file: nothing of hp_cp's styles, and no torch, is imported."""
    spec = ModuleSpec("hp_cp", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr("hp_tune.searching.space.find_spec", lambda _: spec)

    assert not async_available()
    assert not any(p.overlap for p in enumerate_space(4)[0])
    (tmp_path / "async_style.py").touch()
    assert async_available()
    assert any(p.overlap for p in enumerate_space(4)[0])
    monkeypatch.setattr("hp_tune.searching.space.find_spec", lambda _: None)
    assert not async_available()
    assert importlib.util.find_spec("hp_cp") is not None


@pytest.mark.parametrize(("heads", "kv"), [(32, 8), (28, 4), (12, 12), (5, 1), (96, 8)])
@pytest.mark.parametrize("cp", [1, 6, 8])
def test_no_proposal_is_invalid_and_no_rejection_is_without_reason(
    heads: int, kv: int, cp: int
) -> None:
    """Every point is either accepted by the plan or carries rule, numbers and hint."""
    m, length = model(heads, kv), 48 * 1024
    result = run(m, seq_len=length, cp_size=cp)

    for ranked in result.ranking:
        config = ranked.config
        plan = make_plan(cp, config.ulysses_degree, config.load_balance)
        plan.heads(heads, kv)
        plan.split_length(length)
    for _, rejection in result.rejected:
        assert rejection.rule in ("V03", "V05")
        assert rejection.message
        assert rejection.numbers
        assert rejection.hint
    found = len(result.ranking) + len(result.rejected)
    assert found == len(enumerate_space(cp, overlap=False)[0])


def test_few_kv_heads_choose_gather_and_many_choose_ulysses() -> None:
    """Behaviour 47 on 8 ranks: MQA picks Colossal, (32, 32) picks Ulysses."""
    for length in (16384, 32768, 131072):
        mqa = run(model(32, 1), seq_len=length).ranking[0].config
        mha = run(model(32, 32), seq_len=length).ranking[0].config
        assert (mqa.ulysses_degree, mqa.load_balance) == (1, True)
        assert (mha.ulysses_degree, mha.load_balance) == (8, False)


def test_topologies_choose_differently() -> None:
    """The same model and length: the cluster decides (no topology-blind model)."""
    m = model(32, 8)
    winners = {
        name: run(m, name, seq_len=16384, cp_size=16, tp_size=tp).ranking[0].config.ulysses_degree
        for name, tp in (("hgx-h100", 1), ("cpu-gloo", 1))
    }

    assert winners["hgx-h100"] != winners["cpu-gloo"]


def first(m: Model, config: Config, cluster: str = "atlas-800t-a2", **fields: Any) -> Rejection:
    """The rejection of one configuration."""
    workload = Workload(**{"seq_len": 32768, "cp_size": 8, **fields})
    found = check(m, read_cluster(cluster), workload, config)
    assert isinstance(found, Rejection)
    return found


def test_each_rule_names_its_numbers_and_a_way_out() -> None:
    """V01 length, V02 degree, V03 heads, V05 balance, V08 DSA, V10 mesh, V11 memory, V14 index."""
    qwen = read_model("Qwen2.5-7B")
    u8, u1, balanced = (
        Config(ulysses_degree=8),
        Config(ulysses_degree=1),
        Config(ulysses_degree=1, load_balance=True),
    )
    heads = first(qwen, u8)
    assert (heads.rule, heads.numbers["num_heads"]) == ("V03", 28)
    assert "use ulysses_degree=4 or 2" in heads.hint
    length = first(qwen, balanced, seq_len=32776)
    assert length.rule == "V01"
    assert "to 32784 with pad_sequence" in length.hint
    assert first(qwen, Config(ulysses_degree=3)).rule == "V02"
    assert first(qwen, Config(ulysses_degree=2, load_balance=True)).rule == "V05"
    assert first(model(32, 8, index_topk=64), u1).rule == "V08"
    assert first(qwen, u1, world_size=12).hint == "use --world 16"
    assert "num_heads (28) must be divisible by tp_size (8)" in first(qwen, u1, tp_size=8).message
    memory = first(qwen, u1, seq_len=2**20)
    assert memory.rule == "V11"
    assert "--recompute on" in memory.hint
    assert memory.message.count(" GiB") == 5
    assert set(memory.numbers) >= {"bytes", "capacity", "terms"}
    assert first(model(64, 8), u1, seq_len=2**22).rule == "V14"


def test_tensor_parallel_heads_are_counted_after_the_cut() -> None:
    """28 heads on 4 TP ranks leave 7: only degrees 7 and 1 divide; KV heads may be repeated."""
    qwen = read_model("Qwen2.5-7B")
    result = run(qwen, tp_size=4, cp_size=14, seq_len=28 * 1024)

    valid = {ranked.config.ulysses_degree for ranked in result.ranking}
    assert valid == {1, 7}
    assert isinstance(
        check(model(32, 2), read_cluster("hgx-h100"),
              Workload(seq_len=1024, cp_size=2, tp_size=8), Config(ulysses_degree=2)),
        Plan,
    )  # fmt: skip


def test_recomputation_is_chosen_only_when_nothing_fits_without() -> None:
    """And is said; ``off`` keeps the rejection, exit code 3 with every reason."""
    m, cluster = read_model("Llama-3.1-8B"), read_cluster("hgx-h100")
    long = Workload(seq_len=2**19, cp_size=8)

    assert not run(m).workload.recompute
    result = search(m, cluster, long, overlap=False)
    assert result.workload.recompute
    assert any("recomputation" in note for note in result.notes)
    with pytest.raises(NothingValidError) as error:
        search(m, cluster, long, recompute="off", overlap=False)
    assert error.value.exit_code == 3
    rejected = dict(error.value.result.rejected)
    assert len(rejected) == 8 + 6, "streams of K and V too: two for each degree that gathers"
    assert {config.kv_chunks for config in rejected} == {1, 4, 8}
    assert {r.rule for _, r in error.value.result.rejected} == {"V05", "V11"}


def test_a_sequence_beyond_the_model_is_noted() -> None:
    """Priced all the same: rope scaling may follow."""
    result = run(read_model("Qwen3-8B"), seq_len=65536)

    assert any("longer than Qwen3-8B allows (40960)" in note for note in result.notes)


def test_a_dtype_without_a_peak_is_refused() -> None:
    """The H100 preset has no fp64 figure."""
    with pytest.raises(UsageError, match=r"--dtype \(fp64\).*known: bf16, fp16, fp32"):
        run(model(32, 8), dtype="fp64")


def test_flips_name_the_assumed_numbers_that_decide() -> None:
    """A close race: a flip names a number, the value that would decide, and another winner."""
    result = run(model(32, 8), "atlas-800t-a2", seq_len=16384, cp_size=16)

    assert "tiers.RoCE.efficiency" in {flip.number for flip in result.flips}
    for flip in result.flips:
        assert flip.winner != result.ranking[0].config
        assert flip.number.split(".")[0] in ("device", "tiers")
        assert flip.other != flip.value
        assert flip.other <= 1 or "efficiency" not in flip.number


def test_variants_add_groups_of_heads_and_gathers_in_backward() -> None:
    """Each spelled once: Ulysses gathers nothing, balance has no groups."""
    points, duplicates = enumerate_space(8, overlap=True, variants=True)
    groups = [p for p in points if p.head_groups > 1]

    assert len(set(points)) == len(points)
    assert {p.head_groups for p in groups} == {2, 4}
    assert all(p.overlap and not p.load_balance for p in groups)
    assert not any(p.ulysses_degree == 8 and not p.keep_kv for p in points)
    balanced = [p for p in points if p.balance_hybrid]
    assert {(p.ulysses_degree, p.keep_kv) for p in balanced} == {
        (u, keep) for u in (2, 4) for keep in (True, False)
    }
    assert all(p.kv_chunks == 1 for p in points)
    assert {d.reason for d in duplicates} == {
        "load_balance runs synchronously", "Ulysses gathers no K and V"
    }  # fmt: skip


def test_variants_are_searched_recorded_and_handed_to_the_style(tmp_path: Path) -> None:
    """Groups need no handoffs; heads that they would part are refused by number."""
    workload = Workload(seq_len=131072, cp_size=8)
    journal = tmp_path / "s.journal"
    result = search(
        model(32, 32), read_cluster("atlas-800t-a2"), workload, overlap=True, variants=True,
        study=journal,
    )  # fmt: skip
    best = result.ranking[0].config

    assert best.head_groups > 1 or not best.overlap
    assert result.study is not None
    assert result.study.added == len(result.ranking) + len(result.rejected)
    assert result.plan is not None
    assert result.plan.entries[0].style_kwargs()["head_groups"] == best.head_groups
    parted = first(model(28, 4), Config(ulysses_degree=4, overlap=True, head_groups=4))
    assert parted.rule == "V03"
    assert "head_groups" in parted.message
    documents = ((4096, 1.0),)
    packed = first(model(32, 32), Config(ulysses_degree=1, load_balance=True), documents=documents)
    assert (packed.rule, "ulysses_degree above 1" in packed.hint) == ("V06", True)
    config = Config(ulysses_degree=2, balance_hybrid=True)
    packed = first(model(32, 32), config, documents=documents)
    assert (packed.rule, packed.hint) == ("V06", "leave balance_hybrid off")
    refetch = first(model(32, 32), Config(ulysses_degree=8, keep_kv=False))
    assert refetch.rule == "V15"


def test_a_part_of_the_space_is_searched_by_name() -> None:
    """Keys and values as they are typed; what is named is searched without --variants, too."""
    only = read_restriction("u=1,2 lb=off async=on,off keep_kv=off", 8)
    points, _ = enumerate_space(8, overlap=True, only=only)

    assert {p.ulysses_degree for p in points} == {1, 2}
    assert not any(p.load_balance or p.keep_kv for p in points)
    assert {p.overlap for p in points} == {True, False}
    assert only.text() == "keep_kv=off lb=off overlap=off,on u=1,2"
    assert read_restriction(only.text(), 8) == only
    grouped, _ = enumerate_space(8, overlap=True, only=read_restriction("head_groups=2", 8))
    assert {p.head_groups for p in grouped} == {2}
    result = search(
        model(32, 8), read_cluster("hgx-h100"), Workload(seq_len=32768, cp_size=8),
        only=read_restriction("u=4 lb=off overlap=off", 8),
    )  # fmt: skip
    assert [r.config for r in result.ranking] == [Config(ulysses_degree=4)]
    assert result.plan is not None
    assert result.plan.made_by["space"] == "lb=off overlap=off u=4"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("ul=1", r"unknown key 'ul'; did you mean 'u'\?"),
        (
            "colour=red",
            r"unknown key 'colour'; known keys: u, lb, overlap, head_groups, keep_kv, kv_chunks",
        ),
        ("u=3", r"u \(3\) must be among 1, 2, 4, 8, the divisors of --cp \(8\)"),
        ("head_groups=3", r"head_groups \(3\) must be among 1, 2, 4"),
        ("lb=yes", r"lb \(yes\) must be on or off"),
        ("lb", r"lb must have values; such as lb=on,off"),
        ("u=1 u=2", r"u must be given once"),
    ],
)
def test_what_is_no_part_of_the_space_is_said(words: str, problem: str) -> None:
    """With the nearest key, or the values that there are."""
    with pytest.raises(UsageError, match=problem):
        read_restriction(words, 8)


def test_flips_are_those_of_pricing_everything_again() -> None:
    """What is skipped, because nobody could overtake, would not have been first."""
    llama, seen = read_model("Llama-3.1-8B"), 0
    for cluster, cp, length in (("cpu-gloo", 8, 8192), ("hgx-h100", 2, 8192),
                                ("atlas-800t-a2", 16, 16384)):  # fmt: skip
        found = run(llama, cluster, overlap=True, handoffs=True, cp_size=cp, seq_len=length)
        every: list[tuple[str, float, Config]] = []
        for name, value in assumed_numbers(found.cluster):
            for other in ends_of(name, value):
                changed = with_number(found.cluster, name, other)
                again = min(
                    (priced_again(llama, changed, found.workload, one) for one in found.ranking),
                    key=lambda one: one.order,
                )
                if again.config != found.ranking[0].config:
                    every.append((name, six_digits(other), again.config))
        assert [(flip.number, flip.other, flip.winner) for flip in found.flips] == every
        seen += len(every)
    assert seen


def test_streams_of_k_and_v_are_searched_where_they_are_named() -> None:
    """Only where something is gathered, and synchronously; the rules of hp_cp have a number."""
    points, _ = enumerate_space(8, overlap=True, only=read_restriction("kv_chunks=4,8", 8))

    assert {(p.ulysses_degree, p.kv_chunks) for p in points} == {
        (u, n) for u in (1, 2, 4) for n in (4, 8)
    }
    ulysses = first(model(32, 32), Config(ulysses_degree=8, kv_chunks=4))
    balanced = first(model(32, 32), Config(ulysses_degree=1, load_balance=True, kv_chunks=4))
    ahead = first(model(32, 32), Config(ulysses_degree=1, overlap=True, kv_chunks=4))
    assert {found.rule for found in (ulysses, balanced, ahead)} == {"V16"}
    assert "gather of k and v" in ulysses.message and "load_balance=True" in balanced.message


def test_a_balanced_hybrid_is_a_point_with_a_style() -> None:
    """Named or among the variants; load_balance itself stays refused in Hybrid."""
    only = read_restriction("u=2,4 balance_hybrid=on,off", 8)
    points, _ = enumerate_space(8, overlap=False, only=only)

    assert {(p.ulysses_degree, p.balance_hybrid) for p in points if not p.load_balance} == {
        (u, balance) for u in (2, 4) for balance in (True, False)
    }
    assert first(model(32, 32), Config(ulysses_degree=2, load_balance=True)).rule == "V05"
    assert first(model(32, 32), Config(ulysses_degree=1, balance_hybrid=True)).rule == "V05"
    only = read_restriction("u=2 lb=off balance_hybrid=on", 8)
    result = search(
        model(32, 32), read_cluster("atlas-800t-a2"), Workload(seq_len=131072, cp_size=8),
        overlap=False, only=only,
    )  # fmt: skip
    assert result.plan is not None
    (entry,) = result.plan.entries
    assert entry.style_kwargs()["balance_hybrid"] is True
    assert entry.plan.load_balance and entry.plan.mode == "hybrid"
