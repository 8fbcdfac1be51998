"""Windows that are fetched and streams of K and V in the space: which points, which rules, when."""

from __future__ import annotations

from typing import Any

import pytest

from hp_cp.plan import Plan
from hp_tune.clusters.cluster_files import read_cluster
from hp_tune.errors import PlanMismatchError
from hp_tune.models.model import Attention, Model
from hp_tune.plans.plan import Entry
from hp_tune.searching.engine import NothingValidError, Result, search
from hp_tune.searching.restriction import read_restriction
from hp_tune.searching.rules import Rejection, check
from hp_tune.searching.space import enumerate_space
from hp_tune.workload import Config, Workload

FULL = Attention(num_heads=32, num_kv_heads=8, head_size=128, v_head_size=128)
WINDOW = FULL.model_copy(update={"kind": "sliding", "window": 512})
SINKS = WINDOW.model_copy(update={"window": 128, "sink_tokens": 4})


def model(*layers: Attention) -> Model:
    """A model of these layers."""
    return Model(
        name="m", model_type="m", hidden_size=4096, layers=layers, active_mlp_size=512, mlp_size=512
    )


def run(*layers: Attention, words: str = "", seq_len: int = 32768, **options: Any) -> Result:
    """Search on 8 ranks of an H100 node; ``words`` restrict the space."""
    if words:
        options["only"] = read_restriction(words, 8)
    workload = Workload(seq_len=seq_len, cp_size=8, causal=options.pop("causal", True))
    return search(model(*layers), read_cluster("hgx-h100"), workload, overlap=False, **options)


def entry(result: Result) -> Entry:
    """The one entry of a plan."""
    assert result.plan is not None
    return result.plan.entries[0]


def first(m: Model, config: Config, **fields: Any) -> Rejection:
    """Return the rejection of one configuration on 8 ranks."""
    workload = Workload(seq_len=32768, cp_size=8, **fields)
    found = check(m, read_cluster("hgx-h100"), workload, config)
    assert isinstance(found, Rejection)
    return found


def test_every_point_comes_with_windows_fetched_where_some_layers_slide() -> None:
    """In Colossal; in the point's own degree too among the variants; no point where none do."""
    plain, _ = enumerate_space(6, overlap=False)
    some, _ = enumerate_space(6, overlap=False, sliding="some")
    more, _ = enumerate_space(6, overlap=False, sliding="some", variants=True)

    assert not any(point.halo for point in plain)
    assert some[::2] == plain
    assert some[1::2] == [point.model_copy(update={"halo": 1}) for point in plain]
    assert {(p.ulysses_degree, p.halo) for p in more if p.halo} == {
        (1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (6, 1),
    }  # fmt: skip
    assert len(set(more)) == len(more)


def test_where_all_layers_slide_the_others_have_no_options() -> None:
    """One point for the degree; what else is said of no layer is the same point."""
    points, duplicates = enumerate_space(6, overlap=True, sliding="all")
    assert [p for p in points if p.halo] == [Config(ulysses_degree=1, halo=1)]
    assert not any(duplicate.config.halo for duplicate in duplicates)
    more, _ = enumerate_space(6, overlap=True, sliding="all", variants=True)
    assert [p.halo for p in more if p.halo] == [1, 2, 3]
    named = read_restriction("halo=1 u=1,6", 6)
    points, duplicates = enumerate_space(6, overlap=False, sliding="all", only=named)
    assert points == [Config(ulysses_degree=1, halo=1)]
    assert {(d.config.ulysses_degree, d.same_as, d.reason) for d in duplicates} == {
        (u, points[0], "all layers slide") for u in (1, 6)
    }
    assert enumerate_space(1, overlap=False, sliding="some")[0] == [Config(ulysses_degree=1)]


def test_the_rules_of_windows_are_those_of_the_plan() -> None:
    """V17: a gather to replace, a divisor, layers that slide, and keys before the query only."""
    both = model(FULL, SINKS)
    ulysses = first(both, Config(ulysses_degree=1, halo=8))
    assert ulysses.rule == "V17"
    assert ulysses.message.startswith(
        "sliding_window (128) must come with a gather of k and v, which ulysses_degree (8) on 8"
    )
    assert "ulysses_degree=1 or 2 or 4" in ulysses.hint
    assert ulysses.numbers == {"cp_size": 8, "halo": 8, "window": 128, "sink_tokens": 4}
    divisor = first(both, Config(ulysses_degree=1, halo=3))
    assert (divisor.rule, divisor.numbers["halo"]) == ("V17", 3)
    assert "divisor of 8" in divisor.hint
    none = first(model(FULL), Config(ulysses_degree=1, halo=1))
    assert (none.rule, none.hint) == ("V17", "leave halo out")
    assert none.message == "halo (1) must come with sliding layers, and m has none"
    ahead = first(both, Config(ulysses_degree=1, halo=1), causal=False)
    assert (ahead.rule, ahead.numbers["causal"]) == ("V17", False)
    # 6 heads in four parts: only the style that the layer runs under is asked
    few = WINDOW.model_copy(update={"num_heads": 6, "num_kv_heads": 6})
    assert first(model(FULL, few), Config(ulysses_degree=1, halo=4)).rule == "V03"
    assert first(model(FULL, few), Config(ulysses_degree=4)).rule == "V03"
    found = check(
        model(FULL, few), read_cluster("hgx-h100"), Workload(seq_len=32768, cp_size=8),
        Config(ulysses_degree=4, halo=1),
    )  # fmt: skip
    assert isinstance(found, Plan)


def test_options_of_full_layers_are_no_concern_of_a_window() -> None:
    """Balance, streams, async and a gather in backward are refused beside a window of one style;
    here sliding layers have their own, without them."""
    m, cluster = model(FULL, WINDOW), read_cluster("hgx-h100")
    workload = Workload(seq_len=32768, cp_size=8, handoffs=True)
    for options in (
        {"load_balance": True}, {"kv_chunks": 4}, {"overlap": True}, {"keep_kv": False},
        {"overlap": True, "head_groups": 2},
    ):  # fmt: skip
        config = Config.model_validate({"ulysses_degree": 1, "halo": 1, **options})
        assert isinstance(check(m, cluster, workload, config), Plan), config


def test_a_rejection_is_told_once() -> None:
    """What is rejected for a reason that the same point without a halo has is left out."""
    result = run(FULL, WINDOW)
    rejected = [config for config, _ in result.rejected]

    assert {rejection.rule for _, rejection in result.rejected} == {"V05"}
    assert not any(config.halo for config in rejected)
    assert {ranked.config.halo for ranked in result.ranking} == {0, 1}
    with pytest.raises(NothingValidError) as error:
        run(FULL, WINDOW, words="halo=8")
    reasons = {rejection.rule for _, rejection in error.value.result.rejected}
    assert reasons == {"V05", "V17"}
    with pytest.raises(NothingValidError):
        run(FULL, words="halo=1")
    assert not any(ranked.config.halo for ranked in run(FULL, WINDOW, causal=False).ranking)


def test_a_plan_has_a_style_for_each_kind_of_layer() -> None:
    """By the names of transformers' layer types; one style only where one serves all."""
    both = entry(run(FULL, SINKS, FULL, words="u=1 lb=on halo=1"))
    styles = both.styles_dict()
    assert list(styles) == ["attention", "sliding_attention"]
    full, window = styles["attention"], styles["sliding_attention"]
    assert (full.load_balance, full.sliding_window) == (True, None)
    assert (window.load_balance, window.ulysses_degree) == (False, 1)
    assert (window.sliding_window, window.sink_tokens) == (128, 4)
    with pytest.raises(PlanMismatchError, match=r"a style for each kind of layer \(attention, sli"):
        both.style()
    assert Entry.model_validate_json(both.model_dump_json()) == both

    alone = entry(run(WINDOW, WINDOW, words="halo=1"))
    assert list(alone.style_specs()) == ["sliding_attention"]
    assert alone.style().sliding_window == 512
    assert alone.style_kwargs()["ulysses_degree"] == 1

    wide = WINDOW.model_copy(update={"window": 1024})
    several = entry(run(WINDOW, FULL, wide, words="u=8 lb=off halo=1"))
    windows = {
        at: spec.arguments.get("sliding_window") for at, spec in several.style_specs().items()
    }
    assert windows == {
        "attention": None, "sliding_attention_512": 512, "sliding_attention_1024": 1024,
    }  # fmt: skip
    assert list(entry(run(FULL, WINDOW, words="u=8 lb=off halo=0")).style_specs()) == ["attention"]


def test_windows_are_fetched_where_that_is_faster_and_the_rest_stays() -> None:
    """Of the same search with and without: the same order of what full layers do."""
    found = run(FULL, WINDOW)
    best, without = found.ranking[0].config, run(FULL, WINDOW, words="halo=0").ranking[0].config

    assert best.halo == 1
    assert best.of_layers(slide=False) == without
    assert best.of_layers(slide=True) == Config(ulysses_degree=1, halo=1)
    assert without.of_layers(slide=True) is without


def test_streams_are_searched_only_if_nothing_fits_without() -> None:
    """Then it is said; what fits keeps its winner and its number of points."""
    fits = run(FULL, recompute="off")
    assert all(ranked.config.kv_chunks == 1 for ranked in fits.ranking)
    assert all(config.kv_chunks == 1 for config, _ in fits.rejected)
    # one layer: K and V of the whole sequence beside each other take 2 x 8 GiB, and a copy
    heads = FULL.model_copy(update={"num_heads": 31, "num_kv_heads": 31})
    long = {"seq_len": 2**21, "recompute": "off"}
    with pytest.raises(NothingValidError):
        run(heads, words="kv_chunks=1", **long)
    streamed = run(heads, **long)
    assert {ranked.config.kv_chunks for ranked in streamed.ranking} <= {4, 8}
    assert any("kv_chunks" in note for note in streamed.notes)
    assert {c.kv_chunks for c, r in streamed.rejected if r.rule == "V11"} >= {1}


def test_the_front_of_time_and_memory_has_streams() -> None:
    """They are smaller than all else and not the fastest; by time alone they are no points."""
    found = run(FULL, words="u=1", objective="pareto")
    chunks = [ranked.config.kv_chunks for ranked in found.front]

    assert found.ranking[0].config.kv_chunks == 1
    assert chunks[0] == 1 and chunks[-1] == 8
    assert {ranked.config.kv_chunks for ranked in run(FULL, words="u=1").ranking} == {1}


def test_a_part_that_has_no_point_of_its_own_says_what_it_runs_as() -> None:
    """Exit code 3, and not a table without a line."""
    with pytest.raises(NothingValidError) as error:
        run(WINDOW, words="u=2 halo=1")

    assert error.value.message == (
        "--space must leave a configuration of its own: hybrid u=2 halo=1 runs as "
        "colossal u=1 halo=1, for all layers slide"
    )
    assert error.value.exit_code == 3
    with pytest.raises(NothingValidError, match="--space must name a configuration"):
        run(FULL, words="u=8 kv_chunks=4")
